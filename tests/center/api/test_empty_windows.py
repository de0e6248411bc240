"""Windows that all edges have closed without a record have no answer, and readers know that they are empty."""

from __future__ import annotations

from typing import Any

from tests.center.api.test_api_rollup import HOUR, T0, page


def hours(desk: Any, *numbers: int, edge: str = "jfk", query: Any = None) -> Any:
    query = query or desk.register(measures={"n": "count()", "d": "sum(distance)"})
    for number in numbers:
        desk.report(query, edge, T0 + number * HOUR, {"UA": 2})
    return query


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
