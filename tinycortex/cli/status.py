"""``tinycortex status``: how the queue is doing."""

from dataclasses import asdict

import typer

from tinycortex.cli.opening import AsJson, open_cortex
from tinycortex.cli.output import instant, print_json, print_line, print_table


def status(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Show jobs by status and kind, failures, unhandled kinds, the oldest wait, leases, permits and the backfill."""
    with open_cortex(ctx) as cortex:
        seen = cortex.status()
    if as_json:
        print_json(asdict(seen))
        return
    rows = [[kind, *(counts.get(word, 0) for word in seen.by_status)] for kind, counts in seen.by_kind.items()]
    print_table(("kind", *seen.by_status), [*rows, ["all", *seen.by_status.values()]])
    for title, counts in (
        ("failed by reason", seen.failed_by_reason),
        ("failed by class", seen.failed_by_class),
        ("unhandled", seen.unhandled),
    ):
        if counts:
            print_line(f"{title}: " + ", ".join(f"{name} {jobs}" for name, jobs in counts.items()))
    age = "nothing is due" if seen.oldest_ready_age_ms is None else f"{seen.oldest_ready_age_ms} ms"
    print_line(f"oldest due: {age}")
    print_line(f"leases held: {seen.leases_held}, expired: {seen.leases_expired}")
    if seen.llm_permits_global is not None:
        closed = "" if seen.llm_closed_until_ms is None else f", closed until {instant(seen.llm_closed_until_ms)}"
        print_line(f"LLM permits of all workers: {seen.llm_permits_held} of {seen.llm_permits_global} held{closed}")
    print_line(f"backfill in progress: {'yes' if seen.backfill_in_progress else 'no'}")
