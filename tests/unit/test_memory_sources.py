"""Which files an ingest finds, and what it calls them."""

import os
import sys
from pathlib import Path

import pytest

from tinycortex.memory.sources import list_sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with notes, things that are none, hidden things, and a circle of links."""
    root = tmp_path / "notes"
    for name in ("b.md", "a.TXT", "sub/c.rst", "sub/d.markdown", "e.png", ".hidden.md", ".git/f.md"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (root / "loop").symlink_to(root)
    return root


def test_a_folder_is_searched_in_a_fixed_order(folder: Path) -> None:
    """Only the notes, sorted by path; each under its own path, in the scope of the folder."""
    listing = list_sources([folder])
    assert [source.path.relative_to(folder).as_posix() for source in listing.sources] == [
        "a.TXT",
        "b.md",
        "sub/c.rst",
        "sub/d.markdown",
    ]
    assert {source.path_scope for source in listing.sources} == {folder.as_posix()}
    assert all(source.source_id == source.path.as_posix() for source in listing.sources)
    assert listing.problems == []


def test_a_file_is_a_source_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path becomes absolute, so that the id does not depend on where the command ran."""
    monkeypatch.chdir(folder)
    [source] = list_sources(["sub/../b.md"]).sources
    assert (source.source_id, source.path_scope) == ((folder / "b.md").as_posix(), None)


def test_a_lone_file_takes_the_id_given(folder: Path) -> None:
    """With one file the id is the file's."""
    [source] = list_sources([folder / "b.md"], source_id="ID").sources
    assert (source.source_id, source.path_scope) == ("ID", None)


def test_several_files_share_the_id_given_as_their_scope(folder: Path) -> None:
    """With a folder or several arguments the id is the scope, and each file is below it."""
    listing = list_sources([folder], source_id="ID")
    assert [source.source_id for source in listing.sources] == [
        "ID/a.TXT",
        "ID/b.md",
        "ID/sub/c.rst",
        "ID/sub/d.markdown",
    ]
    pair = list_sources([folder / "b.md", folder / "sub" / "c.rst"], source_id="ID")
    assert [(source.source_id, source.path_scope) for source in pair.sources] == [("ID/b.md", "ID"), ("ID/c.rst", "ID")]


def test_one_file_named_twice_is_one_source(folder: Path) -> None:
    """A file inside a folder that is also named is not ingested twice."""
    assert len(list_sources([folder, folder / "b.md", folder]).sources) == 4


def test_two_files_of_one_id_are_a_problem(folder: Path, tmp_path: Path) -> None:
    """The second is reported, not mixed into the first."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.md").write_text("another b")
    listing = list_sources([folder / "b.md", other / "b.md"], source_id="ID")
    assert len(listing.sources) == 1
    assert "would both be source ID/b.md" in str(listing.problems[0])


def test_problems_do_not_stop_the_others(folder: Path) -> None:
    """What is missing, of another kind, or impossible is one line each; the rest is listed."""
    listing = list_sources([folder / "gone.md", folder / "e.png", "a\x00b.md", folder / "b.md"])
    assert [source.path.name for source in listing.sources] == ["b.md"]
    assert len(listing.problems) == 3
    assert all("\n" not in str(problem) for problem in listing.problems)
    assert "gone.md" in str(listing.problems[0])


def test_a_link_to_nowhere_and_a_pipe_are_problems(folder: Path) -> None:
    """Neither can be read; a pipe would be waited for without end."""
    (folder / "dead.md").symlink_to(folder / "nowhere.md")
    os.mkfifo(folder / "pipe.md")
    listing = list_sources([folder])
    assert len(listing.sources) == 4
    assert len(listing.problems) == 2


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems refuse such names")
def test_a_name_that_no_database_can_hold_is_a_problem(folder: Path) -> None:
    """An undecodable name is reported in words that can be printed."""
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.md")).write_text("text")
    listing = list_sources([folder])
    assert len(listing.sources) == 4
    [problem] = listing.problems
    assert "lone surrogate" in str(problem)
    str(problem).encode()
