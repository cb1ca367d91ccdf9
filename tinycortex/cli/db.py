"""``tinycortex db``: the schema."""

import typer

from tinycortex import schema
from tinycortex.cli.opening import settings_of
from tinycortex.cli.output import print_error, print_line

app = typer.Typer(help="Bring the schema up to date, or look at it.", no_args_is_help=True)


@app.command()
def upgrade(ctx: typer.Context, revision: str = "head") -> None:
    """Bring the database to the newest revision, making it when there is none. No row is lost."""
    url = settings_of(ctx).database.url
    schema.upgrade(url, revision)
    print_line(f"at revision {schema.current(url)}")


@app.command()
def current(ctx: typer.Context) -> None:
    """Print the revision that the database is at; exit 1 when it has none."""
    revision = schema.current(settings_of(ctx).database.url)
    if revision is None:
        print_error("the database has no tinycortex schema; run: tinycortex db upgrade")
        raise typer.Exit(1)
    print_line(revision)


@app.command()
def check(ctx: typer.Context) -> None:
    """Compare the database with the models; print each difference and exit 1 when there is one."""
    differences = schema.check(settings_of(ctx).database.url)
    for difference in differences:
        print_line(difference)
    if differences:
        raise typer.Exit(1)
    print_line("no difference")


@app.command()
def stamp(ctx: typer.Context, revision: str = "head") -> None:
    """Record a revision without running anything, for a database that was set up by other means."""
    schema.stamp(settings_of(ctx).database.url, revision)
    print_line(f"stamped {revision}")


@app.command()
def sql(ctx: typer.Context, revisions: str = "base:head") -> None:
    """Print the SQL of the revisions, without connecting to any database."""
    typer.echo(schema.sql(settings_of(ctx).database.url, revisions), nl=False)
