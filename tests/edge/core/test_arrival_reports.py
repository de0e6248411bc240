from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.core.arrival_reports import ArrivalMonitor, SamplingSettings
from edge.core.core import EdgeCore
from edge.core.events import Configured, FrameBuilt, Ingested, PullEvent, QueryRefused, SamplingSet, SourcesOpened
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.durability.event_records import decode_event, encode_event
from edgewater.arrivals import SubstreamStatistics, read_report
from edgewater.base.streams import LIVE, TIME_COLUMN, StreamClock
from edgewater.model.accuracy import MAX_GROUPS, report_schedule
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate, Sum
from edgewater.wire import Arrivals, FrameBody, QueryRef, SamplingReason, body_from_wire, body_to_wire
from edgewater.wire import uplink_pb2 as pb
from tests.cores import open_core, pulled
from tests.edge.hard_state import hard_state
from tests.query_specs import query_spec

REF = QueryRef("q", 1)
COLUMNS = {"x": pa.float64()}
SPEC = query_spec(measures={"total": "sum(x)"}, accuracy={"error": "5%", "substream": "500ms"}, lateness="5s")
BUDGETED = QuerySpec.from_mapping({**SPEC.to_mapping(), "budget": {"error": {"total": "5%"}}})
CLOCK = report_schedule(SPEC.window, SPEC.accuracy, SPEC.lateness_ms)


def core(clock: StreamClock | None = LIVE, spec: QuerySpec = SPEC) -> EdgeCore:
    return open_core(StreamSpec(COLUMNS, clock, 10_000), (REF, spec), source="f", number=3)


def come(edge: EdgeCore, arrival_ms: int, *records: tuple[int, float | None]) -> None:
    times = np.array([t for t, _ in records], np.int64)
    batch = pa.record_batch({"x": pa.array([x for _, x in records], pa.float64()), TIME_COLUMN: times})
    edge.handle(Ingested("s", "f", batch, arrival_ms))


def pull(edge: EdgeCore, now_ms: int, capacity: int = 1 << 16) -> FrameBody | None:
    frames = pulled(edge, PullEvent(capacity, edge.pulls.event_times(now_ms)))
    return frames[0].unpack() if frames else None


def told(body: FrameBody | None) -> list[SubstreamStatistics]:
    assert body is not None and body.arrivals is not None and CLOCK is not None
    return [each for state in body.arrivals.substreams for each in read_report(state, CLOCK.grid)]


def test_all_arrivals_are_sent_at_a_windows_end_even_if_the_watermark_is_behind() -> None:
    edge = core()
    come(edge, 600, (100, 1.0), (550, 2.0))
    come(edge, 990, (900, 4.0), (700, 8.0))
    assert edge.pulls.next_pull_ms(1e9, 700) == 700, "the end of a sub-stream is told"
    pull(edge, 700)
    assert edge.pulls.next_pull_ms(1e9, 700) == 1_000
    body = pull(edge, 1_000)
    assert body is not None and body.arrivals is not None
    assert body.arrivals.through_ms == 1_000
    assert sum(s.events for s in told(body)) == 4
    (partial,) = body.partials
    assert partial.slice_start_ms == 0
    assert body.through_ms < 0, "nothing is promised of the slice"
    total = GroupedAggregate.from_bytes(partial.synopsis).measures["total"].query(Sum())
    assert total.value.tolist() == [15.0]


def test_stragglers_are_reported_in_later_slots_and_each_record_once() -> None:
    edge = core()
    come(edge, 990, (900, 4.0))
    bodies = [pull(edge, 1_000)]
    come(edge, 1_010, (950, 2.0), (980, 3.0))
    now, due = 1_000, edge.pulls.next_pull_ms(1e9, 1_000)
    assert due is not None
    while due is not None and due < 1_600:
        now = max(now + 1, due)
        bodies.append(pull(edge, now))
        due = edge.pulls.next_pull_ms(1e9, now)
    assert sum(s.events for body in bodies if body for s in told(body)) == 3
    points = [body.arrivals.through_ms for body in bodies if body and body.arrivals]
    assert points == sorted(set(points)) and points[0] == 1_000 and 1_500 in points


def test_the_values_of_a_slice_are_in_the_first_substream_of_a_report() -> None:
    edge = core()
    come(edge, 990, (100, 1.0), (200, 2.0), (600, 4.0), (900, 8.0))
    first, second = told(pull(edge, 1_000))
    assert (first.index, first.events, second.index, second.events) == (0, 2, 1, 2)
    assert first.value_sums.sum(axis=1).tolist() == [4, 15.0, 85.0] and first.ranges.tolist() == [[1.0], [8.0]]
    assert not second.value_sums.size and second.ranges.tolist() == [[math.inf], [-math.inf]]
    come(edge, 1_010, (950, 16.0))
    (late,) = told(pull(edge, 1_020))
    assert (late.index, late.value_sums.sum(axis=1).tolist()) == (1, [1, 16.0, 256.0])


def test_under_an_error_budget_a_report_repeats_no_group_that_has_hardly_changed() -> None:
    edge = core(spec=BUDGETED)
    come(edge, 990, (900, 100.0))
    first = pull(edge, 1_000)
    assert first is not None and len(first.partials) == 1, "the first value of a group is not withheld"
    come(edge, 1_100, (950, 2.0))
    small = pull(edge, 1_500)
    assert small is not None and not small.partials and sum(s.events for s in told(small)) == 1
    come(edge, 1_600, (960, 5.0))
    large = pull(edge, 2_000)
    assert large is not None
    (partial,) = large.partials
    assert GroupedAggregate.from_bytes(partial.synopsis).measures["total"].query(Sum()).value.tolist() == [7.0]
    come(edge, 2_100, (970, 3.0))
    pull(edge, 2_500)
    come(edge, 12_000, (12_000, 1.0))
    closed = pull(edge, 12_000)
    assert closed is not None
    (close,) = closed.closes
    (withheld,) = close.withheld
    assert (withheld.measure, withheld.largest_above, withheld.groups) == ("total", 3.0, 1)
    assert withheld.above_share == pytest.approx(3 / 110)


def test_a_slot_without_arrivals_is_reported() -> None:
    edge = core()
    come(edge, 100, (50, 1.0))
    for now in (500, 1_000, 1_500):
        body = pull(edge, now)
        assert body is not None and body.arrivals is not None and body.arrivals.through_ms == now
    assert pull(edge, 1_510) is None


def test_a_report_larger_than_a_frame_is_split_and_complete_with_its_last_part() -> None:
    edge = core()
    come(edge, 4_900, *[(t, 1.0) for t in range(0, 4_900, 10)])
    first = pull(edge, 5_000, 10)
    assert first is not None and first.arrivals is not None
    assert first.arrivals.through_ms < 5_000 and len(first.arrivals.substreams) == 1
    total = sum(s.events for s in told(first))
    while (body := pull(edge, 5_000, 10)) is not None and body.arrivals is not None:
        total += sum(s.events for s in told(body))
        through = body.arrivals.through_ms
    assert total == 490 and through == 5_000


def test_a_report_is_whole_whatever_room_the_plan_of_the_link_gives_its_query() -> None:
    edge = open_core(StreamSpec(COLUMNS, LIVE, 10_000), source="f", number=3)
    plain = [QuerySpec.from_mapping({**SPEC.to_mapping(), "name": n, "accuracy": None}) for n in ("a", "b")]
    edge.handle(Configured(((REF, SPEC), *((QueryRef(spec.name, 1), spec) for spec in plain))))
    reported = []
    for now_ms in range(10_000, 30_000, 500):
        come(edge, now_ms - 1, *((now_ms - 1 - 37 * k, float(k)) for k in range(200)))
        for effect in edge.handle(PullEvent(1 << 16, edge.pulls.event_times(now_ms), bandwidth_bytes_s=1e6)):
            body = effect.frame.unpack() if isinstance(effect, FrameBuilt) else None
            if body is not None and body.arrivals is not None:
                reported.append((now_ms, body.arrivals.through_ms))
    assert len(reported) > 20 and all(through_ms == now_ms for now_ms, through_ms in reported)


def test_records_without_a_value_do_not_count_as_arrivals_of_a_sum() -> None:
    edge = core()
    come(edge, 400, (100, 1.0), (200, None), (300, float("nan")))
    (statistics,) = told(pull(edge, 500))
    assert statistics.events == 1


def test_a_count_of_a_column_counts_the_records_that_have_it() -> None:
    spec = {**SPEC.to_mapping(), "measures": {"total": "count(x)"}}
    edge = core(spec=QuerySpec.from_mapping(spec))
    come(edge, 400, (100, 1.0), (200, None), (300, float("nan")))
    (statistics,) = told(pull(edge, 500))
    assert statistics.events == 2


def test_a_clock_that_is_set_back_revokes_no_report() -> None:
    edge = core()
    come(edge, 990, (900, 4.0))
    pull(edge, 1_000)
    come(edge, 300, (250, 1.0))
    assert pull(edge, 400) is None
    body = pull(edge, 1_500)
    assert body is not None and body.arrivals is not None and body.arrivals.through_ms == 1_500
    assert sum(s.events for s in told(body)) == 1


def test_a_stream_without_a_clock_is_refused() -> None:
    edge = EdgeCore({"s": StreamSpec(COLUMNS, None)}, source=3)
    (effect,) = edge.handle(Configured(((REF, SPEC),)))
    assert isinstance(effect, QueryRefused) and "a stream with a clock" in effect.message


def test_report_slots_follow_a_replay_clock() -> None:
    edge = core(StreamClock(0, 0, 1_000.0))
    come(edge, 1, (900, 4.0))
    assert edge.pulls.next_pull_ms(1e9, 1) is not None
    body = pull(edge, 1)
    assert body is not None and body.arrivals is not None and body.arrivals.through_ms == 1_000


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_records_are_sampled_at_the_rate_and_the_others_counted(rate: float) -> None:
    edge = core()
    edge.handle(SamplingSet(REF, rate))
    times = np.arange(0, 1_000, dtype=np.int64)
    batch = pa.record_batch({"x": pa.array(np.ones(1_000)), TIME_COLUMN: times})
    dropped = [e for e in edge.handle(Ingested("s", "f", batch, 995)) if hasattr(e, "reason")]
    statistics = told(pull(edge, 1_000))
    kept = sum(s.value_sums[0].sum() for s in statistics if s.value_sums.size)
    assert sum(s.events for s in statistics) == 1_000
    # Marks are hashes of fixed identities; 0.3 ± 5 standard errors.
    assert abs(kept - 1_000 * rate) <= 5 * np.sqrt(1_000 * rate * (1 - rate)) + 1e-9
    assert sum(e.count for e in dropped) == 1_000 - kept


def test_the_sampling_rate_is_journaled(tmp_path: Path) -> None:
    def durable() -> DurableCore:
        def make() -> EdgeCore:
            return EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 10_000)}, source=3)

        return DurableCore(tmp_path, make, lambda *_: pytest.fail("nothing is replayable"), "i")

    first = durable()
    first.handle(Configured(((REF, SPEC),)))
    first.handle(SamplingSet(REF, 0.25, -12.0, SamplingReason.LINK))
    first.sync()
    first.close()
    second = durable()
    monitor = second.core.queries[REF].monitor
    assert monitor is not None and monitor.sampling == SamplingSettings(0.25, -12, SamplingReason.LINK)
    second.close()


GROUPED = QuerySpec.from_mapping({**SPEC.to_mapping(), "group_by": ["k", "n"]})
KEYS = {"k": pa.string(), "n": pa.int64()}


def grouped_core(spec: QuerySpec = GROUPED) -> EdgeCore:
    return open_core(StreamSpec({**COLUMNS, **KEYS}, LIVE, 10_000), (REF, spec), source="f", number=3)


def come_grouped(edge: EdgeCore, arrival_ms: int, *records: tuple[int, float | None, str | None, int]) -> None:
    times, x, k, n = zip(*records, strict=True)
    batch = pa.record_batch(
        {"x": pa.array(x, pa.float64()), "k": pa.array(k, pa.string()), "n": pa.array(n, pa.int64()),
         TIME_COLUMN: np.array(times, np.int64)}
    )  # fmt: skip
    edge.handle(Ingested("s", "f", batch, arrival_ms))


def told_by_group(body: FrameBody | None) -> list[SubstreamStatistics]:
    assert body is not None and body.arrivals is not None and CLOCK is not None
    return [each for state in body.arrivals.substreams for each in read_report(state, CLOCK.grid, grouped=True)]


def test_a_query_with_groups_reports_arrivals_and_values_by_group() -> None:
    edge = grouped_core()
    come_grouped(edge, 490, (100, 1.0, "a", 1), (350, 2.0, None, 1), (360, 4.0, "a", 1), (365, 8.0, "a", 2))
    come_grouped(edge, 495, (370, None, "a", 1), (380, float("nan"), "b", 7))
    (part,) = told_by_group(pull(edge, 500))
    keys = list(zip(*(k.to_pylist() for k in part.keys), strict=True))
    sums = {
        key: (row[0], row[1:-2].reshape(3, -1).sum(axis=1).tolist())
        for key, row in zip(keys, part.arrival_counts(), strict=True)
    }
    assert sums[("a", 1)] == (2, [2.0, 5.0, 17.0])
    assert sums[(None, 1)] == (1, [1.0, 2.0, 4.0]) and sums[("a", 2)] == (1, [1.0, 8.0, 64.0])
    assert sum(count for count, _ in sums.values()) == 4, "a record without a value is none of a sum's arrivals"
    assert part.arrivals()[:, 1].min() >= 0 and part.unattributed == 0


def test_beyond_the_group_limit_only_the_number_of_events_is_reported() -> None:
    edge = grouped_core()
    come_grouped(edge, 490, *[(100 + i, 1.0, f"k{i}", i) for i in range(MAX_GROUPS + 1)])
    come_grouped(edge, 495, (300, 1.0, "k0", 0))
    (part,) = told_by_group(pull(edge, 500))
    assert part.unattributed == MAX_GROUPS + 2 and not len(part.cells)
    come_grouped(edge, 990, (900, 1.0, "k0", 0))
    (part,) = told_by_group(pull(edge, 1_000))
    assert part.unattributed == 0 and part.counts.tolist() == [1]


def reports_of(edge: EdgeCore, bandwidth_bytes_s: float, begin_ms: int, end_ms: int) -> list[FrameBody]:
    """The frames with arrivals while 40 groups have a record each in every 100 ms."""
    bodies = []
    for now in range(begin_ms + 100, end_ms + 1, 100):
        come_grouped(edge, now - 5, *[(now - 10, float(i + now), f"k{i}", i) for i in range(40)])
        event = PullEvent(1 << 16, edge.pulls.event_times(now), bandwidth_bytes_s)
        bodies += [frame.unpack() for frame in pulled(edge, event)]
    return [body for body in bodies if body.arrivals is not None]


@pytest.mark.slow
def test_on_a_narrow_link_only_the_number_of_records_is_reported_at_the_ends_of_windows() -> None:
    edge = grouped_core()
    reports_of(edge, 4_000.0, 0, 4_000)
    bodies = reports_of(edge, 4_000.0, 4_000, 7_000)
    assert [body.arrivals.through_ms for body in bodies if body.arrivals] == [5_000, 6_000, 7_000]
    for body in bodies:
        (part,) = told_by_group(body)
        assert (part.unattributed, part.groups, len(part.cells)) == (400, 0, 0)
        assert body.arrivals is not None and len(body.arrivals.substreams[0]) < 250

    again = grouped_core()
    again.restore(edge.to_state())
    assert reports_of(again, 4_000.0, 7_000, 9_000) == reports_of(edge, 4_000.0, 7_000, 9_000)

    reports_of(edge, 1e6, 9_000, 10_000)
    bodies = reports_of(edge, 1e6, 10_000, 12_000)
    counts = [int(part.counts.sum()) for body in bodies for part in told_by_group(body)]
    assert sum(counts) == 800 and len(bodies) > 4, "the link is wide again"


def test_a_narrow_link_gets_the_statistics_of_a_sample() -> None:
    edge = grouped_core()
    edge.handle(SamplingSet(REF, 0.5, 0.0))
    reports_of(edge, 4_000.0, 0, 10_000)
    parts = [part for body in reports_of(edge, 4_000.0, 10_000, 12_000) for part in told_by_group(body)]
    assert sum(int(part.counts.sum()) for part in parts) == 800
    assert not any(part.unattributed for part in parts)


def test_unsent_statistics_are_merged_by_group_while_the_link_is_down() -> None:
    edge = grouped_core()
    for now in range(50, 3_000, 50):
        come_grouped(edge, now, (now - 40, 1.0, f"k{now % 3}", 0), (max(now - 700, 0), 2.0, "late", 0))
    body = pull(edge, 3_000)
    parts = told_by_group(body)
    assert [p.index for p in parts] == list(range(6)), "one statement per sub-stream"
    assert sum(int(p.counts.sum()) for p in parts) == 2 * len(range(50, 3_000, 50))


@pytest.mark.nightly
@pytest.mark.parametrize("budget", [{}, {"budget": {"error": {"total": "5%"}}}], ids=["exact", "budget"])
def test_a_replay_gives_the_same_statistics_by_group_byte_for_byte(tmp_path: Path, budget: dict[str, Any]) -> None:
    spec = QuerySpec.from_mapping({**GROUPED.to_mapping(), **budget})

    def make() -> EdgeCore:
        return EdgeCore({"s": StreamSpec({**COLUMNS, **KEYS}, LIVE, 10_000)}, source=3)

    def durable() -> DurableCore:
        return DurableCore(tmp_path, make, lambda *_: pytest.fail("nothing is replayable"), "i")

    whole, dying = make(), durable()
    for core in (whole, dying):
        core.handle(SourcesOpened((("s", "f"),)))
        core.handle(Configured(((REF, spec),)))
    rng = np.random.default_rng(5)
    for step in range(1, 41):
        now, count = 50 * step, int(rng.integers(1, 30))
        times = np.maximum(now - rng.integers(0, 400, count), 0)
        batch = pa.record_batch(
            {"x": rng.gamma(2.0, 5.0, count), "k": pa.array([f"k{i}" for i in rng.integers(0, 4, count)]),
             "n": rng.integers(0, 2, count), TIME_COLUMN: times}
        )  # fmt: skip
        frames = []
        for core in (whole, dying):
            event = Ingested("s", "f", batch, now)
            core.ingest_payload(event) if isinstance(core, DurableCore) else core.handle(event)
            frames.append(pulled(core, PullEvent(1 << 16, whole.pulls.event_times(now))) if step % 3 == 0 else [])
        assert frames[0] == frames[1]
        if step % 7 == 0:
            dying.sync()
            dying.close()  # without a checkpoint: what comes back is a replay
            dying = durable()
            assert hard_state(dying.core) == hard_state(whole)
    dying.close()


def why(body: FrameBody | None) -> SamplingReason:
    assert body is not None and body.arrivals is not None
    return body.arrivals.sampled


def test_reports_have_the_sampling_reason_until_all_arrivals_are_reported() -> None:
    edge = core()
    come(edge, 100, (50, 1.0))
    assert why(pull(edge, 500)) is SamplingReason.NONE
    edge.handle(SamplingSet(REF, 0.5, 0.0, SamplingReason.PROCESSOR))
    assert why(pull(edge, 1_000)) is SamplingReason.NONE, "nothing has come yet that was passed over"
    come(edge, 1_100, *[(t, 1.0) for t in range(1_000, 1_100)])
    edge.handle(SamplingSet(REF, 1.0))
    come(edge, 1_400, (1_300, 1.0))
    assert why(pull(edge, 1_500)) is SamplingReason.PROCESSOR, "it says so also if sampling has ended since"
    come(edge, 1_600, (1_550, 1.0))
    assert why(pull(edge, 2_000)) is SamplingReason.NONE


def test_each_part_of_a_split_report_has_the_sampling_reason() -> None:
    edge = core()
    edge.handle(SamplingSet(REF, 0.5, 0.0, SamplingReason.LINK))
    come(edge, 2_400, *[(t, 1.0) for t in range(0, 2_400, 10)])
    said = []
    while (body := pull(edge, 2_500, 10)) is not None and body.arrivals is not None:
        said.append(body.arrivals.sampled)
    assert len(said) > 1 and set(said) == {SamplingReason.LINK}


@pytest.mark.parametrize("reason", SamplingReason)
def test_a_sampling_rate_is_read_from_the_journal_with_its_reason(reason: SamplingReason) -> None:
    event = SamplingSet(REF, 0.5, 3.0, reason, 400)
    assert decode_event(encode_event(event)) == event


def test_an_unknown_reason_is_read_as_none() -> None:
    message = pb.Arrivals(through_ms=5)
    message.MergeFromString(pb.Arrivals(sampled=pb.Sampling.LINK).SerializeToString()[:-1] + bytes([9]))
    body = body_from_wire(pb.FrameBody(through_ms=7, arrivals=message))
    assert body.arrivals == Arrivals(5)


def test_arrivals_survive_the_wire() -> None:
    for arrivals in (None, Arrivals(5), Arrivals(-(1 << 62), (b"a", b"bc"), SamplingReason.MEASURE)):
        body = FrameBody(7, arrivals=arrivals)
        assert body_from_wire(body_to_wire(body)) == body


def test_a_monitor_without_records_is_due_once_per_report_slot() -> None:
    assert CLOCK is not None
    monitor = ArrivalMonitor(CLOCK, 1)
    assert monitor.due(10)
    report = monitor.report(10, 100, counts_only=False)
    assert report is not None
    monitor.apply(report)
    assert not monitor.due(19) and monitor.next_due_ms(10) == 20 and monitor.due(20)


def test_which_records_are_sampled_depends_on_the_seed_of_the_query() -> None:
    """Otherwise whoever pushes records could compute which of them are looked at."""
    ids = np.arange(4000)

    def sampled(seed: int | None) -> list[bool]:
        edge = core(spec=SPEC.with_seed(seed))
        edge.handle(SamplingSet(REF, 0.5))
        again = QuerySpec.from_mapping(SPEC.with_seed(seed).to_mapping())
        monitor = edge.queries[REF].monitor
        assert monitor is not None and again.seed == seed
        kept = monitor.sample(ids)
        assert kept is not None
        return kept.tolist()

    assert sampled(5) == sampled(5)
    assert len({tuple(sampled(seed)) for seed in (None, 5, 6)}) == 3
