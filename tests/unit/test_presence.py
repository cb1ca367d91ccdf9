"""Presence: a worker is alive while its process is, and in doubt it lives."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tinycortex.dialects.presence import FilePresence
from tinycortex.worker.identity import WorkerIdentity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "chunks.db-workers"


def at_once(call: "threading.Barrier", work: object) -> None:
    call.wait()
    assert callable(work)
    work()


def test_threads_that_come_first_together_announce_one_worker(folder: Path) -> None:
    """One queue used from several threads is one worker, however they meet."""
    for _ in range(20):
        identity, presence = WorkerIdentity(), FilePresence(folder)
        names: list[str] = []

        def announce(identity: WorkerIdentity = identity, presence: FilePresence = presence) -> None:
            names.append(identity.current())  # noqa: B023 - joined before the next round
            presence.announce(identity.current())

        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=at_once, args=(barrier, announce)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(names) == 8
        assert len(set(names)) == 1
        assert FilePresence(folder).find_dead(names[:1]) == []
        presence.withdraw()
        assert not folder.exists()


def test_a_worker_that_was_never_announced_or_is_withdrawn_is_in_doubt(folder: Path) -> None:
    """Only its lease decides about a worker that left no trace."""
    presence = FilePresence(folder)
    presence.announce("gone")
    presence.withdraw()
    assert FilePresence(folder).find_dead(["gone", "another program's", "../../etc/passwd"]) == []


def test_a_worker_whose_process_has_ended_is_dead_until_it_is_forgotten(folder: Path) -> None:
    """However a process ends, the kernel lets go of its lock."""
    code = (
        "import os, sys; from pathlib import Path; from tinycortex.dialects.presence import FilePresence\n"
        "FilePresence(Path(sys.argv[1])).announce('w'); os._exit(9)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(folder)], check=False, timeout=60)
    assert ended.returncode == 9
    presence = FilePresence(folder)
    assert presence.find_dead(["w"]) == ["w"]
    presence.forget(["w"])
    assert presence.find_dead(["w"]) == []
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the child does nothing but leave
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_gives_nothing_of_its_parents_back(folder: Path) -> None:
    """A child that ends must not make its parent look dead."""
    presence = FilePresence(folder)
    presence.announce("parent")
    child = os.fork()
    if child == 0:
        presence.withdraw()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert FilePresence(folder).find_dead(["parent"]) == []
    presence.withdraw()


def test_a_folder_that_cannot_be_made_is_told_and_does_not_stop_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Presence only shortens a wait, so without it work goes on."""
    (tmp_path / "file").write_text("")
    presence = FilePresence(tmp_path / "file" / "workers")
    presence.announce("w")
    presence.announce("w")
    assert len(caplog.records) == 1
    presence.withdraw()
