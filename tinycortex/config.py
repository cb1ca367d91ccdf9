"""Every setting, and the only reader of the environment.

``TINYCORTEX_<GROUP>__<NAME>`` sets one, for example ``TINYCORTEX_DATABASE__URL``.
"""

import os
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinycortex.errors import ConfigurationError

DEFAULT_DATABASE_URL = "sqlite:///chunks.db"

Milliseconds = Annotated[int, Field(ge=0, le=10 * 365 * 86_400_000)]
Seconds = Annotated[int, Field(ge=0, le=10 * 365 * 86_400)]


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _check_worker_id(name: str) -> str:
    if not name.isprintable() or " " in name:
        raise ValueError("a worker's id is made of printable characters, without spaces")
    return name


def _check_schema(name: str) -> str:
    if name.startswith("pg_"):
        raise ValueError("names that begin with pg_ are the server's own")
    return name


class DatabaseSettings(_Group):
    """Where the queue lives."""

    model_config = ConfigDict(validate_by_name=True)

    # Kept out of every repr: a URL may hold a password.
    url: str = Field(DEFAULT_DATABASE_URL, repr=False, description="SQLAlchemy URL of the database.")
    busy_timeout_ms: Milliseconds = Field(15_000, description="How long a statement waits for another writer (ms).")
    journal_mode: Literal["wal", "truncate"] = Field(
        "wal", description="SQLite's journal; truncate for a file shared with a program that needs it."
    )
    durability: Literal["jobs", "strict"] = Field(
        "jobs",
        description="What a power cut cannot take back: accepted jobs, or, when strict, claims and settlements too.",
    )
    # Pydantic's models have an old method of the name that users write.
    schema_name: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,62}$"), AfterValidator(_check_schema)] | None = (
        Field(None, alias="schema", description="PostgreSQL's schema of the tables; the role's first one when not set.")
    )
    notify: bool = Field(
        True,
        description="PostgreSQL's LISTEN and NOTIFY to wake workers, and prepared statements; "
        "false behind a pooler whose sessions last for one transaction.",
    )


class QueueSettings(_Group):
    """Claims, budgets and the LLM gate."""

    lease_ms: Annotated[int, Field(gt=0, le=86_400_000)] = Field(300_000, description="Length of a claim's lease (ms).")
    llm_permits: Annotated[int, Field(ge=0, le=10_000)] = Field(
        1, description="LLM-bound handlers at a time in one process; 0 is read as 1."
    )
    retry_jitter: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="Share of the retry delay that is added at random on top of it; 0 for exact times."
    )
    min_defer_ms: Milliseconds = Field(50, description="Shortest wait of a handler's defer (ms).")
    max_defer_age_ms: Milliseconds = Field(
        604_800_000, description="Longest time a job may spend deferring without progress (ms)."
    )


class WorkerSettings(_Group):
    """A worker: name, jobs at a time, pauses by what it met, heartbeat, shutdown."""

    id: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_check_worker_id)] | None = Field(
        None, description="Readable part of a worker's name in `locked_by`; host and process id when not set."
    )
    concurrency: Annotated[int, Field(ge=1, le=1_000)] = Field(32, description="Jobs that one worker runs at a time.")
    idle_ms: Milliseconds = Field(250, description="Pause when nothing is due.")
    busy_ms: Milliseconds = Field(100, description="Pause after a busy database.")
    io_ms: Milliseconds = Field(1_000, description="Pause after a transient I/O fault of the database.")
    disk_full_ms: Milliseconds = Field(30_000, description="Pause after a full disk.")
    host_io_ms: Milliseconds = Field(30_000, description="Pause after an I/O fault of the host.")
    other_ms: Milliseconds = Field(500, description="Pause after any other storage fault.")
    recover_ms: Milliseconds = Field(5_000, description="How often a worker looks for rows of dead workers (ms).")
    heartbeat_ms: Annotated[int, Field(ge=10, le=60_000)] = Field(
        1_000, description="How often the claims of running handlers are looked after (ms)."
    )
    shutdown_grace_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        30, description="How long a worker that stops waits for running handlers before it cancels them (s)."
    )


class SchedulerSettings(_Group):
    """The periodic tick."""

    tick_s: Annotated[int, Field(gt=0, le=86_400)] = Field(600, description="Seconds between two ticks of a worker.")
    flush_max_age_secs: Seconds = Field(3_600, description="Age at which a level-0 buffer is flushed (s).")
    keep_done_s: Seconds = Field(604_800, description="How long a done job is kept (s).")
    keep_failed_s: Seconds = Field(2_592_000, description="How long a failed or cancelled job is kept (s).")


class MemorySettings(_Group):
    """Budgets and ages of the built-in delegates."""

    chunk_max_tokens: Annotated[int, Field(ge=16, le=1_000_000)] = Field(3_000, description="Most tokens in one chunk.")
    chunk_overlap: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.12, description="Share of a chunk that the next one repeats."
    )
    admission_threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.3, description="Least total score that admits a chunk."
    )
    input_token_budget: Annotated[int, Field(gt=0)] = Field(50_000, description="Tokens at which level 0 is sealed.")
    output_token_budget: Annotated[int, Field(gt=0)] = Field(5_000, description="Most tokens in one summary.")
    fan_out: Annotated[int, Field(ge=2)] = Field(10, description="Summaries at which a level above 0 is sealed.")
    tree_flush_age_secs: Seconds = Field(604_800, description="Age at which a buffer above level 0 is flushed (s).")
    max_cascade_depth: Annotated[int, Field(ge=1, le=1_000)] = Field(
        32, description="Deepest level that a cascade seals."
    )
    embed_batch: Annotated[int, Field(gt=0, le=10_000)] = Field(64, description="Texts embedded by one job run.")


class Settings(BaseSettings):
    """All settings. Environment variables fill what the caller leaves out."""

    model_config = SettingsConfigDict(
        env_prefix="TINYCORTEX_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        validate_default=True,
    )

    database: DatabaseSettings = DatabaseSettings()
    queue: QueueSettings = QueueSettings()
    worker: WorkerSettings = WorkerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    memory: MemorySettings = MemorySettings()

    @model_validator(mode="after")
    def _budgets_fit(self) -> Self:
        if self.memory.output_token_budget > self.memory.input_token_budget:
            raise ValueError("memory.output_token_budget must not exceed memory.input_token_budget")
        return self

    def with_url(self, url: str) -> Self:
        """Return a copy that uses another database."""
        return self.model_copy(update={"database": self.database.model_copy(update={"url": url})})


def load_settings() -> Settings:
    """Read the settings from the environment, or raise :class:`ConfigurationError` naming each bad one."""
    for name in os.environ:
        group, separator, _setting = name.upper().removeprefix("TINYCORTEX_").partition("__")
        if name.upper().startswith("TINYCORTEX_") and separator and group.lower() not in Settings.model_fields:
            known = ", ".join(Settings.model_fields)
            raise ConfigurationError(f"{name} names no group of settings; the groups are {known}")
    try:
        return Settings()
    except ValidationError as error:
        # The offending value is left out of the message: it may be a URL with a password.
        faults = "; ".join(
            f"TINYCORTEX_{'__'.join(str(part).upper() for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False)
        )
        raise ConfigurationError(f"bad settings: {faults}") from None
