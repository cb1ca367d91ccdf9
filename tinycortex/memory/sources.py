"""Which files an ingest is about, and what each is called in the store."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinycortex.domain.text import find_text_fault
from tinycortex.errors import SourceError

SUFFIXES = (".md", ".markdown", ".txt", ".rst")
"""Files that are ingested, by suffix in any case."""

FILE = "file"


@dataclass(frozen=True, slots=True)
class Source:
    """One file to ingest.

    Attributes:
        path: where it is, resolved.
        source_id: what its chunks are stored under.
        path_scope: scope of the tree that its chunks share with others; None: a tree of its own.
    """

    path: Path
    source_id: str
    path_scope: str | None


@dataclass(slots=True)
class SourceListing:
    """What a call names: the files to ingest, and a problem for each path that cannot be."""

    sources: list[Source] = field(default_factory=list)
    problems: list[SourceError] = field(default_factory=list)


def list_sources(paths: Sequence[Path | str], *, source_id: str | None = None) -> SourceListing:
    """List the files that ``paths`` name, folders searched recursively, in the order of their paths.

    A file's id is its resolved path, and its scope that of the folder named, if any. With ``source_id``
    a lone file takes it as its id; every other file is ``<source_id>/<path in its folder>``, all in the
    scope ``source_id``. Hidden files and folders are passed over, and links to folders not followed.
    """
    listing = SourceListing()
    known: dict[str, Path] = {}
    lone = len(paths) == 1
    for path in paths:
        for found in _iter_sources(Path(path), source_id, lone=lone):
            if isinstance(found, SourceError):
                listing.problems.append(found)
            elif found.source_id not in known:
                known[found.source_id] = found.path
                listing.sources.append(found)
            elif known[found.source_id] != found.path:
                listing.problems.append(
                    SourceError(
                        f"{show_path(found.path)} and {show_path(known[found.source_id])} would both be source "
                        f"{found.source_id}; ingest them in calls of their own"
                    )
                )
    return listing


def show_path(path: Path | str) -> str:
    """Return a path as text that can be printed, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "replace")


def _iter_sources(path: Path, source_id: str | None, *, lone: bool) -> Iterator[Source | SourceError]:
    try:
        resolved = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # missing, a NUL in its name, a circle of links
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        yield SourceError(f"{show_path(path)}: {reason}; name a file or a folder that exists")
        return
    if resolved.is_dir():
        yield from _iter_folder(resolved, source_id)
    elif resolved.suffix.lower() not in SUFFIXES:
        yield SourceError(f"{show_path(path)}: only {', '.join(SUFFIXES)} files can be ingested")
    elif source_id is None or lone:
        yield _check(resolved, source_id or resolved.as_posix(), None)
    else:
        yield _check(resolved, f"{source_id}/{path.name}", source_id)


def _iter_folder(folder: Path, source_id: str | None) -> Iterator[Source | SourceError]:
    unreadable: list[OSError] = []
    found: list[Path] = []
    for root, folders, files in os.walk(folder, onerror=unreadable.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(root, name) for name in files if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES
        ]
    for path in sorted(found, key=lambda path: path.relative_to(folder).as_posix()):
        relative = path.relative_to(folder).as_posix()
        try:
            resolved = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            yield SourceError(f"{show_path(path)}: a link that leads nowhere ({error})")
            continue
        if source_id is None:
            yield _check(resolved, resolved.as_posix(), folder.as_posix())
        else:
            yield _check(resolved, f"{source_id}/{relative}", source_id)
    for fault in unreadable:
        yield SourceError(f"{show_path(fault.filename)}: {fault.strerror}; the folder was left out")


def _check(path: Path, source_id: str, path_scope: str | None) -> Source | SourceError:
    if not path.is_file():
        return SourceError(f"{show_path(path)}: is no regular file")
    for text in (source_id, path.as_posix(), path_scope or ""):
        if fault := find_text_fault(text):
            return SourceError(f"{show_path(path)}: its name or id has {fault}; rename it")
    return Source(path, source_id, path_scope)
