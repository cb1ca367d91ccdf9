"""tinycortex: a durable SQL job queue for Python programs that keep an agent's memory."""

from tinycortex import schema
from tinycortex.app import Cortex
from tinycortex.config import Settings
from tinycortex.db import Database
from tinycortex.delegates import QueueDelegates
from tinycortex.dialects.sqlite_faults import (
    is_host_io,
    is_sqlite_busy,
    is_sqlite_corrupt,
    is_sqlite_disk_full,
    is_sqlite_io_transient,
)
from tinycortex.domain.clock import Clock, SystemClock
from tinycortex.domain.decisions import AppendDecision, ExtractDecision, ReembedProgress, StaleBuffer
from tinycortex.domain.failures import find_failure
from tinycortex.domain.findings import Finding, FindingCode, Severity
from tinycortex.domain.jobs import Job, JobStatus, NewJob
from tinycortex.domain.kinds import RETIRED_JOB_KINDS, JobKind, KindSpec, OnDuplicate, is_retired_kind
from tinycortex.domain.outcomes import Defer, Done, JobOutcome, JobPlan
from tinycortex.domain.payloads import (
    AppendBufferPayload,
    AppendTarget,
    ExtractChunkPayload,
    FlushStalePayload,
    LeafRef,
    NodeRef,
    Payload,
    ReembedBackfillPayload,
    SealDocumentPayload,
    SealPayload,
    SourceTarget,
    SummaryRef,
    TopicTarget,
)
from tinycortex.domain.policy import (
    DEFAULT_LLM_PERMITS,
    DEFAULT_LOCK_DURATION_MS,
    DEFAULT_MAX_ATTEMPTS,
    REEMBED_BACKFILL_REVISIT_MS,
    backoff_ms,
)
from tinycortex.domain.redact import scrub_for_log
from tinycortex.errors import (
    ConfigurationError,
    DuplicateKindError,
    FailureClass,
    HostIOError,
    InvalidInputError,
    JobFailure,
    JobNotFoundError,
    LeaseLostError,
    PayloadError,
    RegistrationError,
    SchemaError,
    SchemaMissingError,
    SchemaOutdatedError,
    SourceError,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    TinycortexError,
    UnknownKindError,
)
from tinycortex.handlers.context import JobContext
from tinycortex.handlers.registry import Handler, HandlerRegistry
from tinycortex.repositories.jobs import JobRepository, Requeued
from tinycortex.services.gate import LlmGate, Permit

__all__ = [
    "DEFAULT_LLM_PERMITS",
    "DEFAULT_LOCK_DURATION_MS",
    "DEFAULT_MAX_ATTEMPTS",
    "REEMBED_BACKFILL_REVISIT_MS",
    "RETIRED_JOB_KINDS",
    "AppendBufferPayload",
    "AppendDecision",
    "AppendTarget",
    "Clock",
    "ConfigurationError",
    "Cortex",
    "Database",
    "Defer",
    "Done",
    "DuplicateKindError",
    "ExtractChunkPayload",
    "ExtractDecision",
    "FailureClass",
    "Finding",
    "FindingCode",
    "FlushStalePayload",
    "Handler",
    "HandlerRegistry",
    "HostIOError",
    "InvalidInputError",
    "Job",
    "JobContext",
    "JobFailure",
    "JobKind",
    "JobNotFoundError",
    "JobOutcome",
    "JobPlan",
    "JobRepository",
    "JobStatus",
    "KindSpec",
    "LeafRef",
    "LeaseLostError",
    "LlmGate",
    "NewJob",
    "NodeRef",
    "OnDuplicate",
    "Payload",
    "PayloadError",
    "Permit",
    "QueueDelegates",
    "ReembedBackfillPayload",
    "ReembedProgress",
    "RegistrationError",
    "Requeued",
    "SchemaError",
    "SchemaMissingError",
    "SchemaOutdatedError",
    "SealDocumentPayload",
    "SealPayload",
    "Settings",
    "Severity",
    "SourceError",
    "SourceTarget",
    "StaleBuffer",
    "StorageBusyError",
    "StorageCorruptError",
    "StorageError",
    "StorageFullError",
    "StorageUnavailableError",
    "SummaryRef",
    "SystemClock",
    "TinycortexError",
    "TopicTarget",
    "UnknownKindError",
    "backoff_ms",
    "find_failure",
    "is_host_io",
    "is_retired_kind",
    "is_sqlite_busy",
    "is_sqlite_corrupt",
    "is_sqlite_disk_full",
    "is_sqlite_io_transient",
    "schema",
    "scrub_for_log",
]
