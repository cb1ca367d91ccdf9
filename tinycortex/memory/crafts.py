"""Crafts: the parts of the built-in delegates, each for one of the kinds."""

from tinycortex.config import MemorySettings
from tinycortex.db import Database
from tinycortex.domain.clock import Clock
from tinycortex.memory.admission import Admission
from tinycortex.memory.authoring import Author
from tinycortex.memory.buffers import Buffers
from tinycortex.memory.coverage import Coverage
from tinycortex.memory.documents import DocumentSealer
from tinycortex.memory.embedding import Embedder
from tinycortex.memory.seal import LevelSealer
from tinycortex.memory.summarise import ExtractiveSummariser, Summariser


class Crafts:
    """What :class:`~tinycortex.memory.delegates.MemoryDelegates` has done, on one database."""

    def __init__(
        self,
        database: Database,
        settings: MemorySettings,
        clock: Clock | None,
        summariser: Summariser | None,
        embedder: Embedder,
    ) -> None:
        clock = clock or database.clock
        author = Author(settings, clock, summariser or ExtractiveSummariser(), embedder)
        self.admission = Admission(database, settings, clock)
        self.buffers = Buffers(database, settings, clock)
        self.levels = LevelSealer(database, settings, clock, author)
        self.documents = DocumentSealer(database, settings, clock, author)
        self.coverage = Coverage(database, settings, clock, embedder)
