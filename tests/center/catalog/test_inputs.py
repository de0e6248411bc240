"""Files that two sources of a stream read: their records count twice, and an alarm names both."""

from __future__ import annotations

import pytest

from center.catalog import Catalog
from edgewater.base.streams import EdgeId
from edgewater.model.edge_records import InputRecord
from tests.center.catalog_world import JFK, LGA, hello


def report(catalog: Catalog, edge: EdgeId, *fingerprints: int, stream: str = "flights", source: str = "a.log") -> None:
    catalog.edges.record_inputs({edge: (InputRecord(stream, source, fingerprints),)}, 5_000)


def alarms(catalog: Catalog) -> list[tuple[str, int]]:
    return [(a.edge, a.times) for a in catalog.alarms.latest() if a.kind == "equal-inputs"]


def test_an_alarm_names_both_sources_that_read_one_file(catalog: Catalog) -> None:
    hello(catalog, JFK)
    hello(catalog, LGA)
    report(catalog, JFK, 1, 2, source="/var/log/a.log")
    report(catalog, LGA, 3, source="/mnt/b.log")
    assert alarms(catalog) == []
    report(catalog, LGA, 2, 3, source="/mnt/b.log")
    assert alarms(catalog) == [(LGA, 1)]
    (alarm,) = catalog.alarms.latest()
    for name in ("flights", "/var/log/a.log", "/mnt/b.log", JFK, LGA):
        assert name in alarm.message
    report(catalog, JFK, 9)
    assert alarms(catalog) == [], "only the last report of an edge counts"
    report(catalog, LGA, 2, 3, source="/mnt/b.log")
    assert alarms(catalog) == []


@pytest.mark.parametrize("leaving", [JFK, LGA])
@pytest.mark.parametrize("how", ["no file", "another file", "retired"])
def test_the_alarm_ends_when_one_of_the_edges_no_longer_reads_the_file(
    catalog: Catalog, leaving: EdgeId, how: str
) -> None:
    ewr = EdgeId("ewr")
    for edge in (JFK, LGA, ewr):
        hello(catalog, edge)
        report(catalog, edge, 1)
    report(catalog, JFK, 1)
    assert sorted(alarms(catalog)) == [(ewr, 1), (ewr, 1), (JFK, 1), (JFK, 1), (LGA, 1)]
    if how == "retired":
        catalog.edges.retire(leaving)
    else:
        catalog.edges.record_inputs({leaving: () if how == "no file" else (InputRecord("flights", "b", (5,)),)}, 6_000)
    left = [a.message for a in catalog.alarms.latest()]
    assert left and not any(f"edge {leaving} " in message for message in left)
    assert all(a.times == 1 for a in catalog.alarms.latest())


def test_one_file_may_be_read_for_different_streams_and_after_its_first_reader_is_retired(catalog: Catalog) -> None:
    hello(catalog, JFK)
    hello(catalog, LGA)
    report(catalog, JFK, 1)
    report(catalog, LGA, 1, stream="trips")
    assert alarms(catalog) == []
    catalog.edges.retire(JFK)
    report(catalog, LGA, 1)
    assert alarms(catalog) == []


def test_two_sources_of_one_edge_that_read_one_file_raise_the_alarm(catalog: Catalog) -> None:
    hello(catalog, JFK)
    both = (InputRecord("flights", "*.log", (1, 2)), InputRecord("flights", "a.log", (2,)))
    catalog.edges.record_inputs({JFK: both}, 5_000)
    assert alarms(catalog) == [(JFK, 1)]


def test_edges_that_report_in_one_transaction_see_each_other(catalog: Catalog) -> None:
    hello(catalog, JFK)
    hello(catalog, LGA)
    both = {edge: (InputRecord("flights", "a.log", (1,)),) for edge in (JFK, LGA)}
    catalog.edges.record_inputs(both, 5_000)
    assert alarms(catalog) == [(LGA, 1)]
