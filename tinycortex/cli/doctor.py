"""``tinycortex doctor``: what is wrong with the database, and what to do about it."""

from dataclasses import asdict

import typer

from tinycortex.app import Cortex
from tinycortex.cli.opening import AsJson, settings_of
from tinycortex.cli.output import print_json, print_line
from tinycortex.domain.findings import Severity


def doctor(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Look for faults of file, schema and rows, a line each, and change nothing; exit 1 when one is an error."""
    # Not open_cortex: it makes a database that is missing, and refuses one that has something to be found.
    with Cortex(settings_of(ctx)) as cortex:
        findings = cortex.diagnose()
    healthy = all(finding.severity is not Severity.ERROR for finding in findings)
    if as_json:
        print_json({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            print_line(f"{finding.severity} {finding.code}: {finding.found}. What to do: {finding.advice}.")
        if not findings:
            print_line("nothing found")
    if not healthy:
        raise typer.Exit(1)
