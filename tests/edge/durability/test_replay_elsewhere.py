"""Replays on a platform with other last bits and another compression send the same frames."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from sqlglot import exp

from edge.core.core import EdgeCore
from edge.core.events import (
    Acked,
    BudgetSet,
    Configured,
    Event,
    Ingested,
    PullEvent,
    SamplingSet,
    SourceEnded,
    SourcesOpened,
)
from edge.core.streams import StreamSpec
from edge.durability import DurableCore, recovery
from edge.records import Position
from edgewater.base.errors import StorageError
from edgewater.base.streams import TIME_COLUMN
from edgewater.model import expressions
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, QueryRef, SamplingReason
from tests.cores import pulled
from tests.edge.hard_state import hard_state
from tests.edge.recovery_world import Center, World, flights
from tests.query_specs import query_spec

pytestmark = pytest.mark.slow

REF = QueryRef("q", 1)
FIELDS = {"key": pa.int64(), "value": pa.float64()}
GROUPS = 110
SLICE_MS = 1000
REAL_EXP = np.exp


def query(**changes: Any) -> QuerySpec:
    return query_spec(changes, group_by=["key"], measures={"v": "sum(value)"})


@dataclass(frozen=True)
class Case:
    """A query, and a number that determines the sent groups: its share of the error budget, or its link's bandwidth.

    The seed is one with which the search for such a number is short.
    """

    spec: QuerySpec
    low: float
    high: float
    share: bool
    seed: int

    def core(self, at: float) -> list[Event]:
        start = [SourcesOpened((("s", "file"),)), Configured(((REF, self.spec),))]
        return [*start, BudgetSet(REF, {"v": at}, 1)] if self.share else start

    def pull(self, at: float, now_ms: int) -> PullEvent:
        return PullEvent(1 << 16, {"s": now_ms}, 3_000.0 if self.share else at, 5)


ERROR = {"budget": {"error": {"v": 40}}, "cache": {"eviction": "gain"}}
STALENESS = {"budget": {"staleness": "100ms"}, "cache": {"sizing": "pure_pess", "eviction": "lru"}}
CASES = {
    "error budget, sums": Case(query(**ERROR), 90.0, 300.0, True, seed=3),
    "error budget, extrema": Case(query(measures={"v": "max(value)"}, **ERROR), 2.0, 60.0, True, seed=3),
    "staleness budget": Case(query(**STALENESS), 1_000.0, 8_000.0, False, seed=1),
}


def batch(number: int) -> pa.RecordBatch:
    """Records of 110 groups in 100 ms of event time."""
    rng = np.random.default_rng(number)
    keys = np.concatenate([np.arange(GROUPS), rng.integers(0, GROUPS, 200)])
    times = np.sort(rng.integers(100 * number, 100 * (number + 1), len(keys)))
    return pa.record_batch(
        {"key": keys, "value": rng.exponential(8.0, len(keys)), TIME_COLUMN: pa.array(times, pa.int64())}
    )


def exp_with_another_last_bit(values: Any, *args: Any, **kwargs: Any) -> Any:
    return np.nextafter(REAL_EXP(values, *args, **kwargs), np.inf)


def chosen_first(case: Case, at: float) -> tuple[int, ...]:
    """The groups that a core without a journal sends at the first pull."""
    core = EdgeCore({"s": StreamSpec(FIELDS)})
    for event in case.core(at):
        core.handle(event)
    for number in range(5):
        core.handle(Ingested("s", "file", batch(number), 100 * (number + 1)))
    partials = [p for frame in pulled(core, case.pull(at, 500)) for p in frame.unpack().partials]
    return tuple(n for p in partials for n in GroupedAggregate.from_bytes(p.synopsis).rows()[0].to_pylist())


def where_the_last_bit_decides(case: Case, monkeypatch: pytest.MonkeyPatch) -> float:
    """A number at which the policy chooses otherwise if `np.exp` has another last bit.

    Found by bisection: next to where the choice changes at all.
    """

    def both(at: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        here = chosen_first(case, at)
        with monkeypatch.context() as patch:
            patch.setattr(np, "exp", exp_with_another_last_bit)
            return here, chosen_first(case, at)

    rng = np.random.default_rng(case.seed)
    for _ in range(40):
        low, high = sorted(rng.uniform(case.low, case.high, 2).tolist())
        first = chosen_first(case, low)
        while high > math.nextafter(low, math.inf):
            middle = low + (high - low) / 2
            if middle in (low, high):
                break
            low, high = (middle, high) if chosen_first(case, middle) == first else (low, middle)
        for at in (low, high, *(low + k * math.ulp(low) for k in range(-6, 7))):
            here, elsewhere = both(at)
            if here and here != elsewhere:
                return at
    raise AssertionError("no number was found at which the last bit decides")


class Edge:
    """A durable edge over the batches of `batch`."""

    def __init__(self, directory: Path, case: Case, at: float) -> None:
        self.case, self.at = case, at
        self.durable = DurableCore(directory, lambda: EdgeCore({"s": StreamSpec(FIELDS)}), self._reread, "first")

    def _reread(self, source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        return batch(end["batch"])

    def begin(self) -> None:
        for event in self.case.core(self.at):
            self.durable.handle(event)

    def step(self, number: int) -> list[Frame]:
        now_ms = 100 * (number + 1)
        position = {"batch": number}
        self.durable.ingest_range(Ingested("s", "file", batch(number), now_ms), None, position)
        return [] if number < 4 else self.pull(now_ms)

    def pull(self, now_ms: int) -> list[Frame]:
        return pulled(self.durable, self.case.pull(self.at, now_ms))

    def end(self) -> list[Frame]:
        self.durable.handle(SourceEnded("s", "file"))
        frames: list[Frame] = []
        while more := self.pull(1 << 40):
            frames += more
        return frames


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [name if number == 0 else pytest.param(name, marks=pytest.mark.nightly) for number, name in enumerate(CASES)],
)
def test_a_replay_with_another_zstd_and_exponential_sends_the_same_frames(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    at = where_the_last_bit_decides(case, monkeypatch)
    edge = Edge(tmp_path / "a", case, at)
    edge.begin()
    built = [frame for number in range(14) for frame in edge.step(number)]
    edge.durable.sync()
    assert len(built) > 3 and {f.encoding.name for f in built} & {"ZSTD"}

    again = Edge(tmp_path / "a", case, at).durable.core
    assert hard_state(again) == hard_state(edge.durable.core)

    monkeypatch.setattr(np, "exp", exp_with_another_last_bit)
    best = pa.Codec("zstd", compression_level=19)
    monkeypatch.setattr(pa, "compress", lambda data, codec, asbytes: best.compress(data, asbytes=asbytes))
    other = Edge(tmp_path / "b", case, at)
    other.begin()
    alone = [frame for number in range(14) for frame in other.step(number)]
    assert [f.plain_body() for f in alone] != [f.plain_body() for f in built], "on its own it would choose otherwise"
    packed = Frame.pack(built[0].seq, REF, built[0].unpack())
    assert packed.plain_body() == built[0].plain_body() and packed.body != built[0].body

    replayed = Edge(tmp_path / "a", case, at)
    assert list(replayed.durable.core.unacked) == built and replayed.durable.diverged == []
    rest = [frame for number in range(14, 20) for frame in replayed.step(number)] + replayed.end()
    check_sums(case, at, [*built, *rest])


def check_sums(case: Case, at: float, frames: list[Frame]) -> None:
    """What was sent and what is stated as withheld make the truth, per slice, with nothing lost or sent twice."""
    assert [f.seq for f in frames] == list(range(1, len(frames) + 1))
    merged: dict[int, GroupedAggregate] = {}
    withheld: dict[int, tuple[int, float]] = {}
    for body in (f.unpack() for f in frames):
        for partial in body.partials:
            part = GroupedAggregate.from_bytes(partial.synopsis)
            if partial.slice_start_ms in merged:
                merged[partial.slice_start_ms].merge(part)
            else:
                merged[partial.slice_start_ms] = part
        for close in body.closes:
            largest = max([w.largest_above for w in close.withheld], default=0.0)
            withheld[close.slice_start_ms] = close.observed, largest
    extremum = next(iter(case.spec.measures)).function.error != "sum"
    for start in (0, SLICE_MS):
        records = pa.concat_batches([batch(n) for n in range(start // 100, start // 100 + 10)])
        table = pa.Table.from_batches([records]).group_by("key").aggregate([("value", "max" if extremum else "sum")])
        true = {row["key"]: next(v for name, v in row.items() if name != "key") for row in table.to_pylist()}
        sent = dict(zip(merged[start].rows()[0].to_pylist(), merged[start].query("v").value.tolist(), strict=True))
        observed, largest = withheld[start]
        assert observed == records.num_rows
        if case.share:
            assert largest <= at
        for key, value in true.items():
            assert -1e-9 <= value - sent.get(key, 0.0) <= largest + 1e-9


MAPPING = {
    "name": "q", "from": "flights", "group_by": ["carrier"], "measures": {"v": "sum(distance)"},
    "window": {"tumbling": "10s"},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "sessions": {"window": {"session": "2s"}, "lateness": "30s"},
    "sessions, staleness": {"window": {"session": "2s"}, "budget": {"staleness": "1s"}},
    "staleness": {"budget": {"staleness": "1s"}, "lateness": "20s", "window": {"tumbling": "2s"}},
    "sliding, late records": {"window": {"sliding": "20s", "every": "5s"}, "lateness": "30s"},
    "combined budget, late records": {"budget": {"error": {"v": 900}, "staleness": "300ms"}, "lateness": "20s"},
    "error budget, late records": {"budget": {"error": {"v": 900}}, "lateness": "20s"},
    "accuracy": {"group_by": [], "accuracy": {"error": "5%", "substream": "1s"}, "lateness": "5s"},
    "accuracy, groups": {"accuracy": {"error": "5%", "substream": "1s"}, "lateness": "5s"},
    "early answers and staleness": {
        "accuracy": {"error": "5%", "substream": "1s"},
        "lateness": "5s",
        "budget": {"staleness": "1s"},
    },
    "relative error": {"budget": {"error": {"v": "20%"}}, "lateness": "20s"},
    "distinct values": {"measures": {"v": "distinct(distance, precision=6)"}, "cache": {"eviction": "lru"}},
    "samples": {"measures": {"v": "reservoir(distance, size=5)", "k": "kll(distance, k=8)"}},
}


class KindWorld(World):
    """Pulls as an agent does: by a clock, and a link that takes a few groups at a time."""

    def __init__(self, directory: Path, spec: QuerySpec) -> None:
        self.spec = spec
        super().__init__(directory, DATA, Center())

    def configure(self) -> None:
        self.edge.handle(SourcesOpened((("flights", "file"),)))
        self.edge.handle(Configured(((REF, self.spec),)))
        self.edge.handle(BudgetSet(REF, {"v": 900.0}, 1))
        if self.spec.accuracy is not None:
            self.edge.handle(SamplingSet(REF, 0.5, 3.0, SamplingReason.LINK))

    def run(self, checkpoint_at: int | None = None) -> int:
        """The number of frames, of which two thirds are acknowledged. There is a checkpoint at a row."""
        self.configure()
        while self.row < self.data.num_rows:
            start, end = self.row, min(self.row + 23, self.data.num_rows)
            if start == checkpoint_at:
                self.edge.checkpoint()
            records = self.data.slice(start, end - start)
            now_ms = int(np.max(records.column(TIME_COLUMN).to_numpy())) + 150
            self.edge.ingest_range(Ingested("flights", "file", records, now_ms), {"row": start}, {"row": end})
            for _ in range(4):
                times_ms = self.edge.core.pulls.event_times(now_ms)
                self.edge.handle(PullEvent(90, times_ms, 500.0, 20))
        self.edge.handle(Acked(2 * self.edge.core.next_seq // 3))
        return self.edge.core.next_seq - 1


class LogWorld(World):
    """Measures whose values are logarithms: of these the last bit is in the body."""

    SPEC = query_spec(
        name="logs",
        stream="flights",
        group_by=["carrier"],
        measures={"logs": "sum(ln(distance))", "flights": "count()"},
        window={"tumbling": "10s"},
        lateness="30s",
    )
    queries = ((QueryRef("logs", 1), SPEC),)

    def configure(self) -> None:
        if not self.edge.core.configured:
            self.edge.handle(SourcesOpened((("flights", "file"),)))
            self.edge.handle(Configured(self.queries))


DATA = flights(300, seed=4)


def begun(directory: Path) -> tuple[LogWorld, list[Frame]]:
    """A world that has sent some frames, of which the center has acknowledged the first."""
    world = LogWorld(directory, DATA, Center())
    world.configure()
    for _ in range(4):
        world.ingest(40)
        world.pull(60)  # a few groups: the others of the slice stay
        world.pull(60)
    world.edge.sync()
    built = list(world.edge.core.unacked)
    for frame in built:
        world.center.receive(frame)
    world.edge.handle(Acked(built[0].seq))
    world.edge.sync()
    return world, built


def another_logarithm(values: Any) -> Any:
    return pc.multiply(pc.ln(values), 1.0 + 2.0**-52)


def test_values_with_another_last_bit_change_no_recorded_frame_and_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world, built = begun(tmp_path)
    assert len(built) > 2
    monkeypatch.setitem(expressions._NUMERIC_FUNCTIONS, exp.Ln, another_logarithm)
    here = recovery.platform_id()
    monkeypatch.setattr(recovery, "platform_id", lambda: here + 1)
    again = LogWorld(tmp_path, DATA, world.center)
    assert list(again.edge.core.unacked) == built[1:]
    assert again.edge.diverged and set(again.edge.diverged) <= {f.seq for f in built}
    assert f"{len(again.edge.diverged)} frames" in caplog.text and "sent as recorded" in caplog.text
    again.finish()
    gone, takes, found, true = "DL", "AA", counted(again.center), counted_records()
    others = {slot for slot in true if slot[1] not in (gone, takes)}
    assert {s: n for s, n in found.items() if s in others} == {s: n for s, n in true.items() if s in others}
    assert all(0 < n <= true[s] for s, n in found.items() if s[1] == gone)
    logs = sum(v["logs"] for groups in again.center.answers().values() for v in groups.values())
    assert logs == pytest.approx(math.fsum(map(math.log, DATA.column("distance").to_pylist())), rel=1e-12)


def test_values_with_another_last_bit_on_the_same_platform_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path)
    monkeypatch.setitem(expressions._NUMERIC_FUNCTIONS, exp.Ln, another_logarithm)
    with pytest.raises(StorageError):
        LogWorld(tmp_path, DATA, Center())


class OtherCarriersWorld(LogWorld):
    """Re-reads the records of one carrier as those of another one."""

    GONE, TAKES = "DL", "AA"

    def _reread(self, source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        records = super()._reread(source, start, end)
        carriers = records.column("carrier")
        is_gone = pc.equal(pc.fill_null(carriers, "-"), self.GONE)
        at = records.schema.get_field_index("carrier")
        return records.set_column(at, records.schema.field(at), pc.if_else(is_gone, self.TAKES, carriers))


def test_a_replay_with_other_group_numbers_removes_the_sent_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another platform's arithmetic may give a record another group, and then another group comes first."""
    world, built = begun(tmp_path)
    here = recovery.platform_id()
    monkeypatch.setattr(recovery, "platform_id", lambda: here + 1)
    again = OtherCarriersWorld(tmp_path, DATA, world.center)
    assert list(again.edge.core.unacked) == built[1:] and again.edge.diverged
    again.finish()
    gone, takes, found, true = "DL", "AA", counted(again.center), counted_records()
    others = {slot for slot in true if slot[1] not in (gone, takes)}
    assert {s: n for s, n in found.items() if s in others} == {s: n for s, n in true.items() if s in others}
    assert all(0 < n <= true[s] for s, n in found.items() if s[1] == gone)


def counted(center: Center) -> dict[tuple[int, Any], float]:
    answers = center.answers()
    return {(start, group): v["flights"] for (_, start), groups in answers.items() for group, v in groups.items()}


def counted_records() -> dict[tuple[int, Any], float]:
    result: dict[tuple[int, Any], float] = {}
    for row in DATA.to_pylist():
        slot = row[TIME_COLUMN] // 10_000 * 10_000, row["carrier"]
        result[slot] = result.get(slot, 0.0) + 1.0
    return result
