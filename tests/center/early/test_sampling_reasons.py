from __future__ import annotations

import json

from center.early import SamplingReasonHistory, describe_reasons
from center.early.sampling import MAX_SPANS
from edgewater.wire import SamplingReason

NONE, MEASURE, PROCESSOR, LINK = SamplingReason


def reasons(*reports: tuple[int, SamplingReason]) -> SamplingReasonHistory:
    result = SamplingReasonHistory()
    for through, reason in reports:
        result.add("e", through, reason)
    return result


def of(said: SamplingReasonHistory, began: int, ended: int) -> set[SamplingReason]:
    return set(said.in_window(["e"], began, ended)["e"])


def test_a_window_has_the_reasons_of_the_reports_that_overlap_it() -> None:
    said = reasons((10, NONE), (20, LINK), (30, LINK), (40, PROCESSOR), (50, NONE), (60, MEASURE))
    assert of(said, 10, 20) == {LINK}
    assert of(said, 20, 35) == {LINK, PROCESSOR}
    assert of(said, 32, 38) == {PROCESSOR}
    assert of(said, 45, 60) == {MEASURE}


def test_records_that_came_late_to_a_window_have_a_later_reason() -> None:
    assert of(reasons((10, NONE), (20, NONE), (30, LINK)), 5, 15) == {LINK}


def test_an_edge_that_does_not_say_has_no_reason() -> None:
    said = reasons((10, NONE), (20, NONE))
    assert of(said, 0, 20) == set()
    assert said.in_window(["e", "unknown"], 0, 20) == {"e": frozenset(), "unknown": frozenset()}


def test_what_is_forgotten_or_of_edges_that_are_gone_takes_no_room() -> None:
    said = reasons((10, NONE), (20, LINK), (30, NONE), (40, PROCESSOR))
    said.forget_before(25)
    assert of(said, 0, 30) == {PROCESSOR}
    said.keep([])
    assert said.to_state() == {"spans": {}, "reported_through": {}}
    many = reasons(*((n, (LINK, PROCESSOR)[n % 2]) for n in range(1_000)))
    assert len(many.to_state()["spans"]["e"]) == MAX_SPANS
    same = reasons(*((n, LINK) for n in range(1_000)))
    assert same.to_state()["spans"]["e"] == [[0, 999, LINK]]


def test_the_state_survives_json() -> None:
    said, again = reasons((10, NONE), (20, LINK)), SamplingReasonHistory()
    again.restore(json.loads(json.dumps(said.to_state())))
    for each in (said, again):
        each.add("e", 30, PROCESSOR)
    assert again.to_state() == said.to_state()


def test_an_answer_says_why_and_of_which_edges() -> None:
    assert (
        describe_reasons({"jfk": frozenset([MEASURE]), "lga": frozenset([MEASURE])})
        == "sampled: the measure is expensive"
    )
    assert describe_reasons({"jfk": frozenset([PROCESSOR])}) == "sampled: the processor of jfk cannot keep up"
    assert describe_reasons({"lga": frozenset([LINK]), "jfk": frozenset([LINK, PROCESSOR])}) == (
        "sampled: the processor of jfk cannot keep up; the links of jfk, lga cannot keep up"
    )
    crowd = {f"e{i}": frozenset([PROCESSOR]) for i in range(5)}
    assert describe_reasons(crowd) == "sampled: the processors of e0, e1, e2 and 2 more cannot keep up"


def test_an_edge_without_a_reported_reason_gets_a_general_phrase() -> None:
    assert describe_reasons({}) == describe_reasons({"e": frozenset()}) == "sampled: an edge or its link cannot keep up"
    mixed = {"jfk": frozenset([LINK]), "lga": frozenset[SamplingReason]()}
    assert describe_reasons(mixed) == "sampled: the link of jfk cannot keep up; an edge or its link cannot keep up"
