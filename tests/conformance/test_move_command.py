"""``tinycortex move``, as its users meet it: one clear line, the right exit code, one JSON document."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from background import BOUND_S
from full_queue import count_rows
from tinycortex import Database, schema
from tinycortex.domain.redact import mask_url
from tinycortex.models import Base
from tinycortex.testing import JobRowFactory, insert_rows

Run = Callable[..., tuple[int, str, str]]

HIDDEN = "postgresql+psycopg://ada:hunter2@nowhere.invalid/db"


def test_the_document_has_stable_keys(run: Run, source_url: str, target_url: str) -> None:
    """Scripts read these; nothing else is printed when nobody watches."""
    code, out, err = run("move", "--from", source_url, "--to", target_url, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert set(report) == {"source", "target", "tables", "active_keys", "seconds"}
    assert (report["source"], report["target"]) == (mask_url(source_url), mask_url(target_url))
    assert set(report["tables"]) == set(Base.metadata.tables)
    for digest in (*report["tables"].values(), report["active_keys"]):
        assert set(digest) == {"rows", "checksum"}
        assert len(digest["checksum"]) == 32
    assert sum(digest["rows"] for digest in report["tables"].values()) == count_rows(target_url)


def test_a_person_is_told_what_was_moved(run: Run, source_url: str, target_url: str) -> None:
    """A row for each table, and a line that says where from and where to."""
    code, out, err = run("move", "--from", source_url, "--to", target_url)
    assert (code, err) == (0, "")
    assert all(f"\n{table} " in out for table in Base.metadata.tables)
    assert out.splitlines()[-1].startswith(f"moved from {mask_url(source_url)} to {mask_url(target_url)} in ")


def test_a_person_who_watches_sees_how_far_it_is(source_url: str, target_url: str) -> None:
    """On a terminal there is a bar; standard output stays one document."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "tinycortex", "move", "--from", source_url, "--to", target_url, "--json"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # how a terminal tells that nobody writes to it any more
            while part := os.read(ours, 4096):
                seen += part
        out, _err = process.communicate(timeout=BOUND_S)
    os.close(ours)
    assert process.returncode == 0
    assert json.loads(out)["tables"]["mem_tree_jobs"]["rows"]
    assert re.search(rb"verify .*\D(\d+)/\1\D", seen)


def test_running_jobs_are_one_line_and_1(run: Run, database: Database, database_url: str, target_url: str) -> None:
    """The line says how to wait for them, and nothing is made."""
    insert_rows(database, JobRowFactory.build(running=True))
    code, out, err = run("move", "--from", database_url, "--to", target_url)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "--wait" in err
    assert schema.current(target_url) is None


def test_a_wait_can_be_interrupted(
    run: Run, database: Database, database_url: str, target_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as any other command, and nothing is made."""
    insert_rows(database, JobRowFactory.build(running=True))

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert run("move", "--from", database_url, "--to", target_url, "--wait") == (130, "", "")
    assert schema.current(target_url) is None


def test_a_target_with_rows_is_one_line_and_1(run: Run, source_url: str, target_url: str) -> None:
    """Moving twice is no way to lose anything."""
    command = ("move", "--from", source_url, "--to", target_url)
    assert run(*command)[0] == 0
    rows = count_rows(target_url)
    code, out, err = run(*command)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "has rows already" in err
    assert count_rows(target_url) == rows


@pytest.mark.parametrize(
    "arguments",
    [
        ["move"],
        ["move", "--from", "sqlite:///a.db"],
        ["move", "--to", "sqlite:///a.db"],
        ["move", "sqlite:///a.db", "sqlite:///b.db"],
        ["move", "--from", "sqlite:///a.db", "--to", "sqlite:///b.db", "--nonsense"],
        ["--database-url", "sqlite:///a.db", "move", "--from", "sqlite:///a.db", "--to", "sqlite:///b.db"],
    ],
)
def test_wrong_usage_is_2(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    """Both databases are named, and in this way only; nothing is made."""
    assert run(*arguments)[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("sqlite:///missing.db", "sqlite:///b.db"),
        ("sqlite:///empty.db", "sqlite:///b.db"),
        ("sqlite:///broken.db", "sqlite:///b.db"),
        ("sqlite:///good.db", "sqlite:///broken.db"),
        ("sqlite:///good.db", "sqlite:///nowhere/b.db"),
        ("sqlite:///good.db", "sqlite:///folder"),
        ("sqlite:///good.db", "sqlite:///:memory:"),
        ("sqlite:///good.db", "no url"),
        ("no url", "sqlite:///b.db"),
        ("sqlite:///good.db", HIDDEN),
        (HIDDEN, "sqlite:///b.db"),
        ("sqlite:///good.db", "mysql://ada:hunter2@host/db"),
    ],
)
def test_a_database_that_cannot_be_used_is_one_line_and_1(
    run: Run, tmp_path: Path, sqlite_template: Path, source: str, target: str
) -> None:
    """Whichever of the two it is, without a trace and without the password."""
    (tmp_path / "good.db").write_bytes(sqlite_template.read_bytes())
    (tmp_path / "empty.db").write_bytes(b"")
    (tmp_path / "broken.db").write_bytes(b"not a database at all, by any means" * 100)
    (tmp_path / "folder").mkdir()
    code, out, err = run("move", "--from", source, "--to", target)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "hunter2" not in err
    assert "unexpected" not in err
