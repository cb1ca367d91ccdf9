"""Migrations in a host's process, in several at once, killed, and from the command line."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import foreign_file
from tinycortex import schema

ROOT = Path(__file__).resolve().parents[2]

UPGRADE = "import sys; from tinycortex import schema; schema.upgrade(sys.argv[1])"

DIE_HALFWAY = """
import os, sys
from alembic import op
from tinycortex import schema

add_column = op.add_column

def die(*arguments, **options):
    add_column(*arguments, **options)
    os._exit(9)

op.add_column = die
schema.upgrade(sys.argv[1])
"""


def python(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE)


@pytest.mark.parametrize("made", ["empty", "foreign"])
def test_five_processes_upgrade_at_once(empty_database_url: str, made: str) -> None:
    """Replicas that start together all succeed, and the schema is made once."""
    if made == "foreign":
        foreign_file.make(empty_database_url)
    workers = [python(UPGRADE, empty_database_url) for _ in range(5)]
    outcomes = [(worker.communicate()[1], worker.returncode) for worker in workers]
    assert outcomes == [(b"", 0)] * 5
    assert schema.check(empty_database_url) == []


def test_four_threads_upgrade_at_once(empty_database_url: str) -> None:
    """Alembic's global state is used by one thread at a time."""
    faults: list[BaseException] = []

    def upgrade() -> None:
        try:
            schema.upgrade(empty_database_url)
        except BaseException as error:  # noqa: BLE001 - whatever a thread met is the test's to see
            faults.append(error)

    threads = [threading.Thread(target=upgrade) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert schema.check(empty_database_url) == []


def test_a_killed_upgrade_leaves_the_file_as_it_was(empty_database_url: str) -> None:
    """All revisions run in one transaction, so a kill in the middle keeps none of them; a rerun completes."""
    foreign_file.make(empty_database_url)
    before = foreign_file.read_rows(empty_database_url)
    worker = python(DIE_HALFWAY, empty_database_url)
    worker.communicate()
    assert worker.returncode == 9
    assert foreign_file.read_rows(empty_database_url) == before
    assert schema.current(empty_database_url) is None
    schema.upgrade(empty_database_url)
    assert schema.check(empty_database_url) == []


def test_the_hosts_logging_is_untouched(empty_database_url: str) -> None:
    """No logger is disabled, no handler added, no level changed, in-process or offline."""
    host = logging.getLogger("a_host_logger_of_before")
    watched = [logging.getLogger(), host, logging.getLogger("alembic"), logging.getLogger("sqlalchemy")]

    def look() -> list[tuple[list[logging.Handler], int, bool, bool]]:
        return [(list(logger.handlers), logger.level, logger.disabled, logger.propagate) for logger in watched]

    before = look()
    schema.upgrade(empty_database_url)
    schema.sql(empty_database_url)
    schema.downgrade(empty_database_url, "base")
    assert look() == before


def test_the_hosts_process_is_untouched(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No change of directory, no entry in sys.path, no environment variable, nothing on stdout."""
    monkeypatch.chdir("/")
    before = (Path.cwd(), list(sys.path), dict(os.environ))
    schema.upgrade(empty_database_url)
    assert (Path.cwd(), list(sys.path), dict(os.environ)) == before


def test_nothing_is_printed(empty_database_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A library's upgrade is silent; what it says offline is what it returns."""
    schema.upgrade(empty_database_url)
    schema.stamp(empty_database_url)
    schema.sql(empty_database_url)
    assert capfd.readouterr() == ("", "")


def alembic(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("door", ["-x", "environment"])
def test_alembics_own_command_works_in_a_checkout(empty_database_url: str, door: str) -> None:
    """``alembic upgrade head`` reaches the same database, by ``-x url=`` or by our environment variable."""
    if door == "-x":
        done = alembic("-x", f"url={empty_database_url}", "upgrade", "head")
    else:
        done = alembic("upgrade", "head", TINYCORTEX_DATABASE__URL=empty_database_url)
    assert done.returncode == 0, done.stderr
    assert schema.check(empty_database_url) == []


def test_alembic_check_is_clean_and_sees_drift(database_url: str) -> None:
    """The filters of ``env.py`` keep foreign tables out, and let a missing column of ours be seen."""
    with foreign_file.connect(database_url) as connection:
        connection.exec_driver_sql("CREATE TABLE theirs (id TEXT PRIMARY KEY)")
    clean = alembic("-x", f"url={database_url}", "check")
    assert clean.returncode == 0, clean.stdout + clean.stderr
    with foreign_file.connect(database_url) as connection:
        connection.exec_driver_sql("ALTER TABLE mem_tree_jobs DROP COLUMN heals")
    assert alembic("-x", f"url={database_url}", "check").returncode != 0


def test_alembic_check_is_clean_on_an_adopted_file(empty_database_url: str) -> None:
    """What SQLite cannot change in a table that another program made is no difference to complain of."""
    foreign_file.make(empty_database_url)
    schema.upgrade(empty_database_url)
    done = alembic("-x", f"url={empty_database_url}", "check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_offline_script_needs_no_database(empty_database_url: str) -> None:
    """``--sql`` connects to nothing, creates nothing, and writes the script of ``schema.sql``."""
    done = alembic("-x", f"url={empty_database_url}", "upgrade", "head", "--sql")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == schema.sql(empty_database_url).strip()
    assert schema.current(empty_database_url) is None
    assert not Path(empty_database_url.removeprefix("sqlite:///")).exists()
