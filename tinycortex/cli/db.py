"""``tinycortex db``: the schema."""

import typer

from tinycortex import schema
from tinycortex.cli.opening import settings_of
from tinycortex.cli.output import print_error, print_line

app = typer.Typer(help="Bring the schema up to date, or look at it.", no_args_is_help=True)


@app.command()
def upgrade(ctx: typer.Context, revision: str = "head") -> None:
    """Bring the database to the newest revision, making it when there is none. No row is lost."""
    url, name = _database_of(ctx)
    schema.upgrade(url, revision, schema=name)
    print_line(f"at revision {schema.current(url, schema=name)}")


@app.command()
def current(ctx: typer.Context) -> None:
    """Print the revision that the database is at; exit 1 when it has none."""
    url, name = _database_of(ctx)
    revision = schema.current(url, schema=name)
    if revision is None:
        print_error("the database has no tinycortex schema; run: tinycortex db upgrade")
        raise typer.Exit(1)
    print_line(revision)


@app.command()
def check(ctx: typer.Context) -> None:
    """Compare the database with the models; print each difference and exit 1 when there is one."""
    url, name = _database_of(ctx)
    differences = schema.check(url, schema=name)
    for difference in differences:
        print_line(difference)
    if differences:
        raise typer.Exit(1)
    print_line("no difference")


@app.command()
def stamp(ctx: typer.Context, revision: str = "head") -> None:
    """Record a revision without running anything, for a database that was set up by other means."""
    url, name = _database_of(ctx)
    schema.stamp(url, revision, schema=name)
    print_line(f"stamped {revision}")


@app.command()
def sql(ctx: typer.Context, revisions: str = "base:head") -> None:
    """Print the SQL of the revisions, without connecting to any database."""
    url, name = _database_of(ctx)
    typer.echo(schema.sql(url, revisions, schema=name), nl=False)


def _database_of(ctx: typer.Context) -> tuple[str, str | None]:
    """Return the URL in force, and the schema that the tables lie in."""
    database = settings_of(ctx).database
    return database.url, database.schema_name
