"""Opening the queue that a command is about."""

from dataclasses import dataclass
from typing import Annotated

import typer

from tinycortex import schema
from tinycortex.app import Cortex
from tinycortex.config import DEFAULT_DATABASE_URL, Settings, load_settings

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(slots=True)
class Invocation:
    """What stood before the command's name."""

    database_url: str | None = None


def settings_of(ctx: typer.Context) -> Settings:
    """Return the settings in force: the environment's, with the URL of the command line."""
    settings = load_settings()
    invocation = ctx.ensure_object(Invocation)
    return settings if invocation.database_url is None else settings.with_url(invocation.database_url)


def refuse_database_url(ctx: typer.Context, instead: str) -> None:
    """Tell whoever gave ``--database-url`` to a command that does not read it what to name ``instead``."""
    if ctx.ensure_object(Invocation).database_url is not None:
        raise typer.BadParameter(
            f"this command does not read it; name the databases by {instead}", ctx, param_hint="--database-url"
        )


def open_cortex(ctx: typer.Context, settings: Settings | None = None) -> Cortex:
    """Open the queue of ``settings``, or of those in force.

    The default database is made and upgraded here; any other must be at the newest revision.
    """
    settings = settings or settings_of(ctx)
    url = settings.database.url
    if url == DEFAULT_DATABASE_URL and schema.current(url) != schema.HEAD:
        schema.upgrade(url)
    return Cortex.open(url, settings=settings)
