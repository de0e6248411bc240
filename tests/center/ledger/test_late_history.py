"""What an answer allows for follows from the late records of recent windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from center.ledger import QueryRegistered
from center.ledger.late_history import MAX_WINDOWS, LateHistory
from edgewater.answers import Amount, Cause, Deviation, Phase, WithheldBound
from edgewater.answers.statement import violations_of_facts
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.windows import TimeWindow
from edgewater.wire import DroppedRecords, DropReason, SliceClose, Withheld
from tests.center.ledger.test_ledger import MINUTE, Center
from tests.center.ledger.test_ledger import spec as spec_of

SPEC = spec_of(measures={"n": "count()", "s": "sum(x)", "m": "max(x)"})


def window_of(spec: QuerySpec) -> TimeWindow:
    assert isinstance(spec.window, TimeWindow)
    return spec.window


def stated(slice_ms: int, records: int, *amounts: Withheld, reason: DropReason = DropReason.TOO_LATE) -> DroppedRecords:
    return DroppedRecords(slice_ms, reason, records, None, amounts)


def after(windows: int, *late: DroppedRecords, by_closes: int = 0, records: int = 100) -> LateHistory:
    """Returns the history after windows of so many records each. Late records are of the first window."""
    history, window = LateHistory(), window_of(SPEC)
    for number in range(windows):
        history = history.with_answer(number * MINUTE, window)
    closes = {0: by_closes} if by_closes else {}
    return history.with_late(window, closes, {}, (), late, {0: records + by_closes})


def allowed(history: LateHistory, *, observed: int = 100, late: int = 0, is_final: bool = False) -> Deviation | None:
    return history.allowance([99 * MINUTE], observed, late, SPEC, is_final=is_final)


def test_an_answer_allows_for_as_large_a_part_as_a_recent_window_had() -> None:
    amounts = Withheld("s", 40.0, 0.0, 1), Withheld("m", 0.0, 0.0, 1, 9.0)
    deviation = allowed(after(49, stated(0, 4, *amounts)), observed=200)
    assert deviation == Deviation(
        Cause.MAY_CHANGE, lacks=Amount(0, 8), confidence=1 - 1 / 50,
        amounts={"s": WithheldBound(80.0, 0.0), "m": WithheldBound(0.0, 0.0, 9.0)},
    )  # fmt: skip


def test_late_records_of_the_window_itself_are_no_longer_expected() -> None:
    history = after(49, by_closes=4)
    deviation = allowed(history, observed=103, late=3)
    assert deviation is not None and deviation.lacks == Amount(0, 1)
    assert history.allowance([0], 100, 0, SPEC, is_final=False) is None, "other windows had none"
    assert allowed(history, is_final=True) is None, "no record came after a final answer"


def test_an_edge_that_states_no_amounts_leaves_them_unknown() -> None:
    for history in (after(49, stated(0, 4)), after(49, by_closes=4)):
        deviation = allowed(history)
        assert deviation is not None and (deviation.lacks, deviation.amounts) == (Amount(0, 4), {})


def test_records_of_unknown_slices_count_for_the_newest_window() -> None:
    history = after(3, stated(MIN_TIME_MS, 7), stated(77 * MINUTE, 1))
    assert list(history.blocks) == [2 * MINUTE] and history.blocks[2 * MINUTE].dropped.records == 8


def test_a_history_is_bounded_forgets_and_can_be_stored() -> None:
    window, history = window_of(SPEC), after(1)
    for number in range(3 * MAX_WINDOWS):
        late = [stated(number * MINUTE, 1, Withheld("s", float("inf"), 0.0, 1))]
        history = history.with_late(window, {}, {}, (), late, {number * MINUTE: 10})
    assert len(history.blocks) == MAX_WINDOWS
    assert LateHistory.from_state(history.to_state()) == history
    for number in range(MAX_WINDOWS):
        history = history.with_answer(number * MINUTE, window)
    assert not history.blocks and allowed(history) is None


def test_sliding_windows_are_counted_by_their_length() -> None:
    spec = spec_of(window={"sliding": "10m", "every": "1m"})
    history, window = LateHistory(), window_of(spec)
    for number in range(100):
        history = history.with_answer(number * MINUTE, window)
    history = history.with_late(window, {}, {}, (), [stated(3 * MINUTE, 2)], {s * MINUTE: 10 for s in range(10)})
    deviation = history.allowance([s * MINUTE for s in range(50, 60)], 100, 0, spec, is_final=False)
    assert deviation is not None and (deviation.lacks, deviation.confidence) == (Amount(0, 2), 1 - 1 / 11)


def test_a_final_answer_allows_only_for_records_that_final_answers_lack() -> None:
    window, history = window_of(SPEC), after(49, by_closes=4)
    assert allowed(history, is_final=True) is None, "the late records came before their windows were final"
    history = history.with_late(
        window, {MINUTE: 6}, {MINUTE: 2}, (), [stated(3 * MINUTE, 1)], {MINUTE: 106, 3 * MINUTE: 100}
    )
    deviation = allowed(history, is_final=True)
    assert deviation is not None and deviation.lacks == Amount(0, 2)
    assert LateHistory.from_state(history.to_state()) == history


def test_a_first_answer_that_is_final_allows_for_none_of_the_records_that_are_counted() -> None:
    center = Center("a", lateness="1m")
    for number in range(5):
        late = [SliceClose(2 * MINUTE, 101, 1)] if number == 3 else []
        center.says("a", (number + 1) * MINUTE, SliceClose(number * MINUTE, 100, 0), *late)
    answers = center.says("a", 20 * MINUTE, SliceClose(5 * MINUTE, 100, 0))
    (first,) = (each for each in answers if each.window_start_ms == 5 * MINUTE)
    assert (first.revision, first.phase, first.facts.by_cause(Cause.MAY_CHANGE)) == (1, Phase.FINAL, ())


def test_absurd_numbers_of_an_edge_stay_storable() -> None:
    deviation = allowed(after(49, stated(0, 1 << 62), records=1), observed=1 << 40)
    assert deviation is not None and deviation.lacks.most == 1 << 53


@pytest.mark.parametrize("slice_ms", [MIN_TIME_MS, -5 * MINUTE])
def test_late_records_of_unknown_or_empty_slices_are_a_part_of_the_newest_window(slice_ms: int) -> None:
    center, last = Center("a"), None
    for number in range(25):
        through = (number + 1) * MINUTE
        (answer,) = center.says("a", through, SliceClose(number * MINUTE, 100, 0))
        last = answer.facts.by_cause(Cause.MAY_CHANGE)
        if number == 23:
            center.reports(replace(center.fact("a", through), dropped=(stated(slice_ms, 2),)))
    assert [d.lacks.most for d in last or ()] == [2]


def test_the_next_version_of_a_query_begins_with_the_history_of_equal_measures() -> None:
    amounts = Withheld("s", 40.0, 0.0, 1), Withheld("m", 0.0, 0.0, 1, 9.0)
    history = after(49, stated(0, 4, *amounts))
    more = spec_of(measures={"n": "count()", "s": "sum(x)", "m": "max(y)"})
    deviation = history.of_next_version(SPEC, more).allowance([99 * MINUTE], 100, 0, more, is_final=False)
    assert deviation is not None and (deviation.lacks.most, list(deviation.amounts)) == (4, ["s"])
    assert deviation.confidence == 1 - 1 / 50
    for other in ({"where": "x > 1"}, {"lateness": "7m"}, {"window": {"tumbling": "2m"}}):
        assert history.of_next_version(SPEC, spec_of(measures={"n": "count()"}, **other)) == LateHistory()
    center = Center("a")
    for number in range(25):
        center.says("a", (number + 1) * MINUTE, SliceClose(number * MINUTE, 100, 0))
        if number == 3:
            late = stated(2 * MINUTE, 1)
            center.reports(replace(center.fact("a", (number + 1) * MINUTE), dropped=(late,)))
    before = center.ledger.book(center.ledger.queries()[0]).state
    ref = replace(before.query.ref, version=before.query.ref.version + 1)
    center.ledger.handle(QueryRegistered(RegisteredQuery(ref, before.query.spec, 0, None)))
    assert center.ledger.book(ref).state.late_history == before.late_history != LateHistory()


@pytest.mark.parametrize("clumps", [1, 20])
def test_the_next_window_rarely_has_more(clumps: int) -> None:
    rng, window, misses = np.random.default_rng(7), window_of(SPEC), 0
    history = LateHistory()
    for number, late in enumerate((rng.poisson(3.0 / clumps, 2_000) * clumps).tolist()):
        deviation = history.allowance([number * MINUTE], 100, 0, SPEC, is_final=False)
        misses += number > MAX_WINDOWS and late > (0 if deviation is None else deviation.lacks.most or 0)
        history = history.with_answer(number * MINUTE, window)
        if late:
            at = number * MINUTE
            history = history.with_late(window, {}, {}, (), [stated(at, late)], {at: 100})
    assert misses <= 38, "1 in 101 windows is expected at most; twice as many is far outside of chance"


def test_the_ledger_allows_for_late_records_and_says_when_windows_are_few() -> None:
    center = Center("a", lateness="1m")
    facts = {}
    for number in range(25):
        closes = [SliceClose(number * MINUTE, 100, 0)]
        if number == 3:
            closes.append(SliceClose(2 * MINUTE, 101, 1))
        for answer in center.says("a", (number + 1) * MINUTE, *closes):
            facts.setdefault(answer.window_start_ms, answer.facts)
    first = {start // MINUTE: [d.lacks.most for d in each.by_cause(Cause.MAY_CHANGE)] for start, each in facts.items()}
    assert [first[n] for n in (2, 4, 24)] == [[], [1], [1]]
    codes = {n: [v.code for v in violations_of_facts(facts[n * MINUTE], SPEC)] for n in (3, 4, 24)}
    assert codes[4] == [Cause.MAY_CHANGE] and codes[24] == []
    state = replace(center.ledger.queries() and center.ledger.book(center.ledger.queries()[0]).state)
    assert type(state).from_mapping(state.to_mapping()) == state
