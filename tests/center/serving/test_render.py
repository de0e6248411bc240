from __future__ import annotations

import csv
import io
import json
import math
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from center.ledger.window_facts import window_facts
from center.ledger.withheld import CloseTotals
from center.results import AnswerRecord
from center.serving.measures import MeasureQuestions
from center.serving.render import denoted_values
from edgewater.answers import UNKNOWN, Cause, Deviation, Phase, WithheldBound
from edgewater.answers.stored import facts_to_json
from edgewater.base.timestamps import rfc3339
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates, GroupedAggregate, Quantile
from edgewater.synopses.exact.aggregates import MeanStack
from edgewater.wire import QueryRef
from tests.center.rendered import render, to_csv, to_table

FLIGHTS = {"carrier": pa.string(), "late": pa.bool_(), "x": pa.int64(), "delay": pa.float64(), "=key": pa.string()}


def spec(**parts: object) -> QuerySpec:
    given = {"name": "flights", "from": "flights", "measures": {"n": "count()"}, "window": {"tumbling": "1m"}, **parts}
    return QuerySpec.from_mapping(given)


def aggregate(query: QuerySpec, columns: dict[str, list[Any]]) -> GroupedAggregate:
    """The aggregate of these records, as an edge makes it; measures name their column bare."""
    arrays = {name: pa.array(values, FLIGHTS[name]) for name, values in columns.items()}
    stacks = {m.name: m.stack(FLIGHTS[m.argument] if m.argument else None) for m in query.measures}
    result = GroupedAggregate({name: FLIGHTS[name] for name in query.group_by}, stacks)
    rows = len(next(iter(arrays.values())))
    values = {m.name: arrays[m.argument] if m.argument else None for m in query.measures}
    result.update([arrays[name] for name in query.group_by], values, rows)
    return result


def record(
    query: QuerySpec,
    synopsis: bytes | None,
    *,
    withheld: dict[str, WithheldBound] | None = None,
    missing: tuple[str, ...] = (),
    **changes: Any,
) -> AnswerRecord:
    totals = CloseTotals(observed=5, withheld=withheld)
    lacks = tuple(Deviation(Cause.MISSING, edge, lacks=UNKNOWN) for edge in missing)
    facts = window_facts(query, totals, expected=2, deviations=lacks, staleness_ms=180, first_staleness_ms=180)
    given = {
        "answer_id": 7,
        "query": QueryRef(query.name, 1),
        "window_start_ms": 1_357_020_000_000,
        "window_end_ms": 1_357_020_060_000,
        "revision": 2,
        "phase": Phase.COMPLETE,
        "answered_at_ms": 0,
        "staleness_ms": 180,
        "facts": facts,
        "synopsis": synopsis,
    }
    return AnswerRecord(**{**given, **changes})


def test_an_answer_is_rendered_as_documented() -> None:
    query = spec(group_by=["carrier"], measures={"n": "count()", "mean_delay": "mean(delay)"})
    data = aggregate(query, {"carrier": ["UA", "AA", "UA"], "delay": [1.0, 2.5, 2.0]})
    answer = render(record(query, data.to_bytes()), query)
    assert answer == {
        "query": "flights",
        "version": 1,
        "window": {"start": "2013-01-01T06:00:00Z", "end": "2013-01-01T06:01:00Z"},
        "phase": "complete",
        "revision": 2,
        "given_at": "1970-01-01T00:00:00Z",
        "data": [
            {
                "group": {"carrier": "AA"},
                "n": {"estimate": 1, "lower": 1, "upper": 1},
                "mean_delay": {"estimate": 2.5, "lower": 2.5, "upper": 2.5},
            },
            {
                "group": {"carrier": "UA"},
                "n": {"estimate": 2, "lower": 2, "upper": 2},
                "mean_delay": {"estimate": 1.5, "lower": 1.5, "upper": 1.5},
            },
        ],
        "total": {
            "n": {"estimate": 3, "lower": 3, "upper": 3},
            "mean_delay": {"estimate": 5.5 / 3, "lower": 5.5 / 3, "upper": 5.5 / 3},
        },
        "rest": {"n": 0},
        "shapes": {
            "n": [{"name": "", "shape": "interval", "columns": ["n"]}],
            "mean_delay": [{"name": "", "shape": "interval", "columns": ["mean_delay"]}],
        },
        "confidence": 1.0,
        "quality": {
            "completeness": {"ratio": 1.0, "expected": 2, "reported": 2, "missing": []},
            "records": {"observed": 5, "expected": 5, "sampled": 5, "late": 0, "after_final": 0, "rejected": 0},
            "staleness_ms": 180,
            "first_staleness_ms": 180,
            "error": {
                "rounding": {"n": 0, "mean_delay": 0},
                "sketch": {"n": 0, "mean_delay": 0},
                "sampling": {"n": 0, "mean_delay": 0},
                "withheld": {},
                "missing": {"n": 0, "mean_delay": 0},
            },
        },
        "contract": {"requested": {"exact": True}, "met": True, "violations": []},
    }
    json.dumps(answer, allow_nan=False)


def test_an_answer_that_lacks_an_edge_bounds_only_what_more_records_cannot_change() -> None:
    measures = {
        "n": "count()", "least": "min(x)", "most": "max(x)", "total": "sum(x)", "middle": "mean(x)",
        "kinds": "distinct(x)",
    }  # fmt: skip
    query = spec(measures=measures, budget={"staleness": "2s"})
    data = aggregate(query, {"x": [3, 5]}).to_bytes()
    answer = render(record(query, data, missing=("jfk",), phase=Phase.EARLY), query)
    bounds = {name: (cell["lower"], cell["upper"]) for name, cell in answer["data"][0].items() if name != "group"}
    unknown = (None, None)
    assert bounds == {
        "n": (2, None), "least": (None, 3), "most": (5, None), "total": unknown, "middle": unknown, "kinds": unknown,
    }  # fmt: skip
    assert not answer["contract"]["met"]
    assert [v["code"] for v in answer["contract"]["violations"]] == ["missing-edges"]
    table = to_table(record(query, data, missing=("jfk",), phase=Phase.EARLY), query).to_pylist()[0]
    assert (table["total"], table["total_lower"], table["total_upper"], table["n_lower"]) == (8, None, None, 2)


def test_rendering_does_not_change_the_record() -> None:
    query = spec()
    given = record(query, aggregate(query, {"x": [1]}).to_bytes())
    before = facts_to_json(given.facts)
    assert render(given, query) == render(given, query)
    assert facts_to_json(given.facts) == before


def test_a_query_without_groups_has_one_row_with_an_empty_group() -> None:
    query = spec(measures={"s": "sum(x)"})
    data = render(record(query, aggregate(query, {"x": [3, 4]}).to_bytes()), query)["data"]
    assert data == [{"group": {}, "s": {"estimate": 7, "lower": 7, "upper": 7}}]


def test_rows_are_sorted_by_group_whatever_order_they_were_merged_in() -> None:
    query = spec(group_by=["carrier", "late"])
    columns = {"carrier": ["b", "a", None, "a"], "late": [True, True, False, False]}
    backwards = {name: values[::-1] for name, values in columns.items()}
    shown = [render(record(query, aggregate(query, c).to_bytes()), query)["data"] for c in (columns, backwards)]
    assert shown[0] == shown[1]
    assert [tuple(row["group"].values()) for row in shown[0]] == [("a", False), ("a", True), ("b", True), (None, False)]


def test_a_group_without_a_value_has_null_and_not_nan() -> None:
    query = spec(group_by=["carrier"], measures={"s": "sum(x)", "v": "var(delay)"})
    answer = render(record(query, aggregate(query, {"carrier": ["a"], "x": [None], "delay": [1.0]}).to_bytes()), query)
    nothing = {"estimate": None, "lower": None, "upper": None}
    assert answer["data"] == [{"group": {"carrier": "a"}, "s": nothing, "v": nothing}]


def test_an_answer_without_groups_has_a_row_of_nulls_in_a_table() -> None:
    query = spec(group_by=["carrier"])
    assert render(record(query, None), query)["data"] == []
    table = to_table(record(query, None), query)
    assert table.to_pylist() == [{"carrier": None, "n": None, "n_lower": None, "n_upper": None}]


class RankStack(MeanStack):
    """Answers a quantile with its rank times the mean: enough of a quantile sketch to be asked."""

    questions: ClassVar = (Quantile,)

    def query(self, question: Any = None) -> Estimates:
        mean = self._totals.rounded(len(self)) / np.maximum(self._view("n"), 1)
        return Estimates(mean * question.q, mean * question.q - 1, mean * question.q + 1, 0.9, "test")


@pytest.fixture
def quantile_answer(monkeypatch: pytest.MonkeyPatch) -> tuple[AnswerRecord, QuerySpec]:
    query = spec(group_by=["carrier"], measures={"d": "mean(delay)"})
    synopsis = aggregate(query, {"carrier": ["a", "b"], "delay": [10.0, 20.0]}).to_bytes()
    monkeypatch.setattr("edgewater.synopses.registry._KINDS", {"mean": RankStack})
    return record(query, synopsis), query


def test_a_quantile_measure_answers_the_default_ranks(quantile_answer: tuple[AnswerRecord, QuerySpec]) -> None:
    answer = render(*quantile_answer)
    assert list(answer["data"][0]["d"]["quantiles"]) == ["0.5", "0.9", "0.95", "0.99"]
    assert answer["data"][1]["d"]["quantiles"]["0.5"] == {"estimate": 10.0, "lower": 9.0, "upper": 11.0}
    assert answer["confidence"] == 0.9


def test_a_measure_of_one_quantile_has_one_value() -> None:
    query = spec(measures={"d": "quantile(delay, 0.9)"})
    given = record(query, aggregate(query, {"delay": [float(n) for n in range(100)]}).to_bytes())
    cell = render(given, query)["data"][0]["d"]
    assert cell["lower"] <= 89 <= cell["upper"] and "quantiles" not in cell
    assert to_table(given, query).column_names == ["d", "d_lower", "d_upper", "d.nan"]
    other = render(given, query, MeasureQuestions(quantiles=(0.5,)))["data"][0]["d"]
    assert list(other["quantiles"]) == ["0.5"]


def test_a_reader_may_ask_for_other_quantiles(quantile_answer: tuple[AnswerRecord, QuerySpec]) -> None:
    answer = render(*quantile_answer, MeasureQuestions(quantiles=(0.25,)))
    assert answer["data"][0]["d"] == {"quantiles": {"0.25": {"estimate": 2.5, "lower": 1.5, "upper": 3.5}}}
    table = to_table(*quantile_answer, MeasureQuestions(quantiles=(0.25,)))
    assert table.column_names == ["carrier", "d_0.25", "d_0.25_lower", "d_0.25_upper"]


def test_a_table_has_a_column_per_group_and_three_per_measure() -> None:
    query = spec(group_by=["carrier", "late"], measures={"n": "count()", "s": "sum(x)"})
    columns = {"carrier": ["b", "a"], "late": [True, False], "x": [None, 2]}
    table = to_table(record(query, aggregate(query, columns).to_bytes()), query)
    assert table.to_pydict() == {
        "carrier": ["a", "b"],
        "late": [False, True],
        "n": [1.0, 1.0],
        "n_lower": [1.0, 1.0],
        "n_upper": [1.0, 1.0],
        "s": [2.0, None],
        "s_lower": [2.0, None],
        "s_upper": [2.0, None],
    }
    assert [str(table.schema.field(n).type) for n in ("carrier", "late", "n")] == ["string", "bool", "int64"]


def test_csv_is_the_table_with_a_header() -> None:
    query = spec(group_by=["carrier"])
    text = to_csv(record(query, aggregate(query, {"carrier": ['a,"b"']}).to_bytes()), query)
    assert text.decode() == '"carrier","n","n_lower","n_upper"\n"a,""b""",1,1,1\n'


def test_times_are_rfc_3339_with_milliseconds_only_where_there_are_any() -> None:
    assert rfc3339(0) == "1970-01-01T00:00:00Z"
    assert rfc3339(-1) == "1969-12-31T23:59:59.999Z"
    assert rfc3339(1_357_020_000_250) == "2013-01-01T06:00:00.250Z"
    assert rfc3339(400_000_000_000_000).startswith("14645-"), "a wrong unit at the source must not break the answer"


@pytest.mark.parametrize(
    ("key_type", "texts", "expected"),
    [
        (pa.string(), ["null", '"null"', "a", ""], [None, "null", "a", ""]),
        (pa.int64(), ["7", "null", "x", "1.0", str(1 << 63), str(-(1 << 63))], [7, None, -(1 << 63)]),
        (pa.bool_(), ["true", "False", "1", "null"], [True, None]),
        (pa.float64(), ["-0.0", "1e400", "inf", "-Infinity", "1.5"], [0.0, -math.inf, 1.5]),
    ],
)
def test_texts_of_a_url_denote_keys_of_the_columns_type(
    key_type: pa.DataType, texts: list[str], expected: list[object]
) -> None:
    found = denoted_values(texts, key_type).to_pylist()

    assert [repr(value) for value in found] == [repr(value) for value in expected]


def test_no_cell_of_csv_is_a_formula() -> None:
    keys = ["=1+1", "+1", "@SUM(A1)", "-1", "\tx", "\r=x", "'=x", "'x", "x=1", ""]
    query = spec(measures={"n": "count()", "least": "min(delay)"}, group_by=["=key"])
    held = aggregate(query, {"=key": keys, "delay": [-1.5] * len(keys)})
    text = to_csv(record(query, held.to_bytes()), query).decode()
    read = list(csv.reader(io.StringIO(text, newline="")))
    head, rows = read[0], read[1:]
    assert head[0] == "'=key"
    assert {row[0] for row in rows} == {
        "'=1+1", "'+1", "'@SUM(A1)", "'-1", "'\tx", "'\r=x", "''=x", "'x", "x=1", ""
    }  # fmt: skip
    assert {row[head.index("least")] for row in rows} == {"-1.5"}, "numbers stay numbers"
