"""Alembic's entry: finds the database and runs the revisions in one transaction."""

from logging.config import fileConfig

from alembic import context

from tinycortex.config import load_settings
from tinycortex.schema import configure_and_run, connect_for_migrations

config = context.config
# A connection handed over means that a program calls, which has its own logging; `alembic` on the
# command line has none, and gets the one of alembic.ini.
if "connection" not in config.attributes and not config.attributes.get("quiet") and config.config_file_name is not None:
    fileConfig(config.config_file_name, disable_existing_loggers=False)

url = context.get_x_argument(as_dictionary=True).get("url") or config.get_main_option("sqlalchemy.url")

if context.is_offline_mode():
    configure_and_run(context, url=url or load_settings().database.url)
elif (connection := config.attributes.get("connection")) is not None:
    configure_and_run(context, connection=connection)
else:
    with connect_for_migrations(url or load_settings().database.url) as connection:
        configure_and_run(context, connection=connection)
