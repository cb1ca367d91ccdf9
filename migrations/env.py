"""Alembic's entry: finds the database and runs the revisions in one transaction."""

from logging.config import fileConfig

from alembic import context

from tinycortex.config import load_settings
from tinycortex.schema import configure_and_run, connect_for_migrations, write_script

config = context.config
# A connection handed over means that a program calls, which has its own logging; `alembic` on the
# command line has none, and gets the one of alembic.ini.
if "connection" not in config.attributes and not config.attributes.get("quiet") and config.config_file_name is not None:
    fileConfig(config.config_file_name, disable_existing_loggers=False)

settings = config.attributes.get("settings")
if settings is None:
    given = load_settings()
    url = context.get_x_argument(as_dictionary=True).get("url") or config.get_main_option("sqlalchemy.url")
    settings = (given.with_url(url) if url else given).database

if context.is_offline_mode():
    write_script(context, settings)
elif (connection := config.attributes.get("connection")) is not None:
    configure_and_run(context, connection=connection)
else:
    with connect_for_migrations(settings) as connection:
        configure_and_run(context, connection=connection)
