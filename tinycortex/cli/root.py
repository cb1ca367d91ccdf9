"""The root of the command line: its global options and its commands."""

import logging
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from tinycortex.cli import db, doctor, ingest, jobs, move, status, tree, work
from tinycortex.cli.opening import Invocation
from tinycortex.domain.redact import scrub_for_log

app = typer.Typer(
    name="tinycortex",
    help="A durable SQL job queue that keeps an agent's memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(db.app, name="db")
app.add_typer(jobs.app, name="jobs")
app.command("ingest")(ingest.ingest)
app.command("work")(work.work)
app.command("scheduler")(work.scheduler)
app.command("status")(status.status)
app.command("tick")(work.tick)
app.command("doctor")(doctor.doctor)
app.command("move")(move.move)
app.command("tree")(tree.tree)


class _Scrubbing(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return scrub_for_log(super().format(record))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tinycortex {version('tinycortex')}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database-url",
            metavar="URL",
            help="Database to use, such as sqlite:////path/to/memory.db. Default: "
            "TINYCORTEX_DATABASE__URL, or sqlite:///chunks.db, which is made at first use.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to standard error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keep an agent's memory in one database."""
    ctx.obj = Invocation(database_url)
    logger = logging.getLogger("tinycortex")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Scrubbing("%(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
