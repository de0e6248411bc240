"""`accuracy_world` with a real result store at its center."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from center.budgets.processing_delay import AnswerMargin
from center.ledger import EdgesChanged, Ledger, QueryRegistered
from center.results import ResultStore
from center.storage.delta_segments import Delta
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame
from tests.center.accuracy_world import BEGIN_MS, FINE_MS, REF, Site, World, exponential, record_of, spec

KEY = "q@1"


class Stored(World):
    """A world whose center writes to a result store."""

    def open(self, path: Path) -> None:
        self.store = ResultStore(f"sqlite:///{path}/results.db")

    def _center(self) -> None:
        arrived = sorted((s for s in self.sent if s[0] <= self.now_ms), key=lambda s: s[1])
        if arrived:
            self.sent = [s for s in self.sent if s[0] > self.now_ms]
            # Positions are given in the order of arrival.
            summaries = []
            for _, _, name, frame in arrived:
                self.position = getattr(self, "position", 0) + 1
                summaries.append(self._summary(self.position, name, frame))
            deltas = self._merged([frame for *_, frame in arrived])
            self.answers += self.store.apply(self.ledger, deltas, summaries, {KEY: self.position}, self.now_ms)
        due = self.ledger.next_deadline()
        if due is not None and due <= self.now_ms:
            self.answers += self.store.tick(self.ledger, [], self.now_ms)

    def _merged(self, frames: list[Frame]) -> list[Delta]:
        parts: dict[int, list[bytes]] = {}
        for frame in frames:
            for partial in frame.unpack().partials:
                parts.setdefault(partial.slice_start_ms, []).append(partial.synopsis)
        return [Delta(KEY, start, GroupedAggregate.merge_bytes(each)) for start, each in sorted(parts.items())]

    def crash(self, path: Path) -> None:
        """Restarts the job from its result store."""
        self.store.close()
        self.open(path)
        self.ledger = Ledger(AnswerMargin(50))
        self.store.load_ledger(self.ledger)
        self.store.tick(self.ledger, [EdgesChanged(tuple(record_of(s.name) for s in self.sites))], self.now_ms)


def stored(
    path: Path, query: QuerySpec | None = None, *, seconds: float = 9, rate: float = 300.0, **more: Any
) -> Stored:
    """Returns two edges with records for `seconds`."""
    path.mkdir(exist_ok=True)
    query = query or spec({"total": "sum(x)", "n": "count()"})
    world = Stored(
        query,
        [Site.make(f"e{i}", i, seconds, exponential(80.0), rate=rate, **more) for i in range(2)],
        Ledger(AnswerMargin(50)),
        step_ms=FINE_MS,
    )
    world.open(path)
    world.ledger = Ledger(AnswerMargin(50))
    events = [
        EdgesChanged(tuple(record_of(s.name) for s in world.sites)),
        QueryRegistered(RegisteredQuery(REF, query, BEGIN_MS - 1, None)),
    ]
    world.store.tick(world.ledger, events, BEGIN_MS)
    return world
