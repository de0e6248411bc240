"""Complete answers against the truth: production edges, allocator, merge, ledger and store, with shares that
move all the time, edges that lag, late records and windows that overlap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from center.budgets import AllocationPolicy, BudgetAllocator, BudgetReport
from center.ledger import EdgesChanged, FrameSummary, Ledger, QueryRegistered
from center.results import AnswerRecord, ResultStore
from center.storage.delta_segments import Delta
from edge.core.events import BudgetSet, Ingested, SourceEnded
from edge.core.streams import StreamSpec
from edgewater.answers import Cause, WithheldBound
from edgewater.answers.statement import violations_of_facts
from edgewater.base.streams import TIME_COLUMN, EdgeId
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef
from tests.center.results_world import answers_after, edge_record
from tests.cores import drained, open_core
from tests.query_specs import query_spec

pytestmark = pytest.mark.nightly

REF = QueryRef("q", 1)
E_SUM, E_MAX = 400.0, 30.0
EDGES = ("a", "b", "c")
SECONDS = 24


def spec(window: dict[str, str], least: bool) -> QuerySpec:
    measures = {"s": "sum(x)", "top": "max(abs(x))"} | ({"low": "min(x)"} if least else {})
    limits = {"s": E_SUM, "top": E_MAX, "low": E_MAX}
    return query_spec(
        stream="events",
        group_by=["k"],
        measures=measures,
        window=window,
        budget={"error": {name: limits[name] for name in measures}},
        lateness="10s",
    )


class World:
    def __init__(self, path: Path, window: dict[str, str], seed: int, least: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.spec = spec(window, least)
        self.store, self.ledger = ResultStore(f"sqlite:///{path}/results.db"), Ledger()
        self.store.load_ledger(self.ledger)
        registered = QueryRegistered(RegisteredQuery(REF, self.spec, 0, None))
        self.store.tick(self.ledger, [EdgesChanged(tuple(map(edge_record, EDGES))), registered], 0)
        stream = StreamSpec({"k": pa.string(), "x": pa.int64()})
        self.cores = {edge: open_core(stream, (REF, self.spec), stream="events") for edge in EDGES}
        self.allocator = BudgetAllocator(
            {"s": E_SUM},
            {m.name: E_MAX for m in self.spec.measures if m.function.error == "extremum"},
            AllocationPolicy(min_gain=1.01, min_interval_ms=0),
        )
        self.allocator.set_members(frozenset(map(EdgeId, EDGES)), {})
        self.position, self.checked, self.now_ms = 0, 0, 1
        self.records: list[tuple[str, int, int]] = []
        self.versions: dict[str, int] = dict.fromkeys(EDGES, 0)

    def ingest(self, edge: str, times: np.ndarray, scale: float) -> None:
        keys = self.rng.choice(["p", "q", "r"], len(times), p=[0.7, 0.2, 0.1])
        values = np.rint(self.rng.normal(scale, scale / 2, len(times))).astype(np.int64)
        batch = pa.record_batch(
            {"k": pa.array(keys, pa.string()), "x": values, TIME_COLUMN: pa.array(times, pa.int64())}
        )
        self.records += zip(keys.tolist(), values.tolist(), times.tolist(), strict=True)
        self.cores[edge].handle(Ingested("events", "file", batch, 1 << 40))
        self.ship(edge)

    def ship(self, edge: str) -> None:
        """What the edge has to say now reaches the store, and every answer that follows is compared."""
        for body in (frame.unpack() for frame in drained(self.cores[edge])):
            self.position += 1
            touched = tuple(sorted({p.slice_start_ms for p in body.partials}))
            fact = FrameSummary(REF, self.position, EdgeId(edge), body.through_ms, body.closes, touched, 1, 0, "i")
            deltas = [Delta("q@1", p.slice_start_ms, p.synopsis) for p in body.partials]
            self.store.apply(self.ledger, deltas, [fact], {"q@1": self.position}, self.now_ms)
        for record in answers_after(self.store, self.checked, 1_000):
            self.checked += 1
            self.compare(record)

    def shares_move(self, edge: str, drift: float) -> None:
        """The edge reports, with a load that is said to have moved, and hears what the allocator has for it."""
        self.now_ms += 1_000
        pipeline = self.cores[edge].queries[REF]
        last = pipeline.store.schedule.last
        report = BudgetReport(pipeline.store.schedule.version, last.shares, last.from_ms, 50.0, {"s": drift})
        assert self.allocator.report(EdgeId(edge), report, self.now_ms) == []
        self.allocator.rebalance(self.now_ms, 1 << 50)
        if (grant := self.allocator.grants().get(EdgeId(edge))) is not None and self.rng.random() < 0.7:
            self.cores[edge].handle(BudgetSet(REF, grant.shares, grant.version, grant.from_ms))
            self.versions[edge] = grant.version

    def compare(self, record: AnswerRecord) -> None:
        assert record.phase.value in ("complete", "final")
        window = f"window {record.window_start_ms}, revision {record.revision}"
        # Of a world with late records, an answer allows for more of them.
        assert {v.code for v in violations_of_facts(record.facts, self.spec)} <= {Cause.MAY_CHANGE}, window
        got = values(record.synopsis)
        for key in "pqr":
            xs = [x for k, x, t in self.records if k == key and record.window_start_ms <= t < record.window_end_ms]
            if not xs:
                continue
            s, top, low = got.get(key, (0.0, 0.0, None))
            error, bound = sum(xs) - s, record.facts.withheld.get("s", WithheldBound(0.0, 0.0))
            assert abs(error) <= E_SUM, window
            assert -bound.below - 1e-6 <= error <= bound.above + 1e-6, f"{window}: the stated bound is real"
            assert max(bound.above, bound.below) <= E_SUM * (1 + 1e-9)
            assert max(map(abs, xs)) - top <= E_MAX, window
            assert low is None or 0 <= low - min(xs) <= E_MAX, window


def values(synopsis: bytes | None) -> dict[str, tuple[float, float, float | None]]:
    if synopsis is None:
        return {}
    aggregate = GroupedAggregate.from_bytes(synopsis)
    keys = aggregate.rows()[0].to_pylist()
    least = aggregate.query("low").value if "low" in aggregate.measures else [None] * len(keys)
    columns = (aggregate.query("s").value, aggregate.query("top").value, least)
    return dict(zip(keys, zip(*columns, strict=True), strict=True))


@pytest.mark.parametrize("window", [{"tumbling": "2s"}, {"sliding": "4s", "every": "1s"}], ids=["tumbling", "sliding"])
@pytest.mark.parametrize("least", [False, True], ids=["", "with-min"])
@pytest.mark.parametrize("seed", range(2))
def test_complete_answers_obey_the_budget_while_shares_move(
    tmp_path: Path, window: dict[str, str], seed: int, least: bool
) -> None:
    world = World(tmp_path, window, seed, least)
    behind = dict.fromkeys(EDGES, 0)
    while min(behind.values()) < SECONDS:
        edge = str(world.rng.choice([e for e in EDGES if behind[e] < SECONDS]))
        # What one edge may keep back of a group is all of it or nothing, so that two who may are one too many.
        scale = 15.0 if "tumbling" in window else 10.0
        for _ in range(int(world.rng.integers(1, 7))):  # one edge is ahead of the others by seconds
            begin = behind[edge] * 1_000
            world.ingest(edge, np.sort(world.rng.integers(begin, begin + 1_000, 12)), scale)
            behind[edge] += 1
        if world.rng.random() < 0.3:
            world.ingest(edge, world.rng.integers(max(0, begin - 6_000), begin + 1, 2), scale)  # late ones
        hungry = world.rng.choice(EDGES)
        for _ in range(6):
            for each in EDGES:
                world.shares_move(each, 1e4 if each == hungry else 1e-2)
    for edge in EDGES:
        world.cores[edge].handle(SourceEnded("events", "f"))
        world.ship(edge)
    assert world.checked > SECONDS / 2
    assert min(world.versions.values()) > 5, "shares did move"
    kept_back = any(r.facts.withheld for r in answers_after(world.store, 0, 1_000))
    assert kept_back or least, "a least value that was never sent has no bound, and takes the group with it"
