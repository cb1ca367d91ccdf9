"""What the package shows (design §4)."""

import subprocess
import sys
from collections.abc import Callable

import pytest

import tinycortex
from tinycortex import Cortex

# Every name of the specification's sections, as design §4 lists them.
NAMES = """
    JobKind JobStatus JobOutcome NewJob JobFailure NodeRef AppendTarget QueueDelegates LlmGate Permit
    ExtractChunkPayload AppendBufferPayload SealPayload FlushStalePayload ReembedBackfillPayload
    SealDocumentPayload ExtractDecision AppendDecision StaleBuffer ReembedProgress claim_next enqueue
    enqueue_tx mark_done mark_failed mark_failed_typed mark_deferred recover_stale_locks release_running_locks
    requeue_failed requeue_transient_failed retry_all_failed purge_retired_jobs count_by_status
    count_failed_unrecoverable bootstrap run_once llm_gate drain_until_idle enqueue_flush_stale self_heal
    ensure_reembed_backfill backfill_in_progress is_sqlite_busy is_sqlite_io_transient is_sqlite_disk_full
    is_sqlite_corrupt is_host_io scrub_for_log is_retired_kind backoff_ms RETIRED_JOB_KINDS
    DEFAULT_LLM_PERMITS DEFAULT_MAX_ATTEMPTS DEFAULT_LOCK_DURATION_MS REEMBED_BACKFILL_REVISIT_MS Done Defer
    Cortex Job JobRepository Settings
"""

MEMBERS = {
    "JobKind": "parse is_llm_bound",
    "JobStatus": "is_terminal",
    "NewJob": "of extract_chunk append_buffer seal flush_stale reembed_backfill seal_document",
    "JobFailure": "transient unrecoverable budget_exhausted is_unrecoverable",
    "LlmGate": "acquire try_acquire acquire_async",
    "LeafRef": "dedupe_fragment",
    "SummaryRef": "dedupe_fragment",
    "FlushStalePayload": "dedupe_key",
    "QueueDelegates": (
        "extract_chunk append_node seal_level list_stale_buffers seal_document reembed_batch active_signature "
        "has_uncovered_reembed_work"
    ),
    "Cortex": "open from_env handler enqueue run run_sync run_once run_once_async drain_until_idle close",
}


def order(name: str) -> tuple[int, str]:
    """Return where a name stands in a sorted ``__all__``: constants, classes, the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("name", NAMES.split())
def test_a_name_of_the_specification_is_reachable(cortex: Cortex, name: str) -> None:
    """From the package, from a Cortex or from its repository, under its own name."""
    assert name in tinycortex.__all__ or any(hasattr(owner, name) for owner in (cortex, cortex.jobs))


@pytest.mark.parametrize(("owner", "members"), MEMBERS.items())
def test_a_members_name_is_the_specifications(owner: str, members: str) -> None:
    """Constructors, predicates and methods keep the specification's words."""
    assert [member for member in members.split() if not hasattr(getattr(tinycortex, owner), member)] == []


@pytest.mark.parametrize("name", tinycortex.__all__)
def test_what_is_listed_is_there(name: str) -> None:
    """Every entry of ``__all__`` resolves."""
    assert getattr(tinycortex, name) is not None


def test_the_list_is_sorted_and_without_doubles() -> None:
    """Constants, classes, functions; each by name."""
    assert list(tinycortex.__all__) == sorted(set(tinycortex.__all__), key=order)


HEAVY = """
    alembic typer rich factory pytest hypothesis opentelemetry filelock psycopg
    sqlalchemy.dialects.postgresql tinycortex.models tinycortex.memory.crafts tinycortex.memory.ingest
    tinycortex.testing tinycortex.cli
"""


def test_a_program_that_enqueues_loads_what_it_needs(make_sqlite: Callable[[bool], str]) -> None:
    """No migration machinery, command line, test tool or mapped table comes with an opening and an enqueue."""
    command = """
import sys
from tinycortex import Cortex, FlushStalePayload, NewJob
with Cortex.open(sys.argv[1]) as cortex:
    cortex.enqueue(NewJob.of("flush_stale", FlushStalePayload(max_age_secs=0)))
print(*sorted(set(sys.argv[2:]) & set(sys.modules)))
"""
    arguments = [sys.executable, "-c", command, make_sqlite(True), *HEAVY.split()]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_help_of_the_command_loads_no_table() -> None:
    """The commands are listed without migrations, and without the tables that only some of them read."""
    command = """
import sys
from tinycortex.cli import main
sys.argv[1:] = ["--help"]
try:
    main()
except SystemExit:
    print(*sorted({"alembic", "tinycortex.models"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert "ingest" in done.stdout
    assert done.stderr.split() == []


def test_the_testing_package_works_without_factory_boy() -> None:
    """Clock and fakes need nothing but us; a factory that is asked for says what is missing."""
    command = """
import sys
sys.modules["factory"] = None
from tinycortex.testing import FakeDelegates, ManualClock
try:
    from tinycortex.testing import JobRowFactory
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert "factory" in done.stdout
