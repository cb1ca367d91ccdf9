"""The command line, as its users meet it: one clear line, the right exit code, one JSON document."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.md").write_text(
            f"# Note {number}\n\nAda asked Grace for the figures of quarter {number}. They are due on Friday.\n"
        )
    return folder


def test_ingest_and_work_end_in_a_sealed_summary(run: Run, notes: Path) -> None:
    """The main job of the command: from files to a summary whose words are the input's."""
    code, out, _err = run("ingest", str(notes), "--work", "--json")
    report = json.loads(out)
    assert (code, report["files"], report["chunks"], report["problems"]) == (0, 3, 3, [])
    assert report["jobs_left"] == {"ready": 0, "running": 0, "failed": 0}
    (tree,) = json.loads(run("tree", "--json")[1])["trees"]
    assert tree["summaries"][0]["leaf_count"] == 3
    assert "figures of quarter" in tree["summaries"][0]["content"]


def test_the_same_files_again_add_nothing(run: Run, notes: Path) -> None:
    """Ingest is idempotent."""
    run("ingest", str(notes), "--work")
    report = json.loads(run("ingest", str(notes), "--work", "--json")[1])
    assert (report["chunks"], report["jobs_enqueued"]) == (0, 0)


def test_each_file_that_cannot_be_read_gives_one_line_and_the_rest_is_kept(run: Run, notes: Path) -> None:
    """One bad file never costs the others."""
    (notes / "empty.txt").write_text("")
    (notes / "binary.txt").write_bytes(bytes(range(256)))
    (notes / "nul.txt").write_bytes(b"some\x00text")
    code, out, err = run("ingest", str(notes), str(notes / "missing.md"), "--json")
    assert (code, json.loads(out)["chunks"]) == (1, 3)
    assert len(err.splitlines()) == 4
    for name in ("empty.txt", "binary.txt", "nul.txt", "missing.md"):
        assert sum(name in line for line in err.splitlines()) == 1


def test_the_documents_have_stable_keys(run: Run, notes: Path) -> None:
    """Scripts read these."""
    run("ingest", str(notes), "--work")
    status = json.loads(run("status", "--json")[1])
    assert set(status) == {
        "by_status",
        "by_kind",
        "failed_by_reason",
        "failed_by_class",
        "unhandled",
        "oldest_ready_age_ms",
        "llm_closed_for_ms",
        "llm_permits_global",
        "llm_permits_held",
        "llm_closed_until_ms",
        "leases_held",
        "leases_expired",
        "backfill_in_progress",
    }
    assert set(json.loads(run("tick", "--json")[1])) == {"recovered", "flush_job_id", "healed", "purged"}
    assert set(json.loads(run("work", "--drain", "--json")[1])) == {
        "performed",
        "purged",
        "recovered",
        "done",
        "ready",
        "failed",
    }
    (job,) = json.loads(run("jobs", "list", "--limit", "1", "--json")[1])
    assert json.loads(run("jobs", "show", job["id"], "--json")[1]) == job
    assert json.loads(run("jobs", "purge-retired", "--json")[1]) == {"purged": 0}


@pytest.mark.parametrize("command", [["status"], ["jobs", "list"], ["tree"], ["tick"], ["work", "--drain"]])
def test_each_command_has_words_for_a_person(run: Run, notes: Path, command: list[str]) -> None:
    """Without --json there is something to read."""
    run("ingest", str(notes), "--work")
    code, out, err = run(*command)
    assert (code, err) == (0, "")
    assert out.strip()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonsense"],
        ["ingest"],
        ["jobs", "list", "--status", "lost"],
        ["jobs", "list", "--limit", "0"],
        ["jobs", "retry"],
        ["jobs", "retry", "job:1", "--failed"],
        ["jobs", "purge", "--older-than", "soon"],
    ],
)
def test_wrong_usage_is_2(run: Run, arguments: list[str]) -> None:
    """A misspelt call is told apart from a failed one."""
    assert run(*arguments)[0] == 2


@pytest.mark.parametrize("command", ["show", "retry", "cancel"])
def test_an_unknown_job_is_one_line_and_1(run: Run, command: str) -> None:
    """Nobody is told that all is well with a job that is not there."""
    code, out, err = run("jobs", command, "job:nope")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "job:nope" in err


def test_another_database_must_be_upgraded_by_hand(run: Run, tmp_path: Path) -> None:
    """Only the default database is upgraded unasked; any other names the command, and is not made."""
    url = f"sqlite:///{tmp_path}/other.db"
    code, _out, err = run("--database-url", url, "status")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "tinycortex db upgrade" in err
    assert not (tmp_path / "other.db").exists()
    assert run("--database-url", url, "db", "upgrade")[0] == 0
    assert run("--database-url", url, "status")[0] == 0


@pytest.mark.parametrize("command", [["db", "upgrade"], ["status"]])
def test_a_password_is_never_shown(run: Run, command: list[str]) -> None:
    """The URL of an unsupported database keeps its password."""
    code, out, err = run("--database-url", "mysql://ada:hunter2@host/db", *command)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "hunter2" not in out + err


def test_a_file_that_is_no_database_is_one_line(run: Run, tmp_path: Path) -> None:
    """A damaged file is named, and left as it is."""
    (tmp_path / "broken.db").write_bytes(b"not a database at all, by any means" * 100)
    code, _out, err = run("--database-url", f"sqlite:///{tmp_path}/broken.db", "status")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "broken.db" in err


def test_a_folder_that_is_missing_is_one_line(run: Run, tmp_path: Path) -> None:
    """The path is named."""
    code, _out, err = run("--database-url", f"sqlite:///{tmp_path}/nowhere/x.db", "db", "upgrade")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "nowhere" in err


def test_the_schema_can_be_looked_at(run: Run) -> None:
    """The group `db` answers in one line each."""
    assert run("db", "current")[0] == 1
    assert run("db", "upgrade")[0] == 0
    assert run("db", "check")[:2] == (0, "no difference\n")
    assert "CREATE TABLE" in run("db", "sql")[1]
    assert run("db", "stamp")[0] == 0


def test_text_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    """Escape codes and markup in a note are shown as characters."""
    (tmp_path / "evil.md").write_text("Ada wrote [bold]this[/bold] \x1b[31mred\x1b[0m sentence about the plans.\n")
    run("ingest", "evil.md", "--work")
    out = run("tree")[1]
    assert "\x1b" not in out
    assert "[bold]this[/bold]" in out


def test_secrets_of_jobs_are_masked_unless_asked_for(run: Run) -> None:
    """A payload may hold a token; only --raw shows it."""
    run("db", "upgrade")
    with sqlite3.connect("chunks.db") as connection:
        connection.execute(
            "INSERT INTO mem_tree_jobs (id, kind, payload_json, available_at_ms, created_at_ms) "
            """VALUES ('job:1', 'custom', '{"api_key": "hunter2"}', 0, 0)"""
        )
    connection.close()
    assert "hunter2" not in run("jobs", "show", "job:1", "--json")[1]
    assert "hunter2" in run("jobs", "show", "job:1", "--raw", "--json")[1]


def test_a_settled_job_cannot_be_retried_or_cancelled(run: Run, notes: Path) -> None:
    """The call was well formed, and what it asked for failed: 1, and one line that says why."""
    run("ingest", str(notes), "--work")
    (job,) = json.loads(run("jobs", "list", "--status", "done", "--limit", "1", "--json")[1])
    for command in ("retry", "cancel"):
        code, _out, err = run("jobs", command, job["id"])
        assert (code, len(err.splitlines())) == (1, 1)
        assert "is done" in err


def test_a_job_that_fails_for_good_is_no_success(run: Run, notes: Path) -> None:
    """`ingest --work` says so in its table and its exit code."""
    run("db", "upgrade")
    with sqlite3.connect("chunks.db") as connection:
        connection.execute(
            "INSERT INTO mem_tree_jobs (id, kind, payload_json, available_at_ms, created_at_ms) "
            "VALUES ('job:1', 'extract_chunk', '{}', 0, 0)"
        )
    connection.close()
    code, out, _err = run("ingest", str(notes), "--work")
    assert code == 1
    assert "now failed" in out
    code, out, _err = run("ingest", str(notes), "--work", "--json")
    assert (code, json.loads(out)["jobs_left"]["failed"]) == (0, 1)  # an old failure is no failure of this run


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    """`status | head -1` ends quietly."""
    process = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m tinycortex status | head -1"],  # noqa: S607 - any bash will do
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert process.stderr == ""


def test_a_worker_told_to_stop_ends_with_0(tmp_path: Path) -> None:
    """SIGTERM is the way to stop a worker, and no failure."""
    with subprocess.Popen(
        [sys.executable, "-m", "tinycortex", "work", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "working on" in process.stderr.readline()
        process.terminate()
        out, _err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["failed"] == 0
