"""Samples that are topped up at the ends of windows, by production edge cores. `score` is an expensive function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from edge.arrivals import BernoulliSampler, top_up
from edge.core.core import EdgeCore
from edge.core.events import Configured, FrameBuilt, Ingested, PullEvent, SamplingSet
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edgewater.arrivals import read_report
from edgewater.base.streams import LIVE, TIME_COLUMN
from edgewater.model.accuracy import report_schedule
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.synopses.encoding.state import State
from edgewater.wire import Frame, FrameBody, QueryRef, SamplingReason
from tests.cores import Handles, open_core, pulled
from tests.edgewater.functions_world import Counting, install_functions

REF, SOURCE = QueryRef("q", 1), 3
STREAM = StreamSpec({"x": pa.float64(), "k": pa.string()}, LIVE, 10_000)
RATE, EXPECTED = 0.1, 1_000
PLANNED = 100  # RATE · EXPECTED
CAME = 400  # fewer than expected, in the first window


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting(lambda x: x)
    install_functions(monkeypatch, counting.named("score"))
    return counting


def spec(**parts: object) -> QuerySpec:
    accuracy = {"error": "5%", "substream": "500ms", "measure": "m", "range": [0, 1e6]}
    given = {"name": "q", "from": "s", "measures": {"m": "sum(score(x))"}, "window": {"tumbling": "1s"}}
    return QuerySpec.from_mapping({**given, "accuracy": accuracy, "lateness": "5s", **parts})


def sampling(rate: float = RATE, expected: int = EXPECTED) -> SamplingSet:
    return SamplingSet(REF, rate, 0.0, SamplingReason.MEASURE, expected)


def core(query: QuerySpec | None = None) -> EdgeCore:
    edge = open_core(STREAM, (REF, query or spec()), source="f", number=SOURCE)
    edge.handle(sampling())
    return edge


def batch(numbers: Sequence[int], at_ms: int, born_ms: int = 300) -> Ingested:
    """Records whose value is their number in the stream, born in the first window."""
    columns = {"x": pa.array([float(n) for n in numbers]), "k": pa.array([f"g{n % 2}" for n in numbers])}
    times = pa.array([born_ms] * len(numbers), pa.int64())
    return Ingested("s", "f", pa.record_batch({**columns, TIME_COLUMN: times}), at_ms)


def come(edge: Handles, first: int = 0, count: int = CAME, at_ms: int = 400, born_ms: int = 300) -> None:
    edge.handle(batch(range(first, first + count), at_ms, born_ms))


def pull(edge: EdgeCore, now_ms: int = 1_000) -> FrameBody:
    (frame,) = pulled(edge, PullEvent(1 << 16, edge.pulls.event_times(now_ms)))
    return frame.unpack()


def marks(count: int) -> np.ndarray:
    return BernoulliSampler(SOURCE, spec().sampling_seed).marks(0, count)


def smallest(number: int, count: int = CAME) -> set[float]:
    """The numbers of the records with the smallest marks."""
    return set(np.argsort(marks(count))[:number].astype(float).tolist())


def told(body: FrameBody, query: QuerySpec) -> tuple[int, float, float]:
    """The number of records, and the number and the sum of values, in a report."""
    schedule = report_schedule(query.window, query.accuracy, query.lateness_ms)
    assert schedule is not None and body.arrivals is not None
    grouped = bool(query.group_by)
    found = [s for each in body.arrivals.substreams for s in read_report(each, schedule.grid, grouped=grouped)]
    count, total, _ = sum((s.value_sums.sum(axis=1) for s in found), np.zeros(3))
    return sum(s.events for s in found), float(count), float(total)


def shipped(body: FrameBody) -> float:
    return sum(float(GroupedAggregate.from_bytes(p.synopsis).measures["m"].query().value.sum()) for p in body.partials)


@pytest.mark.parametrize("keys", [[], ["k"]])
def test_a_window_with_fewer_records_than_expected_gets_the_values_that_were_planned(
    score: Counting, keys: list[str]
) -> None:
    query = spec(group_by=keys)
    edge = core(query)
    come(edge)
    assert len(score.seen) < 0.6 * PLANNED
    monitor = edge.queries[REF].monitor
    assert monitor is not None
    before = monitor.nbytes
    body = pull(edge)
    assert monitor.nbytes < before - 32 * PLANNED, "kept records count as memory"
    chosen = smallest(PLANNED)
    assert len(score.seen) == PLANNED and set(score.seen) == chosen, "those with the smallest marks, each once"
    assert told(body, query) == (CAME, PLANNED, pytest.approx(sum(chosen), rel=1e-6))
    assert shipped(body) == sum(chosen), "the values are in the frame that reports them"


def test_values_arrive_after_the_report_of_their_counts_and_at_their_own_delays(score: Counting) -> None:
    """A report of an earlier window's end has counted them."""
    query, edge = spec(), core()
    pull(edge, 1_000)
    come(edge, 0, CAME, at_ms=1_100, born_ms=1_050)
    reports = [pull(edge, now_ms) for now_ms in (1_500, 2_000)]
    assert [told(body, query)[0] for body in reports] == [CAME, 0]
    assert sum(told(body, query)[1] for body in reports) == PLANNED
    schedule = report_schedule(query.window, query.accuracy, query.lateness_ms)
    assert schedule is not None
    cells = [
        {*s.value_cells.tolist()}
        for body in reports
        if body.arrivals is not None
        for each in body.arrivals.substreams
        for s in read_report(each, schedule.grid)
    ]
    assert cells[0] == cells[1], "the same lag as the records that were processed at once"


def test_late_records_are_sampled_at_the_rate_that_the_window_has_reached(score: Counting) -> None:
    edge = core()
    come(edge)
    pull(edge)
    come(edge, CAME, 2_000, at_ms=1_200)
    reached = np.sort(marks(CAME))[PLANNED - 1]
    every = marks(CAME + 2_000)
    assert set(score.seen) == set(np.flatnonzero(every <= reached).astype(float).tolist())
    come(edge, CAME + 2_000, 1_000, at_ms=1_300, born_ms=1_250)
    later = [x for x in score.seen if x >= CAME + 2_000]
    assert 0.05 < len(later) / 1_000 < 0.15, "the next window begins at the planned rate"


def test_the_rates_of_final_windows_are_forgotten(score: Counting) -> None:
    edge = core()
    for n in range(30):
        come(edge, 10 * n, 10, at_ms=1_000 * n + 400, born_ms=1_000 * n + 300)
        pull(edge, 1_000 * n + 900)
    monitor = edge.queries[REF].monitor
    assert monitor is not None and 1 <= len(monitor.windows) < 25


def test_a_rate_rises_to_four_times_the_planned_one_at_most(score: Counting) -> None:
    edge = core()
    come(edge, count=100)
    pull(edge)
    assert set(score.seen) == set(np.flatnonzero(marks(100) < 4 * RATE).astype(float).tolist())


def test_a_window_with_as_many_records_as_expected_is_not_topped_up(score: Counting) -> None:
    edge = core()
    come(edge, count=3_000)
    pull(edge)
    assert set(score.seen) == set(np.flatnonzero(marks(3_000) < RATE).astype(float).tolist())


def test_a_window_keeps_the_rate_with_which_it_began(score: Counting) -> None:
    edge = core()
    come(edge, count=2_000)
    edge.handle(sampling(0.2))
    come(edge, 2_000, 2_000, at_ms=600)
    pull(edge)
    assert set(score.seen) == set(np.flatnonzero(marks(4_000) < RATE).astype(float).tolist())


def test_kept_records_that_take_too_much_memory_lower_the_rate_that_can_be_reached(
    score: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_up, "KEPT_BYTES", 1_000)
    edge = core()
    for first in range(0, CAME, 20):
        come(edge, first, 20)
        assert edge.queries[REF].monitor is not None and edge.queries[REF].monitor.nbytes < 20_000
    pull(edge)
    limit = max(marks(CAME)[int(x)] for x in score.seen)
    assert 0.11 < limit < 0.24
    assert set(score.seen) == set(np.flatnonzero(marks(CAME) <= limit).astype(float).tolist()), "one rate holds"


@pytest.mark.parametrize(
    ("window", "expected", "is_topped_up"),
    [
        ({"tumbling": "1s"}, (EXPECTED, EXPECTED, EXPECTED), True),
        ({"tumbling": "1s"}, (EXPECTED, EXPECTED, 0), False),  # overload, which begins in the window
        ({"tumbling": "1s"}, (EXPECTED, 0, EXPECTED), False),
        ({"tumbling": "1s"}, (0, EXPECTED, EXPECTED), False),  # its first records were not kept
        ({"sliding": "2s", "every": "1s"}, (EXPECTED, EXPECTED, EXPECTED), False),
    ],
)
def test_neither_under_overload_nor_over_several_slices(
    score: Counting, window: object, expected: tuple[int, int, int], is_topped_up: bool
) -> None:
    edge = core(spec(window=window))
    for part, each in enumerate(expected):
        edge.handle(sampling(expected=each))
        come(edge, CAME // 4 * part, CAME // 4)
    pull(edge)
    below = set(np.flatnonzero(marks(CAME // 4 * 3) < RATE).astype(float).tolist())
    assert set(score.seen) == (smallest(PLANNED, CAME // 4 * 3) if is_topped_up else below)


def durable(path: Path) -> DurableCore:
    def empty() -> EdgeCore:
        return EdgeCore({"s": STREAM}, source=SOURCE)

    return DurableCore(path, empty, lambda *_: pytest.fail("nothing is replayable"), "i")


def parts(edge: EdgeCore) -> list[bytes]:
    """Returns the state that a replay gives again."""
    (query,) = State.unpack(edge.to_state(), "edge-core").components.values()
    return [query.components[part].pack(part) for part in ("store", "monitor")]


@pytest.mark.parametrize("checkpoint_at", [None, "kept", "ended"])
@pytest.mark.parametrize("by", ["pull", "batch"])
def test_an_edge_that_was_killed_sends_the_same_frames_and_goes_on_alike(
    score: Counting, tmp_path: Path, checkpoint_at: str | None, by: str
) -> None:
    """It is killed between the window's report and its close. The other edge is not."""
    states, frames = list[list[bytes]](), list[list[Frame]]()
    for killed in (False, True):
        path = tmp_path / str(killed)
        edge = durable(path)
        edge.handle(Configured(((REF, spec()),)))
        edge.handle(sampling())
        for first in range(0, CAME, 100):
            edge.ingest_payload(batch(range(first, first + 100), 400 + first))
        if checkpoint_at == "kept":
            edge.checkpoint()
        if by == "batch":
            edge.ingest_payload(batch(range(CAME, CAME + 10), 1_010, 1_005))
        assert edge.handle(PullEvent(1 << 16, edge.core.pulls.event_times(1_020)))
        if checkpoint_at == "ended":
            edge.checkpoint()
        edge.ingest_payload(batch(range(CAME + 10, CAME + 500), 1_100))
        edge.sync()
        if killed:
            edge.close()
            edge = durable(path)  # another frame would raise
        edge.ingest_payload(batch(range(CAME + 500, CAME + 1_000), 1_200))
        assert edge.handle(PullEvent(1 << 16, edge.core.pulls.event_times(12_000)))
        states.append(parts(edge.core))
        frames.append(list(edge.core.unacked))
        edge.close()
    assert frames[0] == frames[1] and states[0] == states[1]
    assert len(smallest(PLANNED) & set(score.seen)) == PLANNED


@pytest.mark.parametrize("after", ["overload", "late"])
def test_a_window_that_ended_at_a_pull_without_a_frame_ends_there_in_a_replay(
    score: Counting, tmp_path: Path, after: str
) -> None:
    """Its frames are built later, when the settings are others: a replay that ended it later gave other frames."""
    edge = durable(tmp_path)
    edge.handle(Configured(((REF, spec()),)))
    edge.handle(sampling())
    for first in range(0, CAME, 100):
        edge.ingest_payload(batch(range(first, first + 100), 400 + first))
    times_ms = edge.core.pulls.event_times(1_020)
    assert not any(isinstance(e, FrameBuilt) for e in edge.handle(PullEvent(0, times_ms)))
    assert len(smallest(PLANNED) & set(score.seen)) == PLANNED, "the pull has no room for a frame, and ends the window"
    if after == "overload":
        edge.handle(sampling(RATE, 0))
    edge.ingest_payload(batch(range(CAME, CAME + 500), 1_100))
    assert any(isinstance(e, FrameBuilt) for e in edge.handle(PullEvent(1 << 16, edge.core.pulls.event_times(12_000))))
    edge.sync()
    edge.close()
    again = durable(tmp_path)  # another frame would raise
    assert parts(again.core) == parts(edge.core)
    again.close()
