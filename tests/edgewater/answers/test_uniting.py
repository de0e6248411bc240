"""Late records, and the union of windows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgewater.answers import (
    NOT_LISTED,
    UNKNOWN,
    Amount,
    Cause,
    Deviation,
    EdgeStatements,
    Facts,
    LateRecords,
    Predicted,
    WithheldBound,
)
from edgewater.answers.statement import completeness, united_contract
from edgewater.answers.uniting import MAX_DEVICES, MAX_LOSSES, united, with_late
from edgewater.base.streams import Delivery
from edgewater.wire import Rest
from tests.query_specs import query_spec

SPEC = query_spec(measures={"n": "count()", "s": "sum(x)", "m": "max(x)"}, budget={"error": {"s": "10%", "m": 5}})
WHOLE = Facts(2, 2, 1.0, observed=8, late=1, staleness_ms=100, first_staleness_ms=90)


def came(counts: dict[str, int]) -> dict[str, LateRecords]:
    return {reason: LateRecords(n) for reason, n in counts.items()}


def loss(number: int, records: int | None = 1, edge: str = "a") -> Deviation:
    lacks = Amount(0, records)
    return Deviation(Cause.INPUT_LOST, edge, "log", "torn", lacks=lacks, from_ms=number, to_ms=number + 1)


# Late records


def test_late_records_are_added_and_lower_the_ratio() -> None:
    facts = with_late(WHOLE, came({"after-final": 2, "too-late": 0}))
    assert facts.deviations == (Deviation(Cause.AFTER_FINAL, reason="after-final", records=2, lacks=Amount(2, 2)),)
    assert facts.ratio == pytest.approx(0.8) and facts.late_counts == (2, 0, 0)
    assert replace(facts, ratio=1.0, deviations=()) == WHOLE, "nothing else of an answer changes"


def test_nothing_late_changes_nothing() -> None:
    assert with_late(WHOLE, {}) == with_late(WHOLE, came({"malformed": 0})) == WHOLE


def test_rejected_records_may_be_lacking_and_guesses_lack_or_add() -> None:
    facts = with_late(WHOLE, came({"malformed": 1, "assumed-copy": 1, "assumed-reset": 5}))
    assert facts.ratio == pytest.approx(0.8), "what was counted on a guess is not lacking"
    assert facts.late_counts == (0, 1, 6) and facts.may_count_twice
    lacking = {d.reason: d.lacks for d in facts.deviations}
    assert lacking == {"malformed": UNKNOWN, "assumed-copy": UNKNOWN, "assumed-reset": Amount()}


def test_an_answer_without_records_has_none_of_the_late_ones() -> None:
    assert with_late(Facts(1, 1, 1.0), came({"after-final": 3})).ratio == 0.0


# Unions


def test_the_ratio_of_a_union_is_the_mean_of_its_windows() -> None:
    lacking = replace(WHOLE, reported=1, ratio=0.5, observed=0, late=0, staleness_ms=300, has_data=False)
    union = united([WHOLE, lacking, replace(WHOLE, expected=3, reported=3, observed=5)], SPEC)
    assert union.ratio == pytest.approx(2.5 / 3)
    assert (union.expected, union.reported, union.observed, union.late) == (3, 1, 13, 2)
    assert (union.staleness_ms, union.first_staleness_ms, union.windows, union.has_data) == (300, 90, 3, True)
    assert not united([lacking, lacking], SPEC).has_data


def test_windows_without_an_answer_are_stated_and_have_no_records() -> None:
    union = united([WHOLE, WHOLE], SPEC, unanswered=6)
    assert union.ratio == 0.25 and union.windows == 8 and not union.is_complete
    assert union.deviations == (Deviation(Cause.UNANSWERED, lacks=UNKNOWN, windows=6),)
    assert completeness(union)["unanswered"] == 6


def test_empty_windows_without_an_answer_lack_nothing() -> None:
    union = united([replace(WHOLE, ratio=0.5), WHOLE], SPEC, empty=6)
    assert union.ratio == pytest.approx(7.5 / 8) and union.windows == 8
    assert union.is_complete and not union.deviations


def test_a_union_of_unions_is_the_union_of_all_windows() -> None:
    late = with_late(WHOLE, came({"after-final": 2}))
    parts = [late, replace(WHOLE, deviations=(loss(1), loss(2))), replace(WHOLE, deviations=(loss(2),)), late]
    hours = [united(parts[:3], SPEC, unanswered=1), united(parts[3:], SPEC, empty=2, unanswered=1)]
    day, at_once = united(hours, SPEC), united(parts, SPEC, empty=2, unanswered=2)
    assert day.ratio == pytest.approx(at_once.ratio) and day.windows == at_once.windows == 8
    assert completeness(day) == completeness(at_once) | {"ratio": day.ratio}


def test_missing_edges_edges_that_left_and_their_constants_survive_once() -> None:
    missing = Deviation(Cause.MISSING, "b", lacks=UNKNOWN, only={"k": "x"})
    left = Deviation(Cause.LEFT, "c", lacks=UNKNOWN, only={"k": "y"})
    lost = Deviation(Cause.LOST_STATE, "b", lacks=UNKNOWN, extra=UNKNOWN)
    parts = [replace(WHOLE, deviations=each) for each in ((missing, left), (missing, lost), ())]
    union = united(parts, SPEC)
    assert union.deviations == (missing, left, lost)
    assert not united(parts[:1], SPEC).may_count_twice and union.may_count_twice
    assert completeness(union)["only"] == {"b": {"k": "x"}, "c": {"k": "y"}}


def test_an_edge_with_another_constant_in_each_window_may_lack_records_of_both_groups() -> None:
    parts = [
        replace(WHOLE, deviations=(Deviation(Cause.MISSING, "b", lacks=UNKNOWN, only=only),))
        for only in ({"k": "x"}, {"k": "y"}, {})
    ]
    assert [d.only for d in united(parts, SPEC).deviations] == [{"k": "x"}, {"k": "y"}, {}]


def test_a_loss_that_concerns_several_windows_is_one_loss() -> None:
    parts = [replace(WHOLE, deviations=(loss(1, 7), loss(n, 2))) for n in (2, 3)]
    assert united(parts, SPEC).deviations == (loss(1, 7), loss(2, 2), loss(3, 2))


def test_late_records_of_several_windows_add_up_by_reason() -> None:
    late = with_late(WHOLE, came({"after-final": 2, "malformed": 1, "assumed-reset": 3}))
    assert united([late, late], SPEC).late_counts == (4, 2, 6)
    union = united([late, with_late(WHOLE, came({"after-final": 2, "malformed": 1, "assumed-reset": 4}))], SPEC)
    assert union.late_counts == (4, 2, 7)
    assert {d.reason: (d.lacks, d.extra) for d in union.deviations} == {
        "after-final": (Amount(4, 4), Amount()),
        "malformed": (UNKNOWN, Amount()),
        "assumed-reset": (Amount(), UNKNOWN),
    }


def test_late_records_that_came_are_no_longer_allowed_for_and_the_confidence_stays() -> None:
    may_change = Deviation(
        Cause.MAY_CHANGE, lacks=Amount(0, 3), amounts={"s": WithheldBound(9.0, 4.0)}, confidence=0.98
    )  # fmt: skip
    allowing = replace(WHOLE, deviations=(may_change,))
    for n, left in ((1, 2), (3, 0), (5, 0)):
        amounts = {"s": WithheldBound(2.0, 4.0), "m": WithheldBound(0.0, 0.0, 7.0)}
        allowed, known = with_late(allowing, {"too-late": LateRecords(n, amounts)}).deviations
        assert (allowed.lacks, allowed.confidence) == (Amount(0, left), 0.98), "a guess does not become certain"
        assert allowed.amounts["s"] == WithheldBound(7.0, 0.0)
        assert (known.lacks, known.amounts) == (Amount(n, n), amounts)


def test_allowances_of_many_windows_hold_together_less_often_than_each() -> None:
    parts = [replace(WHOLE, deviations=(Deviation(Cause.MAY_CHANGE, lacks=Amount(0, 1), confidence=0.99),))] * 10
    facts = united(parts, SPEC)
    assert facts.deviations[0].confidence == pytest.approx(0.9)
    codes = [v.code for v in united_contract(facts, {}, 10, replace(SPEC, budget=None)).violations]
    assert codes == [Cause.MAY_CHANGE]
    assert not united_contract(united(parts[:2], SPEC), {}, 2, replace(SPEC, budget=None)).violations


def test_a_union_lists_a_bounded_number_of_losses() -> None:
    parts = [replace(WHOLE, deviations=(loss(n),)) for n in range(3 * MAX_LOSSES)]
    found = united(parts, SPEC).by_cause(Cause.INPUT_LOST)
    assert sum(d.from_ms is not None for d in found) <= MAX_LOSSES
    most = [d.lacks.most for d in found]
    assert None in most or sum(m or 0 for m in most) >= len(parts), "the other losses count, too"


def test_withheld_amounts_and_rests_of_windows_are_united() -> None:
    bounds = {"s": WithheldBound(4.0, 2.0, None, 0.1, 0.0), "m": WithheldBound(3.0, 0.0, 9.0)}
    part = replace(WHOLE, withheld=bounds, rests={"s": Rest(2, (4.0,)), "n": Rest(2)}, both_signs=("s",))
    union = united([part, part, WHOLE], SPEC)
    assert union.withheld["s"].above == 8.0 and union.withheld["s"].above_share == math.inf
    assert union.withheld["m"] == WithheldBound(3.0, 0.0, 9.0, math.inf, math.inf)
    assert union.rests["n"] == Rest(4) and union.both_signs == ("s",)
    assert united([part, replace(part, rests={"s": None})], SPEC).rests["s"] is None


def test_an_edge_keeps_its_constants_if_it_has_them_in_each_window_of_which_it_withholds() -> None:
    own, other = WithheldBound(2.0, 0.0, None, 0.1, 0.0), WithheldBound(3.0, 0.0)
    only = {"a": {"k": "x"}, "b": {"k": "y"}}
    first = EdgeStatements(withheld={"a": {"s": own}, "b": {"s": own}}, only=only)
    second = EdgeStatements(withheld={"a": {"s": other}, "b": {"s": other}}, only={**only, "b": {"k": "z"}})
    idle = EdgeStatements(withheld={}, only={"b": {"k": "z"}})
    edges = united([replace(WHOLE, edges=each) for each in (first, second, idle)], SPEC).edges
    assert edges.only == {"a": {"k": "x"}}
    assert edges.withheld is not None and edges.withheld["a"]["s"] == WithheldBound(5.0, 0.0)
    assert united([replace(WHOLE, edges=each) for each in (first, idle)], SPEC).edges.only == only
    assert united([replace(WHOLE, edges=each) for each in (first, NOT_LISTED)], SPEC).edges == NOT_LISTED


def test_a_union_has_deliveries_but_no_statements_of_edges_and_no_predicted_values() -> None:
    early = replace(WHOLE, predicted=Predicted("s", False, 0.95, (1.0, 0.0, 2.0)), edges=EdgeStatements(("a",)))
    union = united([replace(WHOLE, deliveries={"b": (Delivery.AT_MOST_ONCE,)}), early], SPEC)
    assert union.predicted == Predicted() and union.edges == EdgeStatements(None, None, None)
    assert union.deliveries == {"b": (Delivery.AT_MOST_ONCE,)}
    assert united([WHOLE], SPEC).predicted is None


def test_two_losses_of_one_source_are_one_only_if_their_numbers_are_equal() -> None:
    parts = [replace(WHOLE, deviations=(loss(0, 3), loss(0, 4))), replace(WHOLE, deviations=(loss(0, 3),))]
    assert sorted(d.lacks.most or 0 for d in united(parts, SPEC).by_cause(Cause.INPUT_LOST)) == [3, 4]


def test_equal_losses_of_one_window_are_several() -> None:
    twice = replace(WHOLE, deviations=(loss(0, 3), loss(0, 3)))
    both = united([twice, replace(WHOLE, deviations=(loss(0, 3),))], SPEC)
    assert both.deviations == united([both, WHOLE], SPEC).deviations == (loss(0, 3), loss(0, 3))


def test_a_union_with_a_window_of_no_edge_is_not_complete() -> None:
    both = united([Facts(0, 0, 0.0, has_data=False), WHOLE], SPEC)
    assert not both.is_complete and both.lacks_records and both.ratio == 0.5


def test_a_union_tells_apart_a_bounded_number_of_devices_with_rejected_records() -> None:
    parts = [
        with_late(WHOLE, came({f'wrong-type{{"x":{at + n}}}': 1 for n in range(MAX_DEVICES)}))
        for at in range(0, MAX_DEVICES, MAX_DEVICES // 4)
    ]
    stated = united(parts, SPEC).by_cause(Cause.REJECTED)
    assert len(stated) == MAX_DEVICES + 1 and sum(each.records for each in stated) == 4 * MAX_DEVICES
    (others,) = (each for each in stated if not each.only)
    assert others.lacks == UNKNOWN and others.records == (1 + 2 + 3) * MAX_DEVICES // 4
