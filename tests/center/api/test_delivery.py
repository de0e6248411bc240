"""The delivery of edges, from the catalog to every face of the center."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from edgewater.__main__ import Commands
from edgewater.base.streams import Delivery
from edgewater.client import Center
from tests.center.api.conftest import HOUR, T0, Desk

POINTS = [EntryPoint("edges", "edgewater.client.commands:edges", "edgewater.commands"),
          EntryPoint("query", "edgewater.client.commands:query", "edgewater.commands")]  # fmt: skip
BOTH = [Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE]


@pytest.mark.slow
def test_answers_the_list_of_edges_and_prometheus_name_edges_that_do_not_count_exactly_once(desk: Desk) -> None:
    desk.connect("jfk")
    desk.connect("lga", deliveries=(Delivery.AT_LEAST_ONCE,))
    desk.connect("ewr", deliveries=tuple(BOTH))
    query = desk.register()
    for edge in ("jfk", "lga", "ewr"):
        desk.report(query, edge, T0, {"UA": 3})
    edges = {e["edge"]: e["streams"][0]["delivery"] for e in desk.get("/v1/edges").json()["edges"]}
    assert edges == {"jfk": ["exactly-once"], "lga": ["at-least-once"], "ewr": BOTH}
    answer = desk.get("/v1/queries/flights/latest").json()
    assert answer["quality"]["completeness"]["delivery"] == {"lga": ["at-least-once"], "ewr": BOTH}
    at = {"query": "flights:exactly_once", "time": str((T0 + HOUR) / 1000)}
    (series,) = desk.get("/prometheus/api/v1/query", params=at).json()["data"]["result"]
    assert float(series["value"][1]) == 0
    with desk.served() as url:
        with Center(url) as center:
            found = center.query("flights").latest()
        assert found.delivery == {"lga": ["at-least-once"], "ewr": BOTH}

        def said(*arguments: str) -> str:
            commands = Commands("edgewater", find=lambda: POINTS)
            return CliRunner(env={"EDGEWATER_URL": url, "COLUMNS": "300"}).invoke(commands, list(arguments)).stdout

        assert re.search(r"lga .* at-least-once ", said("edges"))
        assert re.search(r"jfk .* exactly-once ", said("edges"))
        assert "lga counts at-least-once" in said("query", "show", "flights")


def test_answers_in_which_each_record_counts_once_say_nothing_more(desk: Desk, two_hours: tuple[Desk, object]) -> None:
    answer = desk.get("/v1/queries/flights/latest").json()
    assert "delivery" not in answer["quality"]["completeness"]
    at = {"query": "flights:exactly_once", "time": str((T0 + 2 * HOUR) / 1000)}
    (series,) = desk.get("/prometheus/api/v1/query", params=at).json()["data"]["result"]
    assert float(series["value"][1]) == 1
