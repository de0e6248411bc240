"""Declared delays: early answers are met sooner while the declaration is true, and withdrawn when it is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from center.ledger import Emission, Ledger, QueryDeleted, QueryRegistered
from center.ledger.early_answers import EarlyAnswerBook
from edgewater.answers import Phase
from edgewater.model.registered_query import RegisteredQuery
from edgewater.synopses import FloatArray
from edgewater.wire import QueryRef
from tests.center.accuracy_world import BEGIN_MS, Site, World, first_answers, spec, without_times
from tests.center.border_world import Border
from tests.center.snapshots import snapshot

DECLARED_MS = 500
LATE_FROM_MS, LATE_TO_MS, LATE_MS = 1_200, 1_260, 1_400
"""Event times after `BEGIN_MS` of the records that come too late, and their delay."""


def punctual(rng: np.random.Generator, born: FloatArray) -> FloatArray:
    return np.minimum(rng.exponential(80.0, len(born)), 400.0)


def partly_late(rng: np.random.Generator, born: FloatArray) -> FloatArray:
    return np.where((born >= LATE_FROM_MS) & (born < LATE_TO_MS), float(LATE_MS), punctual(rng, born))


def world(*, late: bool = False, declared: bool = True, groups: bool = False) -> World:
    accuracy = {"error": "5%", "confidence": "95%", "measure": "total", "substream": "500ms"}
    accuracy |= {"delays": f"{DECLARED_MS}ms"} if declared else {}
    accuracy |= {"scope": "each"} if groups else {}
    parts = {"group_by": ["k"]} if groups else {}
    sites = [Site.make(f"e{i}", i, 5, partly_late if late and i == 1 else punctual, shares=(1, 1)) for i in range(2)]
    return World(spec(accuracy=accuracy, **parts), sites)


@pytest.fixture(scope="module")
def watched() -> World:
    """Delays are learnt; tests do not advance it."""
    result = world(declared=False)
    result.run(3.4)
    return result


def exceeding(answer: Emission) -> Mapping[str, int] | None:
    assert answer.facts.accuracy is not None
    return answer.facts.accuracy.exceeding


def is_met(answer: Emission) -> bool:
    return not answer.codes()


@pytest.mark.slow
def test_first_windows_meet_their_accuracy_sooner_where_delays_are_declared(watched: World) -> None:
    declared = world()
    early = first_answers(declared.run(3.4))[:3]
    assert [e.window_start_ms - BEGIN_MS for e in early] == [0, 1_000, 2_000]
    for answer in early:
        assert answer.phase is Phase.EARLY and is_met(answer)
        prediction, truth = answer.prediction, declared.truth(answer.window_start_ms)
        assert prediction is not None and prediction.lower <= truth <= prediction.upper
        assert abs(prediction.estimate / truth - 1) <= 0.05
        assert exceeding(answer) == {}
    longest_ms = watched.estimator().schedule.grid.lags * watched.estimator().schedule.grid.slot_ms
    undeclared = [e for e in watched.answers if e.phase is Phase.EARLY and is_met(e)]
    assert all(e.answered_at_ms - BEGIN_MS > longest_ms for e in undeclared)
    assert max(e.answered_at_ms for e in early[:2]) - BEGIN_MS < longest_ms


@pytest.mark.slow
def test_first_windows_meet_their_accuracy_when_edges_are_older_than_the_longest_lag(watched: World) -> None:
    """The longest lag is 2.56 s. Until 3.56 s and more, all answers used to be without an interval."""
    early = [e for e in watched.answers if e.phase is Phase.EARLY]
    assert {e.window_start_ms - BEGIN_MS for e in early if is_met(e)} >= {1_000}
    for answer in early:
        prediction, truth = answer.prediction, watched.truth(answer.window_start_ms)
        assert prediction is not None
        assert prediction.bounded, "an answer waits while its interval may still be earned"
        assert prediction.lower <= truth <= prediction.upper


@pytest.mark.parametrize("groups", [False, True], ids=["one", "groups"])
def test_statements_are_withdrawn_when_records_come_later_than_declared(groups: bool) -> None:
    run = world(late=True, groups=groups)
    relied = list(run.run(2.5))  # the late records, born from 1.2 s on, come from 2.6 s on
    assert {e.window_start_ms - BEGIN_MS for e in relied if is_met(e)} == {0, 1_000}
    after = [e for e in run.run(0.7)[len(relied) :] if exceeding(e)]
    late = int(((run.sites[1].born >= BEGIN_MS + LATE_FROM_MS) & (run.sites[1].born < BEGIN_MS + LATE_TO_MS)).sum())
    assert late > 10 and run.estimator().observed.exceeding == {"e1": late}
    revised = {e.window_start_ms - BEGIN_MS: e for e in after if e.revision > 1}
    assert {0, 1_000} <= revised.keys(), "answers that relied on the declaration are given anew"
    for answer in after:
        assert answer.phase is not Phase.EARLY or not is_met(answer), "longer delays than the edges' age are unknown"
        prediction, truth = answer.prediction, run.truth(answer.window_start_ms)
        if not groups and prediction is not None and prediction.bounded:
            assert prediction.lower <= truth <= prediction.upper
    assert exceeding(after[-1]) == {"e1": late}


def test_a_backlog_that_waited_for_its_edge_does_not_withdraw_the_declaration_and_late_records_afterwards_do() -> None:
    run = world()
    run.sites[0].down = BEGIN_MS + 700, BEGIN_MS + 2_500
    run.run(3.2)
    assert run.estimator().observed.exceeding == {}, "its records have waited for the edge, up to 1.8 s"
    behind = int(np.searchsorted(run.sites[0].arrival, run.now_ms))
    run.sites[0].arrival[behind:] += 2 * DECLARED_MS  # from now on, its source is late
    run.run(1.4)
    assert run.estimator().observed.exceeding.keys() == {"e0"}


@pytest.mark.parametrize("restart_ms", [2_000, 2_700], ids=["while it is true", "afterwards"])
@pytest.mark.slow
def test_a_restart_of_the_center_keeps_the_declaration_and_what_exceeded_it(restart_ms: int) -> None:
    whole, cut = world(late=True), world(late=True)
    cut.run(restart_ms / 1_000)
    cut.restart()
    cut.run(3.2 - restart_ms / 1_000)
    assert list(map(without_times, cut.answers)) == list(map(without_times, whole.run(3.2)))
    assert cut.estimator().observed.exceeding == whole.estimator().observed.exceeding != {}
    triggers = [group.trigger for group in cut.estimator().observed.groups]
    assert {t.triangle.horizon for t in triggers} == {t.grid.lags for t in triggers}


@pytest.fixture
def center(tmp_path: Path) -> Border:
    return Border(tmp_path)


@pytest.mark.slow
def test_exceeded_delays_raise_an_alarm_that_names_the_edge(center: Border) -> None:
    edge = center.edge("a")
    center.register(accuracy={"error": "5%", "measure": "n", "delays": "2s"}, window={"tumbling": "12s"}, lateness="1m")

    def alarms() -> list[str]:
        return [a["edge"] for a in center.get("/v1/alarms")["alarms"] if a["kind"] == "delays-exceeded"]

    for late_ms in (100, 1_900, 100, 1_900, 9_000):
        assert alarms() == []
        edge.accept(center.now_ms - late_ms)
        center.now_ms += 3_000
        edge.ship()
    assert alarms() == ["a"]
    center.open_job()
    assert center.ledger.exceeding_delays().popitem()[1] == {"a": 1}


@pytest.mark.parametrize(
    ("parts", "inherits"),
    [
        ({}, True),
        ({"measures": {"total": "mean(x)"}}, True),
        ({"measures": {"total": "count()"}}, False),
        ({"measures": {"total": "sum(2 * x)"}}, False),
        ({"where": "ok"}, False),
        ({"window": {"tumbling": "2s"}}, False),
        ({"lateness": "2s"}, False),
    ],
    ids=["equal", "mean", "count", "another value", "condition", "window", "lateness"],
)
def test_a_query_inherits_the_delays_of_one_that_counts_the_same_records(
    watched: World, request: pytest.FixtureRequest, parts: dict[str, object], inherits: bool
) -> None:
    ref = QueryRef(request.node.callspec.id, 1)
    watched.ledger.handle(QueryRegistered(RegisteredQuery(ref, spec(**parts), watched.now_ms, None)))  # type: ignore[arg-type]
    loaded = Ledger()
    loaded.restore(ref, snapshot(watched.ledger, ref))
    watched.ledger.handle(QueryDeleted(ref))
    ledger = loaded.book(ref)
    assert isinstance(ledger, EarlyAnswerBook)
    inherited = {edge: slots for edge, (slots, *_) in ledger.estimator.observed.inherited.items()}
    known = {edge: d.slots for edge, d in watched.estimator().observed.delays().items()}
    assert inherited == (known if inherits else {})
    assert all(slots > 50 for slots in known.values())
    assert known.keys() == {"e0", "e1"}


def test_clumps_of_late_records_which_are_sums_over_all_edges_are_not_inherited(watched: World) -> None:
    """A hostile edge would change the intervals of queries that do not expect it."""
    ref, loaded = next(iter(watched.ledger.queries())), Ledger()
    loaded.restore(ref, snapshot(watched.ledger, ref))
    book = loaded.book(ref)
    assert isinstance(book, EarlyAnswerBook)
    observed = book.estimator.observed
    model = next(iter(observed.groups)).trigger.model
    late, uneven = float(model.late[0]), float(model.uneven[0])
    assert late > 10 and uneven > 0
    slots, sums = observed.delays()["e0"].to_list()
    observed.inherit({"e0": [slots, sums, 1e9, 0.0]})  # as 0.3.0 has logged it
    observed._observe_joining(["e0"])
    assert (float(model.late[0]), float(model.uneven[0])) == (late, uneven)


# Delays that change


def grown(rng: np.random.Generator, born: FloatArray) -> FloatArray:
    return np.minimum(rng.exponential(1.0, len(born)) * np.where(born < 10_000, 80.0, 450.0), 1_900.0)


@pytest.mark.nightly
def test_no_answer_meets_its_error_by_delays_that_are_past() -> None:
    result = World(spec(), [Site.make(f"e{i}", i, 13, grown) for i in range(3)])
    result.run(13.5)
    changed_ms = BEGIN_MS + 10_000
    answers = [a for a in first_answers(result.answers) if changed_ms <= a.window_start_ms < changed_ms + 2_000]
    assert answers
    for answer in filter(is_met, answers):
        prediction, truth = answer.prediction, result.truth(answer.window_start_ms)
        assert prediction is None or abs(prediction.estimate - truth) <= 0.05 * truth
