"""Answers of real parts: edge cores, their frames, the ledger, the merge of partials, and rendering."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from center.budgets.processing_delay import AnswerMargin
from center.ledger import EdgesChanged, Emission, FramesMerged, FrameSummary, Ledger, QueryRegistered
from center.results import AnswerRecord
from center.serving.measures import NO_QUESTIONS, MeasureQuestions
from edge.core.core import EdgeCore
from edge.core.events import BudgetSet, Ingested, PullEvent, SourceEnded
from edge.core.streams import StreamSpec
from edgewater.answers import Phase
from edgewater.base.streams import LIVE, TIME_COLUMN, Constant, EdgeId
from edgewater.model.edge_records import EdgeRecord, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, FrameBody, QueryRef
from tests.center.rendered import render, to_csv, to_table
from tests.center.results_world import edge_record
from tests.cores import ROOM, drained, open_core, pulled

REF = QueryRef("q", 1)
COLUMNS = {"key": pa.string(), "f": pa.float64(), "i": pa.int64()}
WINDOW_MS = 1000


def query(measures: Mapping[str, str], **parts: object) -> QuerySpec:
    given = {"name": "q", "from": "s", "group_by": ["key"], "measures": dict(measures), "window": {"tumbling": "1s"}}
    return QuerySpec.from_mapping({**given, **parts})


@dataclass
class World:
    """Edges that all read one window's records, then close it.

    Args:
        shares: of the error budget, of each edge.
        constants: of each edge; (): they have none.
    """

    spec: QuerySpec
    edges: int = 2
    columns: Mapping[str, pa.DataType] = field(default_factory=lambda: COLUMNS)
    shares: Mapping[str, float] = field(default_factory=dict)
    constants: Sequence[Mapping[str, Constant]] = ()
    bodies: list[list[FrameBody]] = field(init=False)
    cores: list[EdgeCore] = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = [[] for _ in range(self.edges)]
        self.cores = []
        for number in range(self.edges):
            core = open_core(
                StreamSpec(dict(self.columns), constants=self._constants(number)), (REF, self.spec), number=number
            )
            if self.shares:
                core.handle(BudgetSet(REF, self.shares))
            self.cores.append(core)

    def _constants(self, edge: int) -> Mapping[str, Constant]:
        return self.constants[edge] if self.constants else {}

    def reads(self, edge: int, rows: Sequence[Mapping[str, Any]], time_ms: int = 0, pulls: bool = False) -> None:
        """One batch; with `pulls`, the link has room before the slice ends."""
        columns = {name: pa.array([row.get(name) for row in rows], t) for name, t in self.columns.items()}
        times = pa.array([time_ms] * len(rows), pa.int64())
        self.cores[edge].handle(Ingested("s", "file", pa.record_batch({**columns, TIME_COLUMN: times}), time_ms))
        if pulls:
            self._pull(edge, PullEvent(1 << 12, {"s": time_ms}, 1000.0, 0))

    def closes_late(self, edge: int, now_ms: int) -> None:
        """Ends the input of an edge; its link passes 1,000 bytes a second, from this event time on."""
        self.cores[edge].handle(SourceEnded("s", "file"))
        self._pull(edge, PullEvent(1 << 12, {"s": now_ms}, 1000.0), pull=drained)

    def pulls_small(self, edge: int) -> None:
        """The link takes what the edge has to send, in frames of one group each."""
        self._pull(edge, PullEvent(1), pull=drained)

    def _pull(self, edge: int, event: PullEvent = ROOM, pull: Callable[..., list[Frame]] = pulled) -> None:
        self.bodies[edge] += [frame.unpack() for frame in pull(self.cores[edge], event)]

    def record(self) -> AnswerRecord:
        """Ends the input; the answer to the window that starts at 0, complete."""
        for edge, core in enumerate(self.cores):
            core.handle(SourceEnded("s", "file"))
            self._pull(edge, pull=drained)
        return self.record_of(self.bodies)

    def record_of(self, bodies_by_edge: Sequence[Sequence[FrameBody]], step_ms: int = 0) -> AnswerRecord:
        """The answer to the window that starts at 0, after these frames of each edge, one every `step_ms`."""
        ledger = Ledger(AnswerMargin(0))
        names = [EdgeId(f"e{number}") for number in range(self.edges)]
        ledger.handle(EdgesChanged(tuple(map(self._edge_record, names))))
        ledger.handle(QueryRegistered(RegisteredQuery(REF, self.spec, 0, None)))
        answers: list[Emission] = []
        position = 0
        for name, bodies in zip(names, bodies_by_edge, strict=True):
            for body in bodies:
                position += 1
                touched = tuple(sorted({p.slice_start_ms for p in body.partials}))
                summary = FrameSummary(REF, position, name, body.through_ms, body.closes, touched, 100, 0, "i1")
                answers += ledger.handle(FramesMerged((summary,), WINDOW_MS + position * step_ms))
        emission = [a for a in answers if a.window_start_ms == 0][-1]
        slices = self.spec.window.slices_of_window(0)
        partials = [p for bodies in bodies_by_edge for b in bodies for p in b.partials]
        parts = [p.synopsis for p in partials if p.slice_start_ms in slices]
        return AnswerRecord(
            answer_id=1,
            query=REF,
            window_start_ms=0,
            window_end_ms=WINDOW_MS,
            revision=emission.revision,
            phase=Phase.COMPLETE,
            answered_at_ms=WINDOW_MS,
            staleness_ms=0,
            facts=emission.facts,
            synopsis=GroupedAggregate.merge_bytes(parts) if parts else None,
        )

    def _edge_record(self, name: EdgeId) -> EdgeRecord:
        stream = StreamRecord("s", dict(self.columns), LIVE, constants=self._constants(int(name[1:])))
        return edge_record(name, stream, incarnation="i1")

    def answer(self, questions: MeasureQuestions = NO_QUESTIONS) -> dict[str, Any]:
        return render(self.record(), self.spec, questions)

    def table(self) -> pa.Table:
        return to_table(self.record(), self.spec)

    def csv(self) -> str:
        return io.TextIOWrapper(io.BytesIO(to_csv(self.record(), self.spec))).read()


def rows(answer: Mapping[str, Any]) -> dict[Any, Mapping[str, Any]]:
    """The rows of an answer by the value of their first key column."""
    return {next(iter(row["group"].values()), None): row for row in answer["data"]}
