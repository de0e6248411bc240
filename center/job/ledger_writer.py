"""The one way to the ledger and the store: batches, the catalog's news and deadlines, one at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from center.job.catalog_events import CatalogEvents
from center.job.metrics import JobMetrics
from center.ledger import STALENESS, Emission, FrameSummary, Ledger, LedgerEvent
from center.results import MergedDelta, ResultStore
from edgewater.errors import StorageError
from edgewater.query import QuerySpec
from edgewater.streams import MIN_TIME_MS, EdgeId
from edgewater.wire.frames import QueryRef

logger = logging.getLogger(__name__)

FOLLOW_EVERY_S = 0.2
"""How often the catalog's version is looked at while nothing else happens."""


class LedgerWriter:
    """Serialises what changes the ledger.

    Args:
        now_ms: wall clock, ms; answers are stamped with it.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: ResultStore,
        follower: CatalogEvents,
        metrics: JobMetrics,
        *,
        now_ms: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._follower = follower
        self._metrics = metrics
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closed = False

    def consumed(self) -> dict[str, int]:
        """As `ResultStore.consumed`. Only `apply` changes it."""
        return self._store.consumed()

    def apply(
        self, deltas: Sequence[MergedDelta], facts: Sequence[FrameSummary], through: Mapping[str, int]
    ) -> list[Emission]:
        """As `ResultStore.apply`, once the ledger knows of every query that the catalog does."""
        with self._lock:
            self._require_open()
            # A query may have been registered, and its first frame come, since the catalog was looked at.
            self._follow(self._now_ms())
            emissions = self._store.apply(self._ledger, deltas, facts, through, self._now_ms())
            self._note_told(facts)
        self._count(emissions, "report")
        self._changed.set()
        return emissions

    def _note_told(self, facts: Sequence[FrameSummary]) -> None:
        for fact in facts:
            if fact.arrivals is None or fact.arrivals.through_ms <= MIN_TIME_MS or self._ledger.is_deleted(fact.query):
                continue
            told_at_ms = self._ledger.wall_ms(fact.query, fact.arrivals.through_ms)
            self._metrics.told.observe(max(0, fact.received_at_ms - told_at_ms) / 1000)

    def turn(self) -> list[Emission]:
        """Takes in the catalog's news and gives the answers that are due by now."""
        with self._lock:
            self._require_open()
            now_ms = self._now_ms()
            emissions = self._follow(now_ms)
            due_ms = self._ledger.next_deadline()
            if due_ms is not None and due_ms <= now_ms:
                emissions = [*emissions, *self._tick([], now_ms)]
        return emissions

    def _follow(self, now_ms: int) -> list[Emission]:
        version, events = self._follower.news()
        if not events:
            return []
        emissions = self._tick(events, now_ms)
        self._follower.told(version)
        return emissions

    def _tick(self, events: Sequence[LedgerEvent], now_ms: int) -> list[Emission]:
        emissions = self._store.tick(self._ledger, events, now_ms)
        self._count(emissions, "deadline")
        return emissions

    def _count(self, emissions: Sequence[Emission], cause: str) -> None:
        self._metrics.answers.labels(cause).inc(len(emissions))
        for emission in emissions:
            self._metrics.note_accuracy(emission)
            # Of a window's first answer only: later ones repeat what the contract says of it.
            if emission.revision == 1 and any(v.code == STALENESS for v in emission.quality.violations):
                self._metrics.missed.labels(emission.query.name).inc()

    def needed_rates(self) -> dict[QueryRef, dict[EdgeId, float]]:
        """As `Ledger.needed_rates`."""
        with self._lock:
            return self._ledger.needed_rates()

    def sampled_functions(self) -> dict[QueryRef, tuple[QuerySpec, tuple[EdgeId, ...]]]:
        """As `Ledger.sampled_functions`."""
        with self._lock:
            return self._ledger.sampled_functions()

    def wait(self, most_s: float = FOLLOW_EVERY_S) -> None:
        """Waits for the next deadline, at most so long; less if `apply` may have brought it forward."""
        with self._lock:
            due_ms = self._ledger.next_deadline()
            pause_s = most_s if due_ms is None else min(most_s, max(0.0, (due_ms - self._now_ms()) / 1000))
        self._changed.wait(pause_s)
        self._changed.clear()

    def close(self) -> None:
        """Waits for what is being written; from then on nothing is."""
        with self._lock:
            self._closed = True
        self._changed.set()

    def _require_open(self) -> None:
        if self._closed:
            raise StorageError("the job is stopping")


class DeadlineThread(threading.Thread):
    """Turns the writer until stopped: answers that are due need no data, and no Spark either."""

    def __init__(self, writer: LedgerWriter, metrics: JobMetrics, stop: threading.Event) -> None:
        super().__init__(name="deadlines", daemon=True)
        self._writer = writer
        self._metrics = metrics
        self._stopping = stop
        self.problem = ""

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._writer.turn()
                self.problem = ""
                self._writer.wait()
            except Exception as exc:
                if self._stopping.is_set():
                    return
                if not self.problem:
                    logger.exception("deadlines cannot be kept; trying again")
                self.problem = f"deadlines cannot be kept: {exc}"
                self._metrics.failures.labels("deadlines").inc()
                self._stopping.wait(FOLLOW_EVERY_S)
