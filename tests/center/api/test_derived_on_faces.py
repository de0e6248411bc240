"""A rate of windows with unequal numbers of records, on the faces that unite windows or groups, decide, or explain."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from center.ingest.assignments import _message
from center.sinks.alert_rules import AlertBook, AlertRule, Condition
from center.sinks.runner import read_query, sink_answer
from edgewater.client import Center
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from tests.center.api.conftest import COLUMNS, HOUR, T0, Desk

PATH = "/v1/queries/flights"
MEASURES = {"n": "count()", "late": "count() filter (where dep_delay > 15)", "rate": "late / n"}
HOURS = ((1, 1), (0, 2), (1, 97))
"""By hour, how many flights were late, and how many were not."""


@pytest.fixture
def hours(desk: Desk) -> tuple[Desk, RegisteredQuery]:
    query = desk.register_over("jfk", measures=MEASURES)
    for hour, (late, on_time) in enumerate(HOURS):
        delays = [60.0] * late + [0.0] * on_time
        columns = {"carrier": pa.array(["UA"] * len(delays)), "dep_delay": delays, "distance": [1] * len(delays)}
        arrays = query.spec.bind({"dep_delay": pa.float64(), "carrier": pa.string()}).measures
        batch = pa.record_batch({"dep_delay": pa.array(delays), "carrier": columns["carrier"]})
        read = {m.measure.argument: m.argument.array(batch) for m in arrays if m.argument is not None}
        desk.ship(query, "jfk", T0 + hour * HOUR, {**columns, **{str(text): values for text, values in read.items()}})
    return desk, query


@pytest.mark.nightly
def test_a_roll_up_and_a_total_divide_sums(hours: tuple[Desk, RegisteredQuery]) -> None:
    desk, _ = hours
    path = f"{PATH}/rollup"
    (answer,) = desk.get(path, params={"every": "3h"}).json()["answers"]
    truth = 2 / 102
    assert answer["data"][0]["rate"]["estimate"] == answer["total"]["rate"]["estimate"] == truth
    assert answer["data"][0]["rate"]["lower"] == answer["data"][0]["rate"]["upper"] == truth
    arrow = pa.ipc.open_stream(desk.get(path, params={"every": "3h", "format": "arrow"}).content).read_all()
    assert arrow.column("rate").to_pylist() == [truth]
    csv = pa.csv.read_csv(io.BytesIO(desk.get(path, params={"every": "3h", "format": "csv"}).content))
    assert csv.column("rate").to_pylist() == [truth]
    each = [a["data"][0]["rate"]["estimate"] for a in desk.get(f"{PATH}/windows").json()["answers"]]
    assert each == [0.5, 0.0, 1 / 98]
    select = {"sql": "SELECT sum(late) / sum(n) AS rate FROM flights"}
    assert desk.ask("POST", "/v1/sql", json=select).json()["rows"] == [[truth]]
    params = {"query": "flights:all:rate", "time": str((T0 + 3 * HOUR) // 1000)}
    (sample,) = desk.get("/prometheus/api/v1/query", params=params).json()["data"]["result"]
    assert float(sample["value"][1]) == 1 / 98
    with desk.served() as url, Center(url) as center:
        rolled = next(iter(center.query("flights").windows(every="3h")))
        assert rolled["rate"].interval.estimate == truth and rolled.measures[:3] == ["n", "late", "rate"]


def test_a_rule_decides_about_the_records_or_about_the_rate_behind_them(hours: tuple[Desk, RegisteredQuery]) -> None:
    desk, query = hours
    read = read_query(query, desk.catalog)
    rules = {
        "certainly": "rate >= 0.5",
        "evidence": '"rate.binomial" >= 0.2',
        "none": 'rate > 0.5 AND "rate.binomial" < 1',
    }
    fired = set()
    for name, text in rules.items():
        book = AlertBook([AlertRule(name, "flights", Condition(text, "certainly", {}))])
        book.check([read])
        assert book.problems == {}
        (record,) = desk.results.at(query.ref, T0)
        fired |= {name for each in book.answer(sink_answer(record, read), query.spec.measures, desk.now) if each}
    assert fired == {"certainly"}, "one late flight of two is no evidence for a rate of 20 %"


def test_a_derived_measure_is_explained_listed_and_not_evaluated(hours: tuple[Desk, RegisteredQuery]) -> None:
    desk, _ = hours
    told = desk.get(f"{PATH}/windows/{T0}/explain", params={"measure": "rate"}).json()
    assert told["estimate"] == 0.5 and [part["cause"] for part in told["parts"]] == ["measures"]
    assert "n, late" in told["parts"][0]["says"] and told["edges"][0]["withheld"] is None
    assert [shape["name"] for shape in told["shapes"]] == ["", "binomial"]
    kind = {"content-type": "application/x-ndjson"}
    reply = desk.ask("POST", f"{PATH}/evaluate", content=json.dumps({"latest": 1, "measure": "rate"}), headers=kind)
    assert "it is derived and has no synopsis" in reply.text
    assert desk.get(PATH).json()["spec"]["measures"]["rate"] == "late / n"
    assert desk.get(f"{PATH}/latest", params={"compute": "rate: n / n"}).status_code == 422
    percent = desk.get(f"{PATH}/latest", params={"measure": "rate", "compute": "percent: 100 * rate"}).json()
    assert percent["data"][0]["percent"]["estimate"] == pytest.approx(100 / 98)
    assert set(percent["data"][0]) == {"group", "rate", "percent"}


def test_edges_get_the_query_without_what_the_center_derives(desk: Desk) -> None:
    measures: dict[str, Any] = {"rate": "count() filter (where dep_delay > 15) / count()"}
    query = desk.register(measures=measures)
    sent = json.loads(_message(query).query.spec)
    assert sent["measures"] == {"part_1": "count(CASE WHEN dep_delay > 15 THEN 1 END)", "part_2": "count()"}
    assert QuerySpec.from_mapping(sent).shown == ("part_1", "part_2")
    assert desk.catalog.queries.get("flights").spec == query.spec


def test_differences_of_distinct_counts_are_about_sets(desk: Desk) -> None:
    measures = {
        "carts": "distinct(distance) filter (where dep_delay < 1)",
        "either": "distinct(distance) filter (where dep_delay < 1 or dep_delay = 2)",
        "paid": "distinct(distance) filter (where dep_delay = 2)",
        "left": "either - paid",
        "both": "carts + paid - either",
    }
    users = np.concatenate([np.arange(1000), np.arange(700, 900), np.arange(5000)])
    steps = np.repeat([0.0, 2.0, 7.0], [1000, 200, 5000])
    batch = pa.record_batch({"distance": users, "dep_delay": steps, "carrier": pa.array(["UA"] * len(users))})
    query = desk.register_over("jfk", measures=measures)
    read = {m.measure.argument: m.argument.array(batch) for m in query.spec.bind(COLUMNS).measures if m.argument}
    desk.ship(query, "jfk", T0, {"carrier": batch["carrier"], **read})
    (row,) = desk.get(f"{PATH}/latest").json()["data"]
    assert row["left"]["lower"] <= 800 <= row["left"]["upper"] and row["left"]["upper"] < 900
    assert row["both"]["lower"] <= 200 <= row["both"]["upper"]
