"""Windows that all edges have closed without a record have no answer, and readers know that they are empty."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from center.ledger import FrameSummary
from center.ledger.time_windows import MAX_LACKING
from edgewater.base.streams import EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.wire import InputLoss, SliceClose
from tests.center.api.test_api_rollup import HOUR, T0, page
from tests.center.api.test_api_versions import BORDER, put


def hours(desk: Any, *numbers: int, edge: str = "jfk", query: Any = None) -> Any:
    query = query or desk.register(measures={"n": "count()", "d": "sum(distance)"})
    for number in numbers:
        desk.report(query, edge, T0 + number * HOUR, {"UA": 2})
    return query


def says(desk: Any, query: Any, hour: int, position: int, edge: str = "jfk", **changes: Any) -> None:
    """The edge has closed all slices before this hour."""
    through = T0 + hour * HOUR
    fact = FrameSummary(query.ref, position, EdgeId(edge), through, (), (), 500, desk.now, f"{edge}-1")
    desk.results.apply(desk.ledger, [], [replace(fact, **changes)], {query.key: position}, desk.now)


def empty(desk: Any, query: Any, hours: range) -> list[int]:
    windows = [(T0 + n * HOUR, T0 + (n + 1) * HOUR) for n in hours]
    return [(start - T0) // HOUR for start, _ in sorted(desk.results.empty_windows(query.ref, windows))]


def test_a_window_that_all_edges_closed_without_a_record_takes_no_bounds_from_a_roll_up(desk: Any) -> None:
    desk.connect("jfk")
    query = hours(desk, 0, 1, 3)  # the close of hour 3 closes hour 2, too
    (answer,) = page(desk, every="4h")["answers"]
    assert answer["quality"]["completeness"] == {
        "ratio": 1.0, "expected": 1, "reported": 1, "missing": [], "windows": 4,
    }  # fmt: skip
    assert answer["contract"]["met"]
    (row,) = answer["data"]
    assert (row["n"]["lower"], row["n"]["upper"], row["d"]["lower"], row["d"]["upper"]) == (6, 6, 600, 600)
    assert desk.results.empty_windows(query.ref, [(T0 + 2 * HOUR, T0 + 3 * HOUR)]) == {(T0 + 2 * HOUR, T0 + 3 * HOUR)}


def test_a_question_about_an_empty_window_says_that_it_is_empty(desk: Any) -> None:
    desk.connect("jfk", "lga")
    query = hours(desk, 0, 1, 3)
    kind = {"content-type": "application/x-ndjson"}

    def said(**selector: Any) -> dict[str, Any]:
        line = json.dumps({**selector, "measure": "n"})
        reply = desk.ask("POST", "/v1/queries/flights/evaluate", content=line, headers=kind)
        found: dict[str, Any] = json.loads(reply.text)["error"]
        return found

    at = {"window": rfc3339(T0 + 2 * HOUR)}, {"at": T0 + 2 * HOUR + 5}
    assert all(said(**each)["status"] == 404 and "without a record" not in said(**each)["detail"] for each in at)
    for hour in (0, 1, 3):
        desk.report(query, "lga", T0 + hour * HOUR, {"UA": 1})
    assert all(said(**each)["status"] == 404 and "without a record" in said(**each)["detail"] for each in at)
    assert "without a record" not in said(window=rfc3339(T0 + 9 * HOUR))["detail"]


def test_a_window_that_is_not_closed_or_lies_before_the_first_answer_is_not_known_to_be_empty(desk: Any) -> None:
    desk.connect("jfk", "lga")
    query = hours(desk, 1, 3)
    desk.report(query, "lga", T0 + HOUR, {"UA": 1})
    windows = [(T0 + n * HOUR, T0 + (n + 1) * HOUR) for n in (0, 2, 5)]
    assert desk.results.empty_windows(query.ref, windows) == set(), "lga has closed hour 1 only"
    desk.report(query, "lga", T0 + 3 * HOUR, {"UA": 1})
    assert desk.results.empty_windows(query.ref, windows) == {windows[1]}
    (answer,) = page(desk, every="8h")["answers"]
    assert answer["quality"]["completeness"]["unanswered"] == 5 and not answer["contract"]["met"]


def test_of_a_stream_that_has_ended_only_windows_between_answers_are_known_to_be_empty(desk: Any) -> None:
    desk.connect("jfk")
    query = hours(desk, 0, 2)
    desk.end(query, "jfk")
    windows = [(T0 + n * HOUR, T0 + (n + 1) * HOUR) for n in (1, 3, 400)]
    assert desk.results.empty_windows(query.ref, windows) == {windows[0]}, "an edge may still join"


def test_a_window_with_an_answer_is_not_empty_whatever_its_phase(desk: Any) -> None:
    desk.connect("jfk")
    query = hours(desk, 0, 1, 2)
    window = (T0 + HOUR, T0 + 2 * HOUR)
    assert desk.results.empty_windows(query.ref, [window]) == set()


def test_windows_of_the_next_version_are_not_empty_windows_of_this_one(desk: Any) -> None:
    desk.now = T0
    desk.register_over("jfk", lateness="0s")
    spec = {**desk.catalog.queries.versions("flights")[0].spec.to_mapping(), "measures": {"n": "count()"}}
    assert put(desk, spec, at=rfc3339(BORDER)).status_code == 201
    first, second = desk.catalog.queries.versions("flights")
    desk.ledger_knows(first)
    desk.ledger_knows(second)
    hours(desk, 0, 1, query=first)
    hours(desk, 2, 3, query=second)
    says(desk, first, 5, position=3)
    assert empty(desk, first, range(8)) == []
    (answer,) = page(desk, every="4h", start=rfc3339(T0), end=rfc3339(BORDER))["answers"]
    assert answer["quality"]["completeness"]["unanswered"] == 2 and not answer["contract"]["met"]


def test_a_window_whose_late_records_wait_for_an_answer_is_not_empty(desk: Any) -> None:
    desk.connect("jfk")
    query = hours(desk, 0, query=desk.register(lateness="2000h"))
    says(desk, query, 1700, position=2)
    assert empty(desk, query, range(1700)) == list(range(1, 1700))
    late = tuple(SliceClose(T0 + n * HOUR, 3, 0) for n in range(100, 1700))
    says(desk, query, 1700, position=3, closes=late, touched=tuple(each.slice_start_ms for each in late))
    assert len(desk.results.windows(query.ref, None, None, 1700)[0]) < 1600, "one event gives not all answers"
    assert empty(desk, query, range(1700)) == list(range(1, 100))


def test_windows_of_a_loss_are_not_empty_however_many_they_are_and_whenever_it_is_stated(desk: Any) -> None:
    desk.connect("jfk")
    query = hours(desk, 0, query=desk.register(lateness="0s"))
    last = 2 * MAX_LACKING
    loss = InputLoss("s", "file-truncated", T0 + 2 * HOUR, T0 + last * HOUR, 5)
    for position in range(2, 30):  # one event gives not all answers
        says(desk, query, last + 3, position, losses=(loss,) if position == 2 else ())
    assert empty(desk, query, range(last + 3)) == [last, last + 1, last + 2]
    says(desk, query, last + 3, 30, losses=(replace(loss, from_ms=None, to_ms=T0 + (last + 1) * HOUR),))
    assert empty(desk, query, range(last + 3)) == [last + 1, last + 2], "it is stated when the windows are final"


def test_a_loss_is_known_if_it_is_stated_while_an_edge_has_not_closed_the_windows(desk: Any) -> None:
    desk.connect("jfk", "lga")
    query = hours(desk, 0, query=desk.register(lateness="0s"))
    desk.report(query, "lga", T0, {"UA": 1})
    for edge, position in (("jfk", 3), ("lga", 4)):
        says(desk, query, 6, position, edge)
    assert empty(desk, query, range(6)) == [1, 2, 3, 4, 5]
    desk.connect("ewr")
    desk.ledger_knows(query)
    says(desk, query, 6, 5, losses=(InputLoss("s", "file-truncated", T0, T0 + 4 * HOUR, 5),))
    says(desk, query, 6, 6, "ewr")
    assert empty(desk, query, range(6)) == [4, 5]


def test_the_prometheus_face_repeats_no_value_over_an_empty_window(desk: Any) -> None:
    desk.connect("jfk")
    hours(desk, 0, 2)
    shown = []
    for minutes in (60, 119, 121, 179, 181):
        params = {"query": "flights:n", "time": str(T0 // 1000 + 60 * minutes)}
        shown.append(len(desk.get("/prometheus/api/v1/query", params=params).json()["data"]["result"]))
    assert shown == [1, 1, 0, 0, 1], "hour 1 is empty, and its end is the end of the value of hour 0"
    step = {
        "query": "flights:n",
        "start": str(T0 // 1000 + 3600),
        "end": str(T0 // 1000 + 3 * 3600 + 60),
        "step": "1800",
    }
    (series,) = desk.get("/prometheus/api/v1/query_range", params=step).json()["data"]["result"]
    assert [(int(t) - T0 // 1000) // 1800 for t, _ in series["values"]] == [2, 3, 6]
