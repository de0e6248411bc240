"""One answer states the same by every way to read it, whatever it lacks, and its bounds contain the truth."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import update

from center.catalog import SessionStart
from center.results.schema import answers as stored_answers
from center.serving.render import statement_of
from edgewater.answers import UNKNOWN, Amount, Cause, Deviation, LateRecords
from edgewater.answers.stored import facts_to_json
from edgewater.answers.uniting import with_late
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model.edge_records import StreamRecord
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Withheld
from tests.center.catalog_world import begin_session
from tests.center.measures_world import aggregate, record, records, spec
from tests.center.rendered import render

HOUR, T0 = 3_600_000, 1_356_998_400_000
PATH = "/v1/queries/flights"
COUNT = {"n": "count()"}


def rolled(desk: Any, every: str) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = desk.get(f"{PATH}/rollup", params={"every": every}).json()["answers"]
    return answers


def of_one_window(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns the roll-up of one window. It differs from the window's answer only by their number."""
    quality = answer["quality"]
    return {**answer, "quality": {**quality, "completeness": {**quality["completeness"], "windows": 1}}}


def asked(desk: Any, **line: Any) -> dict[str, Any]:
    given = desk.ask(
        "POST", f"{PATH}/evaluate", content=json.dumps(line).encode(), headers={"Content-Type": "application/x-ndjson"}
    )
    assert given.status_code == 200, given.text
    return dict(json.loads(given.content))


def bounds(cells: list[dict[str, Any]], measure: str = "n") -> dict[Any, tuple[Any, Any]]:
    """Returns lower and upper by carrier, of rows of an answer or of a line."""
    each = {row["group"]["carrier"]: row.get(measure, row) for row in cells}
    return {carrier: (cell["lower"], cell["upper"]) for carrier, cell in each.items()}


@pytest.fixture
def one_missing(desk):
    """Two windows of two edges, each of which is one carrier's. `lga` has not closed the second one."""
    desk.connect("jfk", "lga")
    for edge, carrier in (("jfk", "UA"), ("lga", "AA")):
        columns = desk.catalog.edges.get(EdgeId(edge)).streams[0].columns
        streams = [StreamRecord("flights", columns, LIVE, constants={"carrier": carrier})]
        begin_session(desk.catalog, SessionStart(
            EdgeId(edge), f"{edge}-1", labels={}, streams=streams, oldest_seq=0, next_seq=0, now_ms=desk.now
        ))  # fmt: skip
    query = desk.register(measures=COUNT, budget={"staleness": "2s"})
    desk.report(query, "jfk", T0, {"UA": 5})
    desk.report(query, "lga", T0, {"AA": 2})
    desk.report(query, "jfk", T0 + HOUR, {"UA": 5})
    desk.results.tick(desk.ledger, [], desk.now)
    return desk, query


def test_a_window_that_lacks_an_edge_is_stated_equally_by_every_read(one_missing):
    desk, _ = one_missing
    got = desk.get(f"{PATH}/latest").json()
    completeness = got["quality"]["completeness"]
    assert (completeness["missing"], completeness["only"], completeness["ratio"]) == (
        ["lga"], {"lga": {"carrier": "AA"}}, 0.5,
    )  # fmt: skip
    assert bounds(got["data"]) == {"UA": (5, 5)}, "the missing edge has no records of this carrier"
    assert rolled(desk, "1h")[-1] == of_one_window(got)
    for merge in (False, True):
        line = asked(desk, latest=1, measure="n", merge=merge)
        assert line["completeness"] == ({**completeness, "windows": 1} if merge else completeness)
        assert bounds(line["data"]) == bounds(got["data"])


def test_several_windows_are_united_by_one_rule(one_missing):
    desk, _ = one_missing
    (answer,) = rolled(desk, "2h")
    line = asked(desk, latest=2, measure="n", merge=True)
    completeness = answer["quality"]["completeness"]
    assert completeness == {
        "ratio": 0.75, "expected": 2, "reported": 1, "missing": ["lga"], "only": {"lga": {"carrier": "AA"}},
        "windows": 2,
    }  # fmt: skip
    assert line["completeness"] == completeness
    assert bounds(answer["data"]) == bounds(line["data"]) == {"UA": (10, 10), "AA": (2, None)}
    assert answer["contract"]["met"] is False


@pytest.mark.parametrize("unsent", [9.0, -45.0])
def test_stored_answers_replies_and_roll_ups_agree_whether_a_contract_is_met(desk, unsent):
    """An unsent maximum may lie far above the sent one, which only the values of the answer show."""
    query = desk.register_over("jfk", "lga",
        measures={"m": "max(dep_delay)", "n": "count()"}, budget={"error": {"m": 10, "n": 5}}
    )  # fmt: skip
    withheld = (Withheld("m", 0.0, 0.0, 1, largest_unsent=unsent), Withheld("n", 2.0, 0.0, 1))
    for hour in range(2):
        for edge, held in (("jfk", withheld), ("lga", ())):
            desk.report(query, edge, T0 + hour * HOUR, {"UA": 1}, withheld=held, delay_from=-50.0)
    stored, _ = desk.results.windows(query.ref, None, None, 10)
    (window,) = desk.get(f"{PATH}/windows", params={"limit": 1}).json()["answers"]
    codes = [v["code"] for v in window["contract"]["violations"]]
    assert bounds(window["data"], "m") == {"UA": (-50, unsent)}
    assert codes == ([] if unsent < -40 else ["error-budget"])
    assert [v.code for v in statement_of(stored[0], query.spec).contract.violations] == codes
    assert rolled(desk, "1h")[0] == of_one_window(window)
    (both,) = rolled(desk, "2h")
    assert [v["code"] for v in both["contract"]["violations"]] == [*codes, "budget-per-window"]
    assert bounds(both["data"], "m") == {"UA": (-50, unsent)}


def test_a_sum_beyond_float64_violates_the_contract_of_a_window_and_of_a_roll_up(desk):
    query = desk.register_over("jfk", measures={"d": "sum(dep_delay)"})
    for hour, delay in enumerate((1.6e308, 1.0)):
        columns = {"carrier": ["UA", "UA"], "distance": [1, 1], "dep_delay": [delay, delay]}
        desk.ship(query, "jfk", T0 + hour * HOUR, columns)
    first, second = desk.get(f"{PATH}/windows").json()["answers"]
    (both,) = rolled(desk, "2h")
    codes = [[v["code"] for v in answer["contract"]["violations"]] for answer in (first, second, both)]
    assert codes == [["rounding"], [], ["rounding"]]


def two_windows(desk: Any, *deviations: Deviation) -> None:
    """Stores two windows with two flights each. Both have these deviations."""
    query = desk.register_over("jfk", measures={"n": "count()", "d": "sum(dep_delay)"})
    for hour in range(2):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 2})
    of_query = stored_answers.c.query == query.key
    for each in desk.results.windows(query.ref, None, None, 10)[0]:
        stored = facts_to_json(replace(each.facts, deviations=deviations))
        with desk.results.engine.begin() as connection:
            of_window = of_query & (stored_answers.c.window_start_ms == each.window_start_ms)
            connection.execute(update(stored_answers).where(of_window).values(quality=stored))


def test_one_loss_that_concerns_two_windows_counts_once_in_a_roll_up_and_in_a_question(desk):
    two_windows(desk, Deviation(Cause.INPUT_LOST, "jfk", "log", "torn", lacks=Amount(0, 3)))
    merged = asked(desk, latest=2, merge=True, measure="n")
    assert bounds(merged["data"]) == bounds(rolled(desk, "2h")[0]["data"]) == {"UA": (4, 7)}


def test_a_roll_up_is_not_met_where_its_windows_are_not_because_late_records_have_no_bound(desk):
    two_windows(desk, Deviation(Cause.MAY_CHANGE, lacks=Amount(0, 2), confidence=0.99))
    answers = [*desk.get(f"{PATH}/windows").json()["answers"], *rolled(desk, "2h")]
    assert [[v["code"] for v in each["contract"]["violations"]] for each in answers] == [["may-change"]] * 3
    assert {bounds(each["data"], "d")["UA"] for each in answers} == {(None, None)}


def test_a_roll_up_whose_data_cannot_be_evaluated_says_so(desk, monkeypatch):
    query = desk.register_over("jfk", measures=COUNT)
    for hour in range(2):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 5})
    read = GroupedAggregate.from_bytes
    each = {r.synopsis for r in desk.results.windows(query.ref, None, None, 10)[0]}

    def faulty(data: bytes, **options: bool) -> GroupedAggregate:
        if data not in each:
            raise ZeroDivisionError("no evaluator foresees this")
        return read(data, **options)

    monkeypatch.setattr(GroupedAggregate, "from_bytes", staticmethod(faulty))
    (both,) = rolled(desk, "2h")
    assert both["data"] == [] and [v["code"] for v in both["contract"]["violations"]] == ["unreadable-data"]


MEASURES = {
    "n": "count()", "total": "sum(ms)", "mean": "mean(ms)", "spread": "var(ms)", "least": "min(ms)",
    "most": "max(ms)", "dis": "distinct(ip)", "top": "top_k(ip, 3)", "dd": "quantiles(ms)", "kl": "kll(ms)",
}  # fmt: skip
LATE = Deviation(Cause.AFTER_FINAL, reason="after-final", lacks=Amount(1, 1))


def cells_of(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the intervals of a row by name: `dd.0.5`, `top.7`."""
    found: dict[str, dict[str, Any]] = {}
    for name, cell in row.items():
        if "estimate" in cell:
            found[name] = cell
        for key, inner in cell.get("quantiles", {}).items():
            found[f"{name}.{key}"] = inner
        for inner in cell.get("top", ()):
            found[f"{name}.{inner['item']}"] = inner
    return found


@pytest.mark.parametrize(
    ("reason", "bounded"),
    [("after-final", {"n", "dis", "top", "dd", "kl"}), ("malformed", set()), ("assumed-copy", set())],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_window_with_one_late_record_of_a_thousand_keeps_true_bounds(
    reason: str, bounded: set[str], seed: int
) -> None:
    query, batch = spec(MEASURES), records(1001, seed)
    given = record(query, aggregate(query, batch.slice(0, 1000)).to_bytes())
    given = replace(given, facts=with_late(given.facts, {reason: LateRecords(1)}))
    whole = record(query, aggregate(query, batch).to_bytes())
    answer, truth = render(given, query), render(whole, query)
    stated = cells_of({k: v for k, v in answer["data"][0].items() if k != "group"})
    exact = cells_of({k: v for k, v in truth["data"][0].items() if k != "group"})
    ms, ip = batch["ms"].to_numpy(), batch["ip"].to_numpy()
    true = {name: exact[name]["estimate"] for name in ("n", "total", "mean", "spread", "least", "most")}
    true["dis"] = len(set(ip.tolist()))
    true |= {name: int((ip == int(name.partition(".")[2])).sum()) for name in stated if name.startswith("top.")}
    for name in (name for name in stated if name.startswith(("dd.", "kl."))):
        true[name] = float(sorted(ms)[int(float(name.partition(".")[2]) * (len(ms) - 1))])
    for name, cell in stated.items():
        assert cell["lower"] is None or cell["lower"] <= true[name], name
        assert cell["upper"] is None or true[name] <= cell["upper"], name
    assert {name.partition(".")[0] for name, c in stated.items() if None not in (c["lower"], c["upper"])} == bounded
    for name, cell in answer["total"].items():
        assert cell["lower"] is None or cell["lower"] <= true[name], name
        assert cell["upper"] is None or true[name] <= cell["upper"], name
    assert (answer["total"]["n"]["lower"], answer["total"]["n"]["upper"]) == (1000, 1001 if bounded else None)
    assert len(answer["contract"]["violations"]) == 1


def test_an_unknown_number_of_absent_records_leaves_no_bound_that_they_may_exceed() -> None:
    query, batch = spec(MEASURES), records(1000)
    given = record(query, aggregate(query, batch).to_bytes())
    unknown = Deviation(Cause.MISSING, "jfk", lacks=UNKNOWN)
    answer = render(replace(given, facts=replace(given.facts, deviations=(unknown, LATE))), query)
    stated = cells_of({k: v for k, v in answer["data"][0].items() if k != "group"})
    known = {name: (c["lower"], c["upper"]) for name, c in stated.items() if (c["lower"], c["upper"]) != (None, None)}
    assert set(known) == {"n", "least", "most"}
    assert known["n"] == (1000, None) and known["least"][0] is None and known["most"][1] is None
