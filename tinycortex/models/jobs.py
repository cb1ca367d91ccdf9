"""``mem_tree_jobs``: contract columns first, in the contract's order, then ours (contract §1)."""

from sqlalchemy import Index, text
from sqlalchemy.orm import Mapped, mapped_column

from tinycortex.domain.jobs import ACTIVE_KEY_PREDICATE
from tinycortex.models.base import Base, PlainText, WholeNumber


class JobRow(Base):
    """One job. Never leaves the repositories: they hand out :class:`~tinycortex.domain.jobs.Job`."""

    __tablename__ = "mem_tree_jobs"

    id: Mapped[str] = mapped_column(PlainText, primary_key=True)
    kind: Mapped[str] = mapped_column(PlainText)
    payload_json: Mapped[str] = mapped_column(PlainText)
    dedupe_key: Mapped[str | None] = mapped_column(PlainText)
    status: Mapped[str] = mapped_column(PlainText, server_default=text("'ready'"))
    attempts: Mapped[int] = mapped_column(WholeNumber, server_default=text("0"))
    max_attempts: Mapped[int] = mapped_column(WholeNumber, server_default=text("5"))
    available_at_ms: Mapped[int] = mapped_column(WholeNumber)
    locked_until_ms: Mapped[int | None] = mapped_column(WholeNumber)
    last_error: Mapped[str | None] = mapped_column(PlainText)
    created_at_ms: Mapped[int] = mapped_column(WholeNumber)
    started_at_ms: Mapped[int | None] = mapped_column(WholeNumber)
    completed_at_ms: Mapped[int | None] = mapped_column(WholeNumber)
    failure_reason: Mapped[str | None] = mapped_column(PlainText)
    failure_class: Mapped[str | None] = mapped_column(PlainText)

    # Ours. Nullable or defaulted, so that a program that knows only the contract can go on inserting.
    claim_token: Mapped[int] = mapped_column(WholeNumber, server_default=text("0"))
    locked_by: Mapped[str | None] = mapped_column(PlainText)
    deferred_since_ms: Mapped[int | None] = mapped_column(WholeNumber)
    heals: Mapped[int] = mapped_column(WholeNumber, server_default=text("0"))
    rerun_payload_json: Mapped[str | None] = mapped_column(PlainText)
    cancel_requested_at_ms: Mapped[int | None] = mapped_column(WholeNumber)
    claimed_at_ms: Mapped[int | None] = mapped_column(WholeNumber)
    trace_context: Mapped[str | None] = mapped_column(PlainText)
    llm_bound: Mapped[int | None] = mapped_column(WholeNumber)

    __table_args__ = (
        Index("idx_mem_tree_jobs_ready", "status", "available_at_ms"),
        Index("idx_mem_tree_jobs_kind", "kind"),
        Index(
            "idx_mem_tree_jobs_dedupe_active",
            "dedupe_key",
            unique=True,
            sqlite_where=text(ACTIVE_KEY_PREDICATE),
            postgresql_where=text(ACTIVE_KEY_PREDICATE),
        ),
        # One probe of this index per kind is a whole claim, whatever the backlog.
        Index(
            "idx_mem_tree_jobs_claim",
            "kind",
            "available_at_ms",
            "id",
            sqlite_where=text("status = 'ready'"),
            postgresql_where=text("status = 'ready'"),
        ),
        # As good as empty; it finds at once what another program left behind.
        Index(
            "idx_mem_tree_jobs_asked",
            "status",
            sqlite_where=text("rerun_payload_json IS NOT NULL"),
            postgresql_where=text("rerun_payload_json IS NOT NULL"),
        ),
    )
