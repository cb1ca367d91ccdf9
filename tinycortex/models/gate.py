"""``tinycortex_gate``: what all processes have to know about a provider (ours, beside the contract's tables)."""

from sqlalchemy.orm import Mapped, mapped_column

from tinycortex.models.base import Base, PlainText, WholeNumber


class GateRow(Base):
    """Until when a gate that processes share is closed; the only one is named ``llm``. No row: it never was."""

    __tablename__ = "tinycortex_gate"

    name: Mapped[str] = mapped_column(PlainText, primary_key=True)
    closed_until_ms: Mapped[int] = mapped_column(WholeNumber)
