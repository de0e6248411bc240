"""An answer has the same values, bounds and statement on every face, or lacks them for a listed reason."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.csv
import pytest
from sqlalchemy import update

from center.api.live_feed import LiveStream
from center.api.prometheus.series import DESCRIBING
from center.results import AnswerRecord
from center.results.schema import answers as stored_answers
from center.serving.answer_tables import BEYOND
from center.sinks import SinkAnswer, kafka, lake, postgresql
from center.sinks.alert_conditions import Condition
from center.sinks.runner import read_query, sink_answer
from edgewater.answers import UNKNOWN, Amount, Cause, Deviation, EdgeStatements, Facts, WithheldBound
from edgewater.answers.stored import facts_to_json
from edgewater.base.float_bounds import SIDES, to_float
from edgewater.model.key_texts import key_text
from edgewater.model.registered_query import RegisteredQuery
from tests.center.api.conftest import HOUR, T0, Desk

PATH = "/v1/queries/flights"
MEASURES = {"n": "count()", "miles": "sum(distance)", "most": "max(dep_delay)", "users": "distinct(distance)"}
MEASURES |= {"each": "miles / n", "rest": "(n - count(dep_delay)) / n", "known": "count(dep_delay) / n"}
BIG, FAR = (1 << 53) + 1, (1 << 63) - 1
CARRIERS: list[str | None] = ["UA", "AA", None, "null", ""]
Interval = tuple[Any, Any, Any]
"""Estimate, lower and upper bound."""


class Face(dict[Any, dict[str, Interval]]):
    """The intervals of an answer by group and measure, as one face shows them.

    Attributes:
        stated: what the face states of the whole answer.
        is_float: whether the face has only float64.
    """

    def __init__(self, rows: Any = (), *, is_float: bool = False, **stated: Any) -> None:
        super().__init__(rows)
        self.is_float, self.stated = is_float, stated


def deviating(*deviations: Deviation, **changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, deviations=deviations, **changes)


def without(edge: str, cause: Cause = Cause.MISSING, **changes: Any) -> Deviation:
    return Deviation(cause, edge, lacks=UNKNOWN, **changes)


def following(confidence: float) -> Deviation:
    amounts = {"miles": WithheldBound(250.0, 50.0), "most": WithheldBound(0.0, 0.0, 9.0)}
    return Deviation(Cause.MAY_CHANGE, lacks=Amount(0, 2), amounts=amounts, confidence=confidence)


def withholding(facts: Facts) -> Facts:
    own = {"miles": WithheldBound(250.0, 50.0), "most": WithheldBound(3.0, 0.0, 9.0), "users": WithheldBound(2.0, 0.0)}
    edges = EdgeStatements(withheld={"jfk": own}, only={"jfk": {"carrier": "UA"}})
    return replace(facts, withheld=own, edges=edges)


PLAIN = {"distance": [100] * len(CARRIERS), "dep_delay": [float(n) for n in range(len(CARRIERS))]}
SITUATIONS: dict[str, tuple[dict[str, Any], Callable[[Facts], Facts]]] = {
    "complete": (PLAIN, lambda facts: facts),
    "an edge is missing": (PLAIN, deviating(without("lga"), reported=1, ratio=0.5)),
    "an edge with constants is missing": (PLAIN, deviating(without("lga", only={"carrier": "AA"}), reported=1)),
    "an edge has left": (PLAIN, deviating(without("lga", Cause.LEFT))),
    "an edge has lost its state": (PLAIN, deviating(without("lga", Cause.LOST_STATE, extra=UNKNOWN))),
    "input is lost": (PLAIN, deviating(Deviation(Cause.INPUT_LOST, "lga", "log", "torn", lacks=Amount(0, 3)))),
    "records came late": (PLAIN, deviating(Deviation(Cause.AFTER_FINAL, records=2, lacks=Amount(2, 2)), ratio=0.7)),
    "records were rejected": (PLAIN, deviating(Deviation(Cause.REJECTED, records=2, lacks=UNKNOWN))),
    "records were counted on a guess": (PLAIN, deviating(Deviation(Cause.GUESSED, records=1, extra=UNKNOWN))),
    "late records may follow": (PLAIN, deviating(following(0.98))),
    "late records may follow, by few windows": (PLAIN, deviating(following(0.5))),
    "edges withhold": (PLAIN, withholding),
    "integers are beyond float64 and int64": ({**PLAIN, "distance": [FAR, BIG, -BIG, FAR, 1]}, lambda facts: facts),
    "values are not finite": ({**PLAIN, "dep_delay": [math.inf, math.nan, -math.inf, 1e308, 0.5]}, lambda facts: facts),
    "no edge has records": ({}, deviating(without("jfk"), without("lga"), reported=0, ratio=0.0, has_data=False)),
}
ABSENT: dict[str, dict[str, str]] = {
    "evaluate": {
        "contract": "a line is about a part of an answer",
        **dict.fromkeys(("each", "rest", "known"), "a derived measure has no synopsis"),
    },
    "prometheus": {
        "contract": "a sample is a number: it says whether the contract is met",
        "phase": "a sample is a number", "revision": "a face of the newest revision only",
    },
    "alert": dict.fromkeys(("contract", "completeness", "phase", "revision"), "a condition reads rows"),
    "kafka": {"no edge has records": "the statement is a message of its own"},
    "postgresql": {"no edge has records": "the statement is a row of edgewater_windows"},
    "parquet": {"no edge has records": "the statement is a row of the table of windows"},
}  # fmt: skip
"""By face, what it lacks, and why. A group without rows has no statement in tables of rows."""
NOT_FINITE: dict[str, Callable[[float], bool]] = {
    "kafka": math.isfinite,  # a message is JSON, which has no such numbers
    "alert": lambda n: not math.isnan(n),  # NaN satisfies no condition, as null
}
"""By face, the numbers that it shows; the others are null."""


def situated(desk: Desk, name: str) -> tuple[RegisteredQuery, AnswerRecord]:
    """Returns a query with one answer in this situation."""
    columns, change = SITUATIONS[name]
    query = desk.register_over("jfk", "lga", measures=MEASURES, lateness="99h")
    rows = {**(columns or PLAIN), "carrier": pa.array(CARRIERS)}
    if name.startswith("integers"):  # the sum of UA is beyond int64
        desk.ship(query, "jfk", T0, {**rows, "distance": pa.array(rows["distance"], pa.int64())})
        desk.ship(query, "lga", T0, {"carrier": pa.array(["UA"]), "distance": [FAR], "dep_delay": [0.0]})
    else:
        desk.ship(query, "jfk", T0, rows)
        desk.ship(query, "lga", T0, {"carrier": pa.array(["UA"]), "distance": [50], "dep_delay": [-1.0]})
    (record,) = desk.results.at(query.ref, T0)
    values: dict[str, Any] = {"quality": facts_to_json(change(record.facts))}
    if not columns:
        values["synopsis"] = None
    with desk.results.engine.begin() as connection:
        connection.execute(update(stored_answers).where(stored_answers.c.query == query.key).values(**values))
    (record,) = desk.results.at(query.ref, T0)
    return query, record


def of_cell(cell: Mapping[str, Any]) -> Interval:
    odd = cell.get("not_finite")
    return (cell["estimate"] if odd is None else float(odd), cell["lower"], cell["upper"])


def of_json(answer: Mapping[str, Any]) -> Face:
    rows = {row["group"]["carrier"]: {m: of_cell(row[m]) for m in MEASURES} for row in answer["data"]}
    contract = answer["contract"]
    met = "met; may-change" if contract.get("may_change") and "exact" in contract["requested"] else "met"
    codes = "; ".join(v["code"] for v in contract["violations"]) or met
    completeness = answer["quality"]["completeness"]["ratio"]
    return Face(rows, contract=codes, completeness=completeness, phase=answer["phase"], revision=answer["revision"])


def of_rows(rows: list[dict[str, Any]]) -> Face:
    """Of a table with a row per group, as mappings by column."""
    shown = [row for row in rows if any(row[m] is not None for m in MEASURES) or row["carrier"] is not None]
    found = {r["carrier"]: {m: (r[m], r[f"{m}_lower"], r[f"{m}_upper"]) for m in MEASURES} for r in shown}
    own = {name: {row[name] for row in rows} for name in ("contract", "completeness", "phase", "revision")}
    codes = {"; ".join(c for c in codes.split("; ") if c != BEYOND) or "met" for codes in own.pop("contract")}
    beyond = {row["carrier"] for row in rows if BEYOND in row["contract"]}
    stated = {name: values.pop() for name, values in {**own, "contract": codes}.items() if len(values) == 1}
    return Face(found, beyond=beyond, **stated)


def evaluated(desk: Desk) -> Face:
    face, kind = Face(), {"content-type": "application/x-ndjson"}
    for m in MEASURES.keys() - ABSENT["evaluate"].keys():
        line = json.dumps({"latest": 1, "measure": m})
        reply = json.loads(desk.ask("POST", f"{PATH}/evaluate", content=line, headers=kind).text)
        for row in reply["data"]:
            face.setdefault(row["group"]["carrier"], {})[m] = of_cell(row)
        ratio, phase = reply["completeness"]["ratio"], reply["phase"]
        face.stated = {"completeness": ratio, "phase": phase, "revision": reply["revision"]}
    return face


def prometheus(desk: Desk) -> Face:
    params = {"query": '{__name__=~"flights:.*"}', "time": (T0 + HOUR) / 1000}
    reply = desk.get("/prometheus/api/v1/query", params=params).json()
    keys: dict[str | None, str | None] = {key_text(carrier): carrier for carrier in CARRIERS}
    found: dict[tuple[Any, str], float] = {}
    for each in reply["data"]["result"]:
        labels, value = each["metric"], float(each["value"][1])
        found[keys.get(labels.get("carrier")), labels["__name__"].removeprefix("flights:")] = value
    face = Face(is_float=True)
    for carrier, name in found:
        if name in MEASURES:
            each = (found.get((carrier, f"{name}{end}")) for end in ("", "_lower", "_upper"))
            estimate, lower, upper = each
            face.setdefault(carrier, {})[name] = (estimate, lower, upper)
    stated = {name: found[None, name] for name in DESCRIBING}
    face.stated = {"met": bool(stated["contract_met"]), "completeness": stated["completeness"]}
    return face


def alerting(answer: SinkAnswer, query: RegisteredQuery) -> Face:
    verdicts = Condition("n >= 0", "possibly", {}).verdicts(answer.rows, query.spec.measures)
    carriers = answer.rows.column("carrier").to_pylist()
    face = Face(is_float=True)
    for m in MEASURES:
        each = verdicts.intervals[m]
        for at, carrier in enumerate(carriers):
            numbers = (float(v[at]) for v in (each.value, each.lower, each.upper))
            estimate, lower, upper = (None if math.isnan(n) else n for n in numbers)
            face.setdefault(carrier, {})[m] = estimate, lower, upper
    return face


def csv_rows(content: bytes) -> list[dict[str, Any]]:
    options = pa.csv.ConvertOptions(null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False)
    return list(pa.csv.read_csv(io.BytesIO(content), convert_options=options).to_pylist())


def text_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Reads the texts that PostgreSQL gets."""
    texts = {"carrier", "contract", "phase", "window_start", "window_end", "given_at", "withheld"}
    return [
        {n: v if v is None or n in texts else float(v) if {*v} & {*".enai"} else int(v) for n, v in row.items()}
        for row in table.to_pylist()
    ]


def select(desk: Desk) -> list[dict[str, Any]]:
    reply: httpx.Response = desk.ask("POST", "/v1/sql", json={"sql": "SELECT * FROM flights"})
    shown = reply.json()
    names = [column["name"] for column in shown["columns"]]
    numbers = [name for name in names if name.partition("_")[0] in MEASURES]
    rows = [dict(zip(names, row, strict=True)) for row in shown["rows"]]
    return [{n: float(v) if n in numbers and isinstance(v, str) else v for n, v in row.items()} for row in rows]


def faces(desk: Desk, query: RegisteredQuery, record: AnswerRecord) -> Iterator[tuple[str, Face]]:
    app = desk.app()
    (event,) = LiveStream(app.state.services.feed, query).begin()
    yield "live", of_json(json.loads(event.data))
    yield "roll-up", of_json(desk.get(f"{PATH}/rollup?every=1h").json()["answers"][0])
    yield "evaluate", evaluated(desk)
    yield "select", of_rows(select(desk))
    yield "prometheus", prometheus(desk)
    arrow = desk.get(f"{PATH}/windows", params={"format": "arrow"}).content
    yield "arrow", of_rows(pa.ipc.open_stream(arrow).read_all().to_pylist())
    yield "csv", of_rows(csv_rows(desk.get(f"{PATH}/windows", params={"format": "csv"}).content))
    read = read_query(query, desk.catalog)
    answer = sink_answer(record, read)
    yield "postgresql", of_rows(text_rows(postgresql._texts(answer.rows)))
    yield "kafka", of_rows(list(kafka.kafka_rows(answer.rows, answer.group_columns)))
    yield "parquet", of_rows(lake.lake_rows([answer], read.schema).to_pylist())
    yield "alert", alerting(answer, query)


def number(value: Any) -> Any:
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def expected(interval: Interval, face: Face, is_beyond: bool) -> Interval:
    """Returns an interval of `GET` as a face shows it, if the face has integers up to int64, or float64, only."""
    estimate, lower, upper = interval
    if face.is_float and not is_beyond:
        bounds = (None if b is None else to_float(b, side) for b, side in zip((lower, upper), SIDES, strict=True))
        return (None if estimate is None else to_float(estimate, 0), *bounds)
    return (None, None, None) if is_beyond else interval


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_face_shows_the_same_or_lacks_it_for_a_listed_reason(desk: Desk, situation: str) -> None:
    query, record = situated(desk, situation)
    truth = of_json(desk.get(f"{PATH}/latest").json())
    is_met = situation in ("complete", "integers are beyond float64 and int64", "late records may follow")
    assert truth.stated["contract"].startswith("met") or not is_met
    for name, face in faces(desk, query, record):
        absent = ABSENT.get(name, {})
        for member, value in truth.stated.items():
            if member in absent or situation in absent:
                assert member not in face.stated
            else:
                assert face.stated[member] == value, (name, member)
        if "met" in face.stated:
            assert face.stated["met"] == truth.stated["contract"].startswith("met"), name
        beyond = {key for key, cells in truth.items() if abs(cells["miles"][0] or 0) > FAR}
        assert face.stated.get("beyond", beyond) == beyond, name
        assert face.keys() == truth.keys(), name
        for key, cells in truth.items():
            for measure, interval in cells.items():
                if measure in absent:
                    assert measure not in face[key]
                    continue
                has_int64 = "beyond" in face.stated or name == "alert"
                wanted = expected(interval, face, has_int64 and key in beyond and measure == "miles")
                if wanted[0] is not None and not NOT_FINITE.get(name, lambda n: True)(wanted[0]):
                    wanted = (None, *wanted[1:])
                shown = face[key].get(measure, (None, None, None))
                assert [*map(number, shown)] == [*map(number, wanted)], (name, key, measure)
