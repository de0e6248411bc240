"""Alarms end with the edge or the query that they are about."""

from __future__ import annotations

from center.catalog import Catalog
from center.catalog.quarantine import SetAside
from tests.center.catalog_world import JFK, LGA, hello, spec


def kinds(catalog: Catalog) -> list[tuple[str, str]]:
    return sorted((alarm.kind, alarm.edge or alarm.query) for alarm in catalog.alarms.latest())


def test_alarms_about_an_edge_end_when_it_is_retired_and_come_again_when_it_is_reinstated(catalog: Catalog) -> None:
    for edge in (JFK, LGA):
        hello(catalog, edge)
        catalog.alarms.add("clock-differs", f"edge {edge}: its clock differs", edge, 1)
    catalog.alarms.add("records-rejected", "edge jfk: sources reject records", JFK, 1)
    catalog.edges.retire(JFK)
    assert kinds(catalog) == [("clock-differs", LGA)]
    catalog.alarms.add("clock-differs", "edge jfk: its clock differs", JFK, 2)  # a gateway notices it later
    assert kinds(catalog) == [("clock-differs", LGA)]
    catalog.edges.reinstate(JFK)
    catalog.alarms.add("clock-differs", "edge jfk: its clock differs", JFK, 3)
    assert kinds(catalog) == [("clock-differs", JFK), ("clock-differs", LGA)]


def test_alarms_about_a_query_end_when_it_is_deleted(catalog: Catalog) -> None:
    refs = [catalog.queries.register(spec(name), 1)[0].ref for name in ("a", "b")]
    for ref in refs:
        catalog.quarantine.set_query_aside(ref, SetAside.PAUSED, "no common schema", 5)
        catalog.alarms.add("query-failing", f"query {ref}", JFK, 1, f"{ref.name}@{ref.version}")
    catalog.queries.delete("a", 2)
    assert kinds(catalog) == [("query-failing", JFK), ("query-paused", f"b@{refs[1].version}")]
    catalog.alarms.add("query-failing", "query a", JFK, 3, f"a@{refs[0].version}")  # the job notices it later
    assert [a.query for a in catalog.alarms.latest()] == [f"b@{refs[1].version}"] * 2
    again = catalog.queries.register(spec("a"), 4)[0].ref
    catalog.alarms.add("query-failing", "query a", JFK, 5, f"a@{again.version}")
    assert len(catalog.alarms.latest()) == 3
