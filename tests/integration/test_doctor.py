"""``tinycortex doctor`` on the file, the schema and the disk: each fault is found, and nothing is touched."""

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from background import BOUND_S, outcome, program
from tinycortex import Cortex, Database, FindingCode, NewJob, Settings, schema
from tinycortex.config import DatabaseSettings
from tinycortex.testing import NewJobFactory

Run = Callable[..., tuple[int, str, str]]
OpenCortex = Callable[..., Cortex]

MIB = 2**20

# A kill leaves the write-ahead log behind.
ENQUEUE_AND_DIE = """
import os, sys
from tinycortex import Cortex, NewJob

cortex = Cortex.open(sys.argv[1])
cortex.run_once()
cortex.enqueue(NewJob(kind="custom", payload_json="{}"))
os._exit(9)
"""

# In another journal mode than WAL it leaves half a write in the file, and a journal to take it back.
WRITE_AND_DIE = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in (
    "PRAGMA journal_mode=delete", "PRAGMA cache_size=1", "BEGIN", "CREATE TABLE bulk (data BLOB)",
    "INSERT INTO bulk VALUES (zeroblob(1000000))", "INSERT INTO bulk SELECT * FROM bulk",
):
    connection.execute(statement)
os._exit(9)
"""

BEGIN_TO_WRITE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
try:
    connection.execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    print(error.sqlite_errorname)
"""


@pytest.fixture
def path(tmp_path: Path, sqlite_template: Path) -> Path:
    """The default database of whoever runs a command in ``tmp_path``: sound, empty, opened by nobody."""
    return Path(shutil.copyfile(sqlite_template, tmp_path / "chunks.db"))


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file as any other program would; every statement is its own transaction."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def damage(path: Path, name: str) -> None:
    """Overwrite the first page of a table or an index, or of the file for any other name."""
    with connected(path) as connection:
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master").fetchall())
    page = roots.get(name, 1)
    with path.open("r+b") as file:
        file.seek((page - 1) * page_size)
        file.write(b"\xff" * page_size)


def examine(run: Run) -> tuple[int, list[str]]:
    """Run the doctor on the default database; return its exit code and the codes that it found."""
    code, out, err = run("doctor", "--json")
    document = json.loads(out)
    assert err == ""
    assert document["healthy"] is (code == 0)
    assert document["healthy"] is all(finding["severity"] != "error" for finding in document["findings"])
    return code, [finding["code"] for finding in document["findings"]]


def all_files(folder: Path, but: str = "nothing") -> dict[str, tuple[bytes, int]]:
    """Return what is in every file of a folder, and when it was written."""
    return {
        file.name: (file.read_bytes() if file.is_file() else b"", file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if not file.name.endswith(but)
    }


# Healthy, and left alone


def test_a_healthy_database_has_nothing(run: Run, tmp_path: Path) -> None:
    """After real work the command says so in one line, or in one document, and succeeds."""
    (tmp_path / "note.md").write_text("# Note\n\nAda asked Grace for the figures. They are due on Friday.\n")
    run("ingest", "note.md", "--work")
    assert run("doctor") == (0, "nothing found\n", "")
    assert json.loads(run("doctor", "--json")[1]) == {"healthy": True, "findings": []}


@pytest.mark.parametrize("state", ["sound", "damaged", "no database", "empty", "another journal", "nothing"])
def test_a_look_changes_no_byte_and_makes_no_file(run: Run, path: Path, state: str) -> None:
    """Not the file, nothing beside it, and a database that is not there is not made."""
    match state:
        case "damaged":
            damage(path, "idx_mem_tree_jobs_claim")
        case "no database":
            path.write_bytes(b"not a database at all, by any means" * 100)
        case "empty":
            path.write_bytes(b"")
        case "another journal":
            with connected(path) as connection:
                connection.execute("PRAGMA journal_mode=delete")
        case "nothing":
            path.unlink()
    (path.parent / "chunks.db-workers").mkdir()
    before = all_files(path.parent)
    run("doctor")
    run("doctor", "--json")
    assert all_files(path.parent) == before


def test_what_a_killed_process_left_is_read_and_left(run: Run, path: Path) -> None:
    """Its log holds a row that the file does not; the row is seen, and the log stays a log."""
    with program(ENQUEUE_AND_DIE, f"sqlite:///{path}") as killed:
        assert killed.wait(BOUND_S) == 9
    before = all_files(path.parent, but="-shm")
    assert examine(run) == (0, ["kind_unhandled"])
    assert all_files(path.parent, but="-shm") == before
    assert set(before) > {"chunks.db", "chunks.db-wal", "chunks.db-workers"}


def test_a_queue_that_is_open_can_be_diagnosed(open_cortex: OpenCortex) -> None:
    """The process itself may ask while it works, and what it has committed counts."""
    cortex = open_cortex()
    assert cortex.diagnose() == []
    cortex.enqueue(NewJob(kind="custom", payload_json="{}"))
    assert [finding.code for finding in cortex.diagnose()] == [FindingCode.KIND_UNHANDLED]


def test_a_diagnosis_takes_no_lock_from_its_own_process(open_cortex: OpenCortex, database_url: str) -> None:
    """A system's locks belong to the process: to open the file and close it again would drop all of them."""
    settings = Settings(database=DatabaseSettings(url=database_url, journal_mode="truncate"))
    cortex = open_cortex(settings)
    with cortex.transaction() as session:
        cortex.enqueue(NewJobFactory.build(), session=session)
        assert cortex.diagnose() == []
        with program(BEGIN_TO_WRITE, database_url.removeprefix("sqlite:///")) as other:
            assert outcome(other) == (0, "SQLITE_BUSY\n", "")


@pytest.mark.parametrize(("times", "codes"), [(1, []), (9, ["database_unreadable"])])
def test_what_is_changed_beneath_a_look_is_no_damage(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch, times: int, codes: list[str]
) -> None:
    """A file at rest is read without locks; when it was changed meanwhile, it is read again."""
    find_damage = Database.find_damage
    looks: list[int] = []

    def torn(database: Database) -> list[str]:
        looks.append(1)
        if len(looks) > times:
            return find_damage(database)
        with connected(path) as connection:
            connection.execute(f"PRAGMA user_version={len(looks)}")
        return ["torn"]

    monkeypatch.setattr(Database, "find_damage", torn)
    assert examine(run) == (len(codes), codes)


# The file


def test_a_missing_database_is_one_line(run: Run) -> None:
    """The line says what to do, and the exit code is 1."""
    code, out, err = run("doctor")
    assert (code, len(out.splitlines()), err) == (1, 1, "")
    assert out.startswith("error database_missing: there is no database at sqlite:///chunks.db")
    assert "tinycortex db upgrade" in out
    assert run("--database-url", "sqlite:///nowhere/x.db", "doctor")[0] == 1


def test_a_locked_database_is_unreadable(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program that keeps the file for itself is no damage."""
    monkeypatch.setenv("TINYCORTEX_DATABASE__BUSY_TIMEOUT_MS", "0")
    with connected(path) as connection:
        connection.execute("PRAGMA journal_mode=delete")
        connection.execute("BEGIN EXCLUSIVE")
        assert examine(run) == (1, ["database_unreadable"])


def test_a_write_that_was_killed_is_unreadable_until_a_worker_has_opened_it(run: Run, path: Path) -> None:
    """The journal that takes it back is left for it."""
    with program(WRITE_AND_DIE, str(path)) as killed:
        assert killed.wait(BOUND_S) == 9
    before = all_files(path.parent)
    assert path.with_name("chunks.db-journal").stat().st_size > 0
    assert examine(run) == (1, ["database_unreadable"])
    assert all_files(path.parent) == before
    assert run("work", "--drain")[0] == 0
    assert examine(run) == (0, [])


def test_a_log_that_cannot_be_read_is_a_finding(run: Run, path: Path) -> None:
    """Rows may be in it, so the file alone is not believed."""
    path.with_name("chunks.db-wal").mkdir()
    assert examine(run) == (1, ["database_unreadable"])


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", ["mem_tree_jobs", "idx_mem_tree_jobs_claim", "mem_tree_chunks", "the head"])
def test_damage_is_found_wherever_it_is(run: Run, path: Path, name: str, opened: bool) -> None:
    """A table, an index, a table that nothing reads just now, and the head of the file."""
    damage(path, name)
    with connected(path) if opened and name != "the head" else nullcontext() as connection:
        if connection is not None:
            connection.execute("PRAGMA user_version=1")  # into the log, which exists from now on
        assert examine(run) == (1, ["database_damaged"])
    out = run("doctor")[1]
    assert len(out.splitlines()) == 1
    assert "chunks.db" in out


@pytest.mark.parametrize("kept", [10, 5_000, 50_000])
def test_a_file_that_was_cut_off_is_damaged(run: Run, path: Path, kept: int) -> None:
    """A copy that did not end."""
    with path.open("r+b") as file:
        file.truncate(kept)
    assert examine(run) == (1, ["database_damaged"])


# The schema


def test_a_database_without_our_schema_is_told(run: Run, path: Path) -> None:
    """An empty file, and the database of another program."""
    path.write_bytes(b"")
    assert examine(run) == (1, ["schema_missing"])
    with connected(path) as connection:
        connection.execute("CREATE TABLE other (id INTEGER)")
    assert examine(run) == (1, ["schema_missing"])


def test_another_revision_is_told(run: Run, path: Path) -> None:
    """An older one, and one that this package does not know yet."""
    schema.downgrade(f"sqlite:///{path}", "0002")
    assert examine(run) == (1, ["schema_outdated"])
    with connected(path) as connection:
        connection.execute("UPDATE tinycortex_alembic_version SET version_num = '9999'")
    assert examine(run) == (1, ["schema_outdated"])
    assert "9999" in run("doctor")[1]


@pytest.mark.parametrize(
    ("change", "findings"),
    [
        ("DROP INDEX idx_mem_tree_jobs_claim", 1),
        ("DROP INDEX idx_mem_tree_jobs_ready; CREATE INDEX idx_mem_tree_jobs_ready ON mem_tree_jobs (status)", 1),
        ("ALTER TABLE mem_tree_jobs DROP COLUMN claimed_at_ms", 1),
        ("DROP TABLE mem_tree_jobs", 1),
        ("DROP TABLE mem_tree_score; DROP INDEX idx_mem_tree_chunks_owner", 2),
    ],
)
def test_an_altered_schema_is_told_and_the_advice_mends_it(run: Run, path: Path, change: str, findings: int) -> None:
    """A line for each difference; two commands put back what is missing."""
    with connected(path) as connection:
        connection.executescript(change)
    assert examine(run) == (1, ["schema_altered"] * findings)
    out = run("doctor")[1]
    for command in ("db stamp --revision base", "db upgrade"):
        assert f"tinycortex {command}" in out
        assert run(*command.split())[0] == 0
    assert examine(run) == (0, [])


@pytest.mark.parametrize(("wanted", "mode"), [("wal", "delete"), ("truncate", "wal")])
def test_another_journal_than_the_wanted_one_is_told(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, mode: str
) -> None:
    """The look does not switch it, though every other command would."""
    with connected(path) as connection:
        connection.execute(f"PRAGMA journal_mode={mode}")
    monkeypatch.setenv("TINYCORTEX_DATABASE__JOURNAL_MODE", wanted)
    assert examine(run) == (0, ["journal_mode"])
    assert examine(run) == (0, ["journal_mode"])
    assert run("jobs", "list")[0] == 0
    assert examine(run) == (0, [])


# The disk


@pytest.mark.parametrize(
    ("free", "seen"), [(15 * MIB, (1, ["disk_full"])), (255 * MIB, (0, ["disk_low"])), (256 * MIB, (0, []))]
)
@pytest.mark.usefixtures("path")
def test_a_disk_that_runs_full_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, free: int, seen: tuple[int, list[str]]
) -> None:
    """Before a write is refused."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=free))
    assert examine(run) == seen


def test_a_log_that_is_never_taken_over_is_told(run: Run, path: Path) -> None:
    """One reader that stays keeps every later write in the log."""
    with connected(path) as reader, connected(path) as writer:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM mem_tree_jobs").fetchall()
        writer.execute("PRAGMA synchronous=OFF")
        writer.execute("CREATE TABLE bulk (data BLOB)")
        for _ in range(3):
            writer.execute("INSERT INTO bulk VALUES (zeroblob(23000000))")
        assert examine(run) == (0, ["log_large"])
        reader.execute("COMMIT")
    assert examine(run) == (0, [])


# The command


def test_the_document_has_stable_keys(run: Run) -> None:
    """Scripts read these."""
    document = json.loads(run("doctor", "--json")[1])
    assert set(document) == {"healthy", "findings"}
    assert [set(finding) for finding in document["findings"]] == [{"code", "severity", "found", "advice"}]


@pytest.mark.parametrize("arguments", [["--nonsense"], ["chunks.db"]])
def test_wrong_usage_is_2(run: Run, arguments: list[str]) -> None:
    """It is told apart from a database that is not well."""
    assert run("doctor", *arguments)[0] == 2


def test_a_finding_is_one_line_without_secrets(run: Run, path: Path) -> None:
    """What another program wrote into a row can neither show a secret nor steer the terminal."""
    with connected(path) as connection:
        connection.execute(
            "INSERT INTO mem_tree_jobs (id, kind, payload_json, available_at_ms, created_at_ms, status) "
            "VALUES ('api_key=hunter2' || char(10) || char(27) || '[31m', 'topic_route', '{}', 0, 0, 'done')"
        )
    code, out, _err = run("doctor")
    assert (code, len(out.splitlines())) == (0, 1)
    assert "hunter2" not in out
    assert "\x1b" not in out
    assert "hunter2" not in run("doctor", "--json")[1]
