from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from center.early import (
    EdgeSamplingController,
    SamplingPlan,
    SamplingRequirement,
    is_expensive,
    needed_plan,
    plans_differ,
)
from center.early.sampling import MAX_AGREEING_HEARTBEATS, ProcessorLoadDetector
from edgewater.base.streams import EdgeId
from edgewater.model.query import QuerySpec
from edgewater.model.windows import SlidingWindow
from edgewater.wire import QueryRef
from edgewater.wire import uplink_pb2 as pb
from tests.edgewater.functions_world import Counting, install_functions

REF = QueryRef("q", 1)
NEEDS = (SamplingRequirement(REF, 0.2),)


def spec(**measures: str) -> QuerySpec:
    accuracy = {"error": "5%", "measure": next(iter(measures))}
    given = {"name": "q", "from": "s", "measures": measures, "window": {"tumbling": "3s"}, "accuracy": accuracy}
    return QuerySpec.from_mapping(given)


def test_an_edge_that_keeps_up_is_sent_one_message_to_process_everything() -> None:
    edge = EdgeSamplingController()
    (message,) = edge.on_heartbeat(0, 1e6, 3.0, NEEDS)
    assert (message.query, message.query_version, message.rate, message.clock_offset_ms) == ("q", 1, 1.0, 0.0)
    for _ in range(10):
        assert edge.on_heartbeat(100_000, 1e6, -3.0, NEEDS) == []


def test_an_overloaded_edge_gets_the_needed_rate_until_it_is_relieved() -> None:
    edge = EdgeSamplingController()
    edge.on_heartbeat(0, 1e6, 0.0, NEEDS)
    (message,) = edge.on_heartbeat(2_500_000, 1e6, 0.0, NEEDS)
    assert message.rate == 0.2
    assert edge.on_heartbeat(1_000_000, 1e6, 0.0, NEEDS) == [], "between the bounds nothing changes"
    (message,) = edge.on_heartbeat(100_000, 1e6, 0.0, NEEDS)
    assert message.rate == 1.0


def beat(
    edge: EdgeSamplingController, share: float, behind_s: float = 0.0, needs: tuple[SamplingRequirement, ...] = NEEDS
):  # type: ignore[no-untyped-def]
    return [
        (message.rate, message.reason) for message in edge.on_heartbeat(int(behind_s * 1e6), 1e6, 0.0, needs, share)
    ]


def test_a_processor_is_overloaded_when_three_heartbeats_in_a_row_say_so_and_relieved_likewise() -> None:
    edge = EdgeSamplingController()
    assert beat(edge, 0.99) == [(1.0, pb.Sampling.NONE)]
    assert beat(edge, 0.99) == beat(edge, 0.5) == beat(edge, 0.99) == beat(edge, 0.95) == []
    assert beat(edge, 0.91) == [(0.2, pb.Sampling.PROCESSOR)]
    for share in (0.5, 0.5, 0.7, 0.59, 0.1):
        assert beat(edge, share) == [], "between the bounds, and for a moment, nothing changes"
    assert beat(edge, 0.59) == [(1.0, pb.Sampling.NONE)]


def test_an_edge_that_does_not_say_how_busy_it_is_is_not_busy() -> None:
    edge = EdgeSamplingController()
    messages = [edge.on_heartbeat(0, 1e6, 0.0, NEEDS) for _ in range(10)]
    assert [w.rate for batch in messages for w in batch] == [1.0]


def overloaded_until(load: ProcessorLoadDetector, beats: int, busy: float, calm: float) -> list[int]:
    """At which heartbeats an edge that is busy unless it samples gets a message."""
    changes = []
    for n in range(beats):
        before = load.overloaded
        load.on_heartbeat(calm if load.overloaded else busy)
        if load.overloaded and not before:
            changes.append(n)
    return changes


def test_an_edge_that_is_overloaded_for_good_is_relieved_ever_more_rarely_and_not_never() -> None:
    changes = overloaded_until(ProcessorLoadDetector(), 2_000, busy=1.0, calm=0.4)
    gaps = [b - a for a, b in pairwise(changes)]
    assert gaps == sorted(gaps) and gaps[:3] == [6, 9, 15]
    assert gaps[-1] == MAX_AGREEING_HEARTBEATS + 3 and len(changes) < 20


def test_a_relief_that_lasted_makes_the_next_one_easy_again() -> None:
    load = ProcessorLoadDetector()
    overloaded_until(load, 100, busy=1.0, calm=0.4)
    while load.overloaded:
        load.on_heartbeat(0.4)
    for _ in range(60):
        load.on_heartbeat(0.4)
    for _ in range(3):
        load.on_heartbeat(1.0)
    assert load.overloaded
    for _ in range(3):
        load.on_heartbeat(0.4)
    assert not load.overloaded


def test_an_expensive_measure_is_sampled_also_where_everything_keeps_up() -> None:
    edge, always = EdgeSamplingController(), SamplingRequirement(QueryRef("k", 1), 0.3, always=True)
    assert beat(edge, 0.0, needs=(always, *NEEDS)) == [(0.3, pb.Sampling.MEASURE), (1.0, pb.Sampling.NONE)]
    for _ in range(2):
        assert beat(edge, 1.0, needs=(always, *NEEDS)) == []
    assert beat(edge, 1.0, needs=(always, *NEEDS)) == [(0.2, pb.Sampling.PROCESSOR)]


def test_samples_are_topped_up_while_processor_and_link_keep_up() -> None:
    edge, always = EdgeSamplingController(), SamplingRequirement(REF, 0.3, always=True, records=400.4)

    def expected(utilization: float, backlog_bytes: int = 0) -> list[int]:
        messages = edge.on_heartbeat(backlog_bytes, 1e6, 0.0, (always,), utilization)
        assert all((m.rate, m.reason) == (0.3, pb.Sampling.MEASURE) for m in messages)
        return [m.expected_records for m in messages]

    assert expected(0.1) == [400]
    assert expected(0.1, 3_000_000) == [0] and expected(0.1) == [400]
    assert [expected(1.0) for _ in range(3)] == [[], [], [0]]


def test_of_several_reasons_the_one_that_lasts_longest_is_said_and_a_change_of_it_is_news() -> None:
    edge = EdgeSamplingController()
    beat(edge, 1.0)
    assert beat(edge, 1.0, behind_s=3) == [(0.2, pb.Sampling.LINK)]
    assert beat(edge, 1.0, behind_s=3) == [(0.2, pb.Sampling.PROCESSOR)]
    for _ in range(2):
        assert beat(edge, 0.1, behind_s=3) == []
    assert beat(edge, 0.1, behind_s=3) == [(0.2, pb.Sampling.LINK)]


def test_where_every_record_is_needed_there_is_no_reason_to_sample() -> None:
    edge, order = EdgeSamplingController(), SamplingRequirement(REF, 1.0, always=True)
    assert beat(edge, 1.0, behind_s=9, needs=(order,)) == [(1.0, pb.Sampling.NONE)]


def test_sums_of_columns_are_not_expensive() -> None:
    assert not is_expensive(spec(b="sum(x)"))


def test_a_rate_that_is_not_known_is_one() -> None:
    edge = EdgeSamplingController()
    (message,) = edge.on_heartbeat(10_000_000, 1e6, 0.0, (SamplingRequirement(REF, 1.0),))
    assert message.rate == 1.0


def test_a_clock_offset_is_the_median_of_heartbeats() -> None:
    edge = EdgeSamplingController()
    (message,) = edge.on_heartbeat(0, 1e6, 400.0, NEEDS)
    assert message.clock_offset_ms == 400.0
    assert edge.on_heartbeat(0, 1e6, -5_000.0, ()) == [], "a query that is gone gets no message"
    edge = EdgeSamplingController()
    edge.on_heartbeat(0, 1e6, 400.0, NEEDS)
    edge.on_heartbeat(0, 1e6, 401.0, NEEDS)
    assert edge.on_heartbeat(0, 1e6, -5_000.0, NEEDS) == [], "one slow heartbeat moves nothing"


def test_a_query_that_is_registered_again_gets_its_message_again() -> None:
    edge = EdgeSamplingController()
    edge.on_heartbeat(0, 1e6, 0.0, NEEDS)
    again = SamplingRequirement(QueryRef("q", 2), 0.2)
    (message,) = edge.on_heartbeat(0, 1e6, 0.0, (again,))
    assert message.query_version == 2


@pytest.mark.parametrize(
    ("measures", "planned", "needed"),
    [
        ({"b": "sum(x)"}, 0.16, 0.176),
        ({"b": "mean(x)"}, 0.95, 1.0),
        ({"n": "count()"}, 0.0, 1.0),
        ({"b": "sum(x)", "n": "count()"}, 0.12, 1.0),
    ],
)
def test_only_where_a_sample_saves_work_and_spoils_nothing_is_there_a_rate(
    measures: dict[str, str], planned: float, needed: float
) -> None:
    assert needed_plan(spec(**measures), SamplingPlan(planned, 1_000.0)) == pytest.approx((needed, 0.0))


def test_only_samples_of_expensive_measures_over_tumbling_windows_are_topped_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_functions(monkeypatch, Counting(lambda x: x).named("score"))
    planned, kept, refused = SamplingPlan(0.2, 500.0), (pytest.approx(0.22), 500.0), (pytest.approx(0.22), 0.0)
    assert needed_plan(spec(b="mean(score(x))"), planned) == kept
    assert needed_plan(spec(b="mean(x)"), planned) == refused
    sliding = replace(spec(b="mean(score(x))"), window=SlidingWindow(2_000, 1_000))
    assert needed_plan(sliding, planned) == refused


def test_rates_are_written_down_again_when_they_have_changed_by_a_tenth() -> None:
    e = EdgeId("e")
    assert plans_differ({}, {e: SamplingPlan()})
    assert not plans_differ({e: SamplingPlan(0.2, 100)}, {e: SamplingPlan(0.21, 105)})
    assert plans_differ({e: SamplingPlan(0.2)}, {e: SamplingPlan(0.25)})
    assert plans_differ({e: SamplingPlan(0.2, 100)}, {e: SamplingPlan(0.2, 120)})
