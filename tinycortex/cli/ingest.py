"""``tinycortex ingest``: files into chunks and jobs, and with ``--work`` on into sealed summaries."""

import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from tinycortex.app import Cortex
from tinycortex.cli.opening import AsJson, open_cortex
from tinycortex.cli.output import print_error, print_json, print_table, progress_bar
from tinycortex.domain.jobs import JobStatus, NewJob
from tinycortex.domain.kinds import JobKind
from tinycortex.domain.payloads import FlushStalePayload
from tinycortex.errors import SourceError

_DEFERRED_MS = 2_000
"""A deferred embedding batch comes back well within this; a retry does not, and is left to a worker."""


def ingest(
    ctx: typer.Context,
    paths: Annotated[list[Path], typer.Argument(help="Files, and folders that are searched for them.")],
    source_id: Annotated[str | None, typer.Option(help="Name to store the source under; its path by default.")] = None,
    owner: Annotated[str, typer.Option(help="Who the text belongs to.")] = "local",
    work: Annotated[bool, typer.Option("--work", help="Then run every job, up to sealed summaries.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take .md, .markdown, .txt and .rst files into the queue. The same file again adds nothing."""
    from tinycortex.memory.outline import Outline  # noqa: PLC0415 - it brings the memory's tables with it

    started = time.monotonic()
    with open_cortex(ctx) as cortex, progress_bar() as progress:
        files, chunks, enqueued, problems = _ingest(cortex, progress, paths, source_id, owner)
        before, failed_before = _done_by_kind(cortex), cortex.status().by_status[JobStatus.FAILED]
        if work:
            _work(cortex, progress)
        done = _done_by_kind(cortex)
        done.subtract(before)
        jobs_done = {kind: jobs for kind, jobs in sorted(done.items()) if jobs > 0}
        by_status = cortex.status().by_status
        left = {word: by_status[word] for word in (JobStatus.READY, JobStatus.RUNNING, JobStatus.FAILED)}
        report = {
            "files": files,
            "chunks": chunks,
            "jobs_enqueued": enqueued,
            "jobs_done": jobs_done,
            "jobs_left": left,
            "summaries": Outline(cortex.database).count_summaries(),
            "problems": problems,
            "seconds": round(time.monotonic() - started, 3),
        }
    if as_json:
        print_json(report)
    else:
        rows = [(name, report[name]) for name in ("files", "chunks", "jobs_enqueued", "summaries", "seconds")]
        rows += [(f"done {kind}", jobs) for kind, jobs in jobs_done.items()]
        rows += [(f"now {word}", jobs) for word, jobs in left.items() if jobs > 0]
        print_table(("what", "how many"), rows)
    if problems or (work and left[JobStatus.FAILED] > failed_before):
        raise typer.Exit(1)


def _ingest(
    cortex: Cortex, progress: Progress, paths: list[Path], source_id: str | None, owner: str
) -> tuple[int, int, int, list[str]]:
    listing = cortex.ingestor.list_sources(paths, source_id=source_id)
    problems = [str(problem) for problem in listing.problems]
    files = chunks = enqueued = 0
    for source in progress.track(listing.sources, description="ingest"):
        try:
            ingested = cortex.ingestor.ingest_file(source, owner=owner)
        except SourceError as error:
            problems.append(str(error))
            continue
        files += 1
        chunks += ingested.chunks_added
        enqueued += ingested.jobs_enqueued
    for problem in problems:
        print_error(problem)
    return files, chunks, enqueued, problems


def _work(cortex: Cortex, progress: Progress) -> None:
    task = progress.add_task("work", total=None)

    def drain() -> None:
        cortex.drain_until_idle(wait_ms=_DEFERRED_MS, on_step=lambda: progress.advance(task))

    cortex.bootstrap()
    drain()
    # A key of its own: the block's regular flush, done or waiting, must not keep small inputs unsealed.
    flush = NewJob.of(JobKind.FLUSH_STALE, FlushStalePayload(max_age_secs=0), dedupe_key="flush_stale:forced")
    cortex.enqueue(flush)
    drain()
    if cortex.ensure_reembed_backfill() is not None:
        drain()


def _done_by_kind(cortex: Cortex) -> Counter[str]:
    by_kind = cortex.status().by_kind
    return Counter({kind: statuses.get(JobStatus.DONE, 0) for kind, statuses in by_kind.items()})
