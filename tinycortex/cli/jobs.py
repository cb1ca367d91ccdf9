"""``tinycortex jobs``: look at jobs, try failed ones again, cancel, purge."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from tinycortex.cli.opening import AsJson, open_cortex
from tinycortex.cli.output import instant, print_json, print_line, print_table
from tinycortex.domain.jobs import TERMINAL_STATUSES, Job, JobStatus
from tinycortex.domain.redact import scrub_for_log

app = typer.Typer(help="Look at jobs, and decide about them.", no_args_is_help=True)

Raw = Annotated[bool, typer.Option("--raw", help="Show payload and errors as they are stored, secrets and all.")]

_TEXTS = ("payload_json", "rerun_payload_json", "last_error")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _document(job: Job, *, raw: bool) -> dict[str, Any]:
    document = asdict(job)
    if not raw:
        document |= {name: scrub_for_log(document[name]) for name in _TEXTS if document[name] is not None}
    return document


@app.command("list")
def list_jobs(
    ctx: typer.Context,
    status: Annotated[JobStatus | None, typer.Option(help="Only jobs of this status.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only jobs of this kind.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most jobs to list.")] = 50,
    raw: Raw = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with open_cortex(ctx) as cortex:
        documents = [_document(job, raw=raw) for job in cortex.jobs.list_jobs(status=status, kind=kind, limit=limit)]
    if as_json:
        print_json(documents)
        return
    rows = [
        (
            job["id"],
            job["kind"],
            job["status"],
            f"{job['attempts']}/{job['max_attempts']}",
            instant(job["available_at_ms"]),
            job["last_error"],
        )
        for job in documents
    ]
    print_table(("id", "kind", "status", "attempts", "available", "last error"), rows)


@app.command()
def show(ctx: typer.Context, job_id: str, raw: Raw = False, as_json: AsJson = False) -> None:
    """Show one job whole."""
    with open_cortex(ctx) as cortex:
        document = _document(cortex.get_job(job_id), raw=raw)
    if as_json:
        print_json(document)
        return
    rows = [(name, instant(value) if name.endswith("_ms") else value) for name, value in document.items()]
    print_table(("field", "value"), rows)


@app.command()
def retry(
    ctx: typer.Context,
    job_id: Annotated[str | None, typer.Argument(help="One failed job.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Every failed job.")] = False,
    transient: Annotated[bool, typer.Option("--transient", help="Every failed job that is not unrecoverable.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make failed jobs ready again, with a fresh budget."""
    if (job_id is not None) + failed + transient != 1:
        raise typer.BadParameter("give exactly one of a job's id, --failed and --transient")
    with open_cortex(ctx) as cortex:
        requeued = cortex.requeue_transient_failed() if transient else cortex.requeue_failed(job_id)
    if as_json:
        print_json(asdict(requeued))
    else:
        print_line(
            f"ready again {requeued.revived}, superseded {requeued.superseded}, "
            f"left because their key is active {requeued.blocked}"
        )
    if job_id is not None and requeued.revived == 0:
        raise typer.Exit(1)


@app.command()
def cancel(ctx: typer.Context, job_id: str, as_json: AsJson = False) -> None:
    """Cancel a ready job, or ask the holder of a running one to stop."""
    with open_cortex(ctx) as cortex:
        status = cortex.cancel(job_id)
    if as_json:
        print_json({"id": job_id, "status": status})
    else:
        print_line("cancelled" if status is JobStatus.CANCELLED else "asked to stop; it will settle cancelled")


@app.command()
def purge(
    ctx: typer.Context,
    older_than: Annotated[str, typer.Option(help="Least age, such as 90s, 30m, 12h or 7d.")],
    status: Annotated[list[JobStatus] | None, typer.Option(help="Only jobs of this status.")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete settled jobs of that age; never a ready or running one."""
    number, unit = older_than[:-1], older_than[-1:]
    if unit not in _UNITS_S or not (number.isascii() and number.isdigit()):
        raise typer.BadParameter(f"--older-than takes a number with s, m, h or d, such as 7d, not {older_than!r}")
    with open_cortex(ctx) as cortex:
        purged = cortex.purge(int(number) * _UNITS_S[unit] * 1000, status or TERMINAL_STATUSES)
    if as_json:
        print_json({"purged": purged})
    else:
        print_line(f"purged {purged}")


@app.command("purge-retired")
def purge_retired(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Delete the jobs of retired kinds."""
    with open_cortex(ctx) as cortex:
        purged = cortex.purge_retired_jobs()
    if as_json:
        print_json({"purged": purged})
    else:
        print_line(f"purged {purged}")
