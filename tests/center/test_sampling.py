from __future__ import annotations

import pytest

from center.sampling import EdgeSampling, SamplingOrder, needed_rate, rates_differ
from edgewater.query import QuerySpec
from edgewater.streams import EdgeId
from edgewater.wire.frames import QueryRef

REF = QueryRef("q", 1)
ORDERS = (SamplingOrder(REF, 0.2),)


def spec(**measures: str) -> QuerySpec:
    accuracy = {"error": "5%", "of": next(iter(measures))}
    given = {"name": "q", "from": "s", "measures": measures, "window": {"tumbling": "3s"}, "accuracy": accuracy}
    return QuerySpec.from_mapping(given)


def test_an_edge_that_keeps_up_is_told_once_to_process_everything() -> None:
    edge = EdgeSampling()
    (word,) = edge.on_heartbeat(0, 1e6, 3.0, ORDERS)
    assert (word.query, word.query_version, word.rate, word.clock_offset_ms) == ("q", 1, 1.0, 0.0)
    for _ in range(10):
        assert edge.on_heartbeat(100_000, 1e6, -3.0, ORDERS) == []


def test_an_overloaded_edge_is_told_the_needed_rate_until_it_is_relieved() -> None:
    edge = EdgeSampling()
    edge.on_heartbeat(0, 1e6, 0.0, ORDERS)
    (word,) = edge.on_heartbeat(2_500_000, 1e6, 0.0, ORDERS)
    assert word.rate == 0.2
    assert edge.on_heartbeat(1_000_000, 1e6, 0.0, ORDERS) == [], "between the bounds nothing changes"
    (word,) = edge.on_heartbeat(100_000, 1e6, 0.0, ORDERS)
    assert word.rate == 1.0


def test_a_rate_that_is_not_known_is_one() -> None:
    edge = EdgeSampling()
    (word,) = edge.on_heartbeat(10_000_000, 1e6, 0.0, (SamplingOrder(REF, 1.0),))
    assert word.rate == 1.0


def test_a_clock_that_is_off_is_told_by_the_median_of_heartbeats() -> None:
    edge = EdgeSampling()
    (word,) = edge.on_heartbeat(0, 1e6, 400.0, ORDERS)
    assert word.clock_offset_ms == 400.0
    assert edge.on_heartbeat(0, 1e6, -5_000.0, ()) == [], "a query that is gone is told nothing"
    edge = EdgeSampling()
    edge.on_heartbeat(0, 1e6, 400.0, ORDERS)
    edge.on_heartbeat(0, 1e6, 401.0, ORDERS)
    assert edge.on_heartbeat(0, 1e6, -5_000.0, ORDERS) == [], "one slow heartbeat moves nothing"


def test_a_query_that_is_registered_anew_is_told_again() -> None:
    edge = EdgeSampling()
    edge.on_heartbeat(0, 1e6, 0.0, ORDERS)
    again = SamplingOrder(QueryRef("q", 2), 0.2)
    (word,) = edge.on_heartbeat(0, 1e6, 0.0, (again,))
    assert word.query_version == 2


@pytest.mark.parametrize(
    ("measures", "planned", "needed"),
    [
        ({"b": "sum(x)"}, 0.12, 0.2),
        ({"b": "mean(x)"}, 0.9, 1.0),
        ({"n": "count()"}, 0.0, 1.0),
        ({"b": "sum(x)", "n": "count()"}, 0.12, 1.0),
    ],
)
def test_only_where_a_sample_saves_work_and_spoils_nothing_is_there_a_rate(
    measures: dict[str, str], planned: float, needed: float
) -> None:
    assert needed_rate(spec(**measures), planned) == pytest.approx(needed)


def test_rates_are_written_down_again_when_they_have_changed_by_a_tenth() -> None:
    e = EdgeId("e")
    assert rates_differ({}, {e: 1.0})
    assert not rates_differ({e: 0.2}, {e: 0.21})
    assert rates_differ({e: 0.2}, {e: 0.25})
