"""An accuracy with groups, on production edges and ledger under a virtual clock. Seeds are fixed.

Coverage: of n intervals that each hold with 95 %, fewer than `least_covered(n)` hold in one run of 200. Intervals of
one window share nothing but the clock: each group has records, delays and values of its own.
"""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from center.estimation import groups
from center.estimation.estimator import AccuracyBook
from center.estimation.prediction import Outlook, Prediction
from center.ledger import EdgesChanged, Emission, Ledger, Phase, TimeAdvanced, pack_state
from center.ledger import early_answers as accuracy_ledger
from edge.core.core import EdgeCore
from edge.core.events import SamplingSet
from edge.core.streams import StreamSpec
from edgewater.accuracy import MAX_GROUPS, group_values
from edgewater.query import QuerySpec
from edgewater.streams import LIVE
from tests.center.accuracy_world import (
    BEGIN_MS,
    COLUMNS,
    DISORDER_MS,
    REF,
    WINDOW_MS,
    Site,
    World,
    exponential,
    first_answers,
    record_of,
    spec,
    wait_ms,
)
from tests.center.estimation.test_early_promise import least_covered

pytestmark = pytest.mark.slow


def grouped(measure: str = "sum(x)", scope: str = "each", error: str = "5%", **parts: Any) -> QuerySpec:
    accuracy = {"error": error, "measure": "total", "substream": "500ms", "scope": scope}
    return spec({"total": measure}, group_by=["k"], accuracy=accuracy, **parts)


def sites(count: int = 2, seconds: float = 16, **more: Any) -> list[Site]:
    given = {"rate": 600.0, "shares": (1.0, 1.0, 1.0), "slower": (0.5, 1.0, 2.0), **more}
    return [Site.make(f"e{i}", i, seconds, exponential(60.0), scale=1 + 0.5 * i, **given) for i in range(count)]


def prediction(emission: Emission) -> Prediction:
    accuracy = emission.quality.accuracy
    assert accuracy is not None and accuracy.prediction is not None
    return accuracy.prediction


def number(outlook: Outlook) -> int:
    (name,) = group_values(outlook.key)
    assert isinstance(name, str)
    return int(name[1:])


def of_group(emission: Emission, group: int) -> Outlook:
    return next(o for o in prediction(emission).outlooks if number(o) == group)


def early(world: World) -> list[Emission]:
    return [a for a in first_answers(world.given) if a.phase is Phase.EARLY]


@pytest.mark.parametrize(
    ("measure", "scope", "error"),
    [("sum(x)", "each", "8%"), ("count()", "all", "5%"), ("mean(x)", "each", "5%")],
    ids=["sum-each", "count-all", "mean-each"],
)
def test_intervals_of_groups_with_delays_of_their_own_hold_within_the_binomial_band(
    measure: str, scope: str, error: str
) -> None:
    windows, kind = 30, measure.partition("(")[0]
    world = World(grouped(measure, scope, error), sites(2, windows + 4, rate=700.0))
    world.run(windows + 3)
    answers = early(world)
    assert len(answers) >= windows - 2
    held, within = [], []
    for answer in answers:
        promised = [o for o in prediction(answer).outlooks if o.promised]
        assert prediction(answer).met == (bool(promised) and all(o.met for o in promised))
        truths = [world.truth(answer.window_start_ms, kind, number(o)) for o in promised]
        held.append([o.lower - 1e-6 <= t <= o.upper + 1e-6 for o, t in zip(promised, truths, strict=True)])
        within.append(
            [abs(o.estimate - t) <= float(error[:-1]) / 100 * t for o, t in zip(promised, truths, strict=True)]
        )
    for outcomes in (held, within):
        each = [all(o) for o in outcomes] if scope == "all" else [h for o in outcomes for h in o]
        assert sum(each) >= least_covered(len(each))
    assert sum(len(h) for h in held) >= 3 * (windows - 4), "only the first windows have groups without an interval"
    waits = np.array([wait_ms(a) for a in answers])
    assert waits.mean() < 0.25 * DISORDER_MS


def test_a_group_with_few_records_waits_until_it_is_complete_and_holds_up_no_other() -> None:
    world = World(grouped(), sites(shares=(1.0, 1.0, 0.01), slower=()))
    world.run(10)
    answers = early(world)[2:]
    assert len(answers) >= 6
    seen = 0
    for answer in answers:
        stated = {number(o): o for o in prediction(answer).outlooks}
        assert stated[0].promised and stated[1].promised and prediction(answer).met
        if 2 in stated:
            seen += 1
            rare = stated[2]
            assert not rare.promised and not rare.met and np.isnan([rare.lower, rare.upper]).all()
            quality = answer.quality.to_mapping()
            assert quality["accuracy"]["groups"] == {"promised": 2, "met": 2, "waiting": 1}
            assert quality["prediction"]["total"]["groups"]['["g2"]'] == [None, None, None]
            assert json.loads(json.dumps(quality, allow_nan=False)) == quality
    assert seen >= 3
    assert all(wait_ms(a) < DISORDER_MS / 2 for a in answers)


def test_a_group_that_is_new_has_no_interval_in_the_window_in_which_it_comes_up() -> None:
    world = World(grouped(error="10%"), sites(slower=()))
    begins = BEGIN_MS + 6_300
    for site in world.sites:
        site.group[(site.group == 2) & (site.born < begins)] = 1
    world.run(14)
    by_start = {a.window_start_ms - BEGIN_MS: a for a in early(world)}
    assert not of_group(by_start[6_000], 2).promised
    assert of_group(by_start[6_000], 1).promised, "the others do not wait for it"
    later = [of_group(by_start[start], 2) for start in range(9_000, 12_000, 1_000)]
    assert all(o.promised and o.met for o in later)


def test_a_group_that_ends_holds_up_no_answer_and_is_let_go() -> None:
    world = World(grouped(error="10%"), sites(seconds=24, slower=()))
    for site in world.sites:
        site.group[(site.group == 2) & (site.born >= BEGIN_MS + 5_000)] = 1
    world.run(22)
    assert world.book().groups == 2
    after = [a for a in early(world) if a.window_start_ms >= BEGIN_MS + 6_000]
    assert len(after) >= 14
    assert all(wait_ms(a) < DISORDER_MS / 2 and prediction(a).met for a in after)


def test_a_silent_edge_widens_the_intervals_of_the_groups_that_it_has() -> None:
    world = World(grouped(error="20%"), sites(3, 18, slower=()))
    for site in world.sites[:2]:
        site.group[:] = np.minimum(site.group, 1)  # only the last edge has group 2
    world.sites[2].group[:] = np.maximum(world.sites[2].group, 1)  # and it has nothing of group 0
    silent_from = BEGIN_MS + 10_000
    world.sites[2].cut = (silent_from, silent_from + 5_000)
    world.run(18)
    during = [a for a in early(world) if silent_from + 3_000 <= a.window_end_ms < silent_from + 5_000]
    assert during
    for answer in during:
        assert prediction(answer).silent == ("e2",)
        assert wait_ms(answer) <= 1_700
        without, some, only = (of_group(answer, g) for g in (0, 1, 2))
        assert without.missing < 0.01 * without.estimate
        assert np.isfinite([only.lower, only.upper]).all()
        assert some.missing > 0
        assert only.promised and only.arrived == 0, "all that is known of it is what it usually is"
        assert only.missing / only.estimate > some.missing / some.estimate > without.missing / without.estimate
        for outlook in (without, some, only):
            truth = world.truth(answer.window_start_ms, "sum", number(outlook))
            assert abs(outlook.estimate - truth) / truth < 0.3
            assert outlook.lower < truth < outlook.upper


def test_with_too_many_groups_windows_are_answered_when_complete_until_there_are_fewer() -> None:
    many = MAX_GROUPS + 40
    world = World(grouped("count()"), sites(seconds=22, rate=2500.0, shares=(1.0,) * many, slower=()))
    ends = BEGIN_MS + 8_000
    for site in world.sites:
        site.group[site.born >= ends] %= 2
    world.run(21)
    assert not [a for a in early(world) if a.window_start_ms < ends - WINDOW_MS]
    crowded = [a for a in first_answers(world.given) if a.window_end_ms <= ends]
    assert len(crowded) >= 6
    for answer in crowded:
        assert answer.phase is Phase.COMPLETE and not answer.quality.violations
        said = answer.quality.to_mapping()["accuracy"]["groups"]
        assert said["limit"] == MAX_GROUPS and f"more than {MAX_GROUPS} groups" in said["reason"]
    again = [a for a in early(world) if a.window_start_ms >= ends]
    assert len(again) >= 3 and all(prediction(a).met for a in again[1:])
    assert world.book().groups == 2


def test_groups_that_are_too_many_only_at_all_edges_together_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_GROUPS", 4)
    world = World(grouped("count()"), sites(slower=()))
    world.sites[1].group += 3  # three groups at each edge
    world.run(6)
    assert not early(world) and world.book().is_crowded


@pytest.mark.parametrize("scope", ["each", "all"])
def test_how_many_groups_are_reckoned_with_at_once_changes_no_answer(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[Emission]] = []
    for block in (groups.BLOCK, 2, 1):
        monkeypatch.setattr(groups, "BLOCK", block)
        world = World(grouped(scope=scope), sites(seconds=9, shares=(1, 1, 0.05, 1, 0.5), slower=(0.5, 1, 2, 1, 3)))
        for site in world.sites:  # a group that comes up late
            site.group[(site.group == 3) & (site.born < BEGIN_MS + 3_300)] = 0
        world.sites[1].cut = (BEGIN_MS + 4_000, BEGIN_MS + 6_500)
        given.append(world.run(8))
    for others in given[1:]:
        assert [(e.window_start_ms, e.revision, e.answered_at_ms, e.phase) for e in others] == [
            (e.window_start_ms, e.revision, e.answered_at_ms, e.phase) for e in given[0]
        ]
        for mine, theirs in zip(given[0], others, strict=True):
            if mine.phase is not Phase.EARLY:
                continue
            for one, other in zip(prediction(mine).outlooks, prediction(theirs).outlooks, strict=True):
                numbers, expected = (np.array(astuple(o)[3:12]) for o in (other, one))
                np.testing.assert_allclose(numbers, expected, rtol=1e-9, atol=1e-9)
                assert (one.key, one.promised, one.met, one.reason) == (
                    other.key, other.promised, other.met, other.reason,
                )  # fmt: skip
    assert sum(e.phase is Phase.EARLY for e in given[0]) > 10


def test_a_budget_of_staleness_caps_the_wait_and_says_which_groups_are_not_within_the_error() -> None:
    world = World(grouped(error="1%", budget={"staleness": "300ms"}, lateness="5s"), sites(slower=()))
    world.run(8)
    answers = early(world)[2:]
    assert answers
    for answer in answers:
        assert wait_ms(answer) <= 300 and not prediction(answer).met
        (violation,) = answer.quality.violations
        assert violation.code == "accuracy" and "of 3 groups are not within the error" in violation.message
        assert answer.quality.requested["scope"] == "each"


def test_an_overloaded_edge_samples_all_groups_and_the_answers_say_so() -> None:
    world = World(grouped(error="20%"), sites(seconds=12, slower=()))
    world.run(4)
    for site in world.sites:
        site.core.handle(SamplingSet(REF, 0.5, 0.0))
    world.run(7)
    sampled = [a for a in world.given if a.window_start_ms >= BEGIN_MS + 5_000]
    assert {a.phase for a in sampled} == {Phase.EARLY, Phase.COMPLETE, Phase.FINAL}
    for answer in sampled:
        for outlook in prediction(answer).outlooks:
            assert outlook.promised and outlook.sampling > 0 and 0.3 < outlook.sampled / outlook.arrived < 0.7
            truth = world.truth(answer.window_start_ms, "sum", number(outlook))
            assert abs(outlook.estimate - truth) / truth < 0.3


def test_no_sample_is_planned_while_there_is_a_group_without_a_promise() -> None:
    known, rare = (World(grouped(error="20%"), sites(slower=(), shares=s)) for s in ((1, 1, 1), (1, 1, 0.01)))
    for world in (known, rare):
        world.run(8)
    assert all(rate < 1 for rate in known.book().rates().values())
    assert set(rare.book().rates().values()) == {1.0}


@pytest.mark.parametrize("scope", ["each", "all"])
def test_a_restart_in_the_middle_gives_the_answers_of_an_uninterrupted_run(scope: str) -> None:
    whole, cut = (World(grouped(scope=scope), sites(seconds=10, shares=(1, 1, 0.02))) for _ in range(2))
    for world in (whole, cut):
        world.sites[1].cut = (BEGIN_MS + 4_000, BEGIN_MS + 6_500)
    whole.run(9)
    for _ in range(6):
        cut.run(1.5)
        cut.restart()
    assert cut.given == whole.given
    assert len(whole.given) > 15


@pytest.mark.parametrize("compact_bytes", [1 << 18, 30_000], ids=["notes", "snapshot"])
def test_what_each_transaction_writes_restores_the_book(compact_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_ledger, "COMPACT_BYTES", compact_bytes)
    whole, other = (World(grouped(scope="all"), sites(seconds=8)) for _ in range(2))
    whole.run(7)
    parts: dict[tuple[str, int], str] = {}
    handle = other.ledger.handle

    def written(event: Any) -> list[Emission]:
        with other.ledger.transaction() as transaction:
            result = handle(event)
            for change in transaction.changes():
                for kind, start, text in change.entries:
                    parts.pop((kind, start), None)
                    if text is not None:
                        parts[kind, start] = text
        return result

    other.ledger.handle = written  # type: ignore[method-assign]
    other.run(4)
    ledger = Ledger(margin_ms=50)
    ledger.handle(EdgesChanged(tuple(record_of(s.name) for s in other.sites)))
    head = other.ledger._queries[REF].state.to_json()
    ledger.restore(REF, pack_state(head, ((k, s, t) for (k, s), t in sorted(parts.items()))))
    other.ledger = ledger
    other.run(3)
    assert other.given == whole.given


def test_an_edge_core_restored_from_its_state_sends_the_same_frames() -> None:
    whole, cut = (World(grouped(), sites(1, 6)) for _ in range(2))
    whole.run(4)
    for _ in range(8):
        cut.run(0.5)
        core = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, DISORDER_MS, 3_000)}, source=1)
        state = cut.sites[0].core.to_state()
        core.restore(state)
        assert core.to_state() == state
        cut.sites[0].core = core
    assert (cut.frames, cut.bytes) == (whole.frames, whole.bytes)
    assert cut.given == whole.given


def test_coverage_is_of_intervals_for_each_and_of_windows_for_all() -> None:
    for scope in ("each", "all"):
        world = World(grouped(scope=scope), sites(seconds=12))
        world.run(11)
        finals = [e for e in world.given if e.phase is Phase.FINAL]
        firsts = {a.window_start_ms: a for a in first_answers(world.given)}
        shares: list[float] = []
        for final in finals:
            first = firsts[final.window_start_ms]
            said = final.quality.accuracy.covered if final.quality.accuracy else None
            promised = [o for o in prediction(first).outlooks if o.promised] if first.phase is Phase.EARLY else []
            truths = [world.truth(final.window_start_ms, "sum", number(o)) for o in promised]
            held = [o.lower - 1e-6 <= t <= o.upper + 1e-6 for o, t in zip(promised, truths, strict=True)]
            assert said == (all(held) if held else None)
            if held:
                shares.append(float(all(held)) if scope == "all" else float(np.mean(held)))
        assert len(shares) >= 5
        assert world.book().coverage == pytest.approx(np.mean(shares))


def test_groups_that_become_too_many_while_edges_sample_leave_no_answer_that_passes_for_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(grouped(error="20%"), sites(seconds=12, slower=()))
    for site in world.sites:
        site.core.handle(SamplingSet(REF, 0.5, 0.0))
    world.run(5)
    monkeypatch.setattr(groups, "MAX_GROUPS", 2)
    world.run(5)
    book = world.book()
    assert book.is_crowded and book.has_lost_sample
    assert set(book.rates().values()) == {1.0}, "edges are told to process all that comes"
    restored = AccuracyBook(book.accuracy, book.schedule, None)
    restored.restore(book.to_state())
    assert restored.has_lost_sample
    done = [a for a in world.given if a.window_start_ms >= BEGIN_MS + 6_000 and a.phase is not Phase.EARLY]
    assert done
    for answer in done:
        assert [v.code for v in answer.quality.violations] == ["accuracy"]


def test_when_the_last_edge_is_retired_no_rates_are_needed() -> None:
    world = World(grouped(error="20%"), sites(slower=()))
    world.run(6)
    world.ledger.handle(EdgesChanged(tuple(replace(record_of(s.name), retired=True) for s in world.sites)))
    world.ledger.handle(TimeAdvanced(world.now_ms))
    assert world.book().rates() == {} and world.ledger.needed_rates() == {REF: {}}
