from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from center.early.trigger import EarlyTrigger
from edgewater.arrivals import SlotGrid
from edgewater.arrivals.stragglers import DEFAULT_FACTOR, StragglerModel
from edgewater.arrivals.triangle import ArrivalTriangle
from edgewater.model.accuracy import AccuracyTarget

GRID = SlotGrid(slot_ms=20, substream_slots=10, lags=80)
MEAN_LAG, EVENTS_PER_SLOT = 5.0, 20
WINDOW = 30
KNOWN_AGE = GRID.lags + 1


def calibration_arrays(trigger: EarlyTrigger) -> list[np.ndarray]:
    arrays = trigger.calibration.to_state().arrays
    return [arrays["open"], arrays["lengths"]]


def observed(pieces: list[tuple[int, int]], seed: int = 20_200_713) -> StragglerModel:
    """A source of exponential delays; pieces are (slots, events born in each)."""
    rng = np.random.default_rng(seed)
    rates = np.repeat([rate for _, rate in pieces], [slots for slots, _ in pieces])
    table = np.zeros((len(rates), GRID.lags))
    for born, rate in enumerate(rates):
        lags = np.minimum(rng.exponential(MEAN_LAG, rate).astype(int), GRID.lags - 1)
        lags = lags[born + lags < len(rates)]
        np.add.at(table, (born + lags, lags), 1)
    model = StragglerModel(ArrivalTriangle(1, GRID))
    for slot, row in enumerate(table, start=1):
        model.triangle.advance(row[None])
        if slot % GRID.substream_slots == 0:
            model.on_substream()
    return model


ACTIVE = (20 * WINDOW, EVENTS_PER_SLOT)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([ACTIVE], id="always active"),
        pytest.param([(10 * WINDOW, 0), ACTIVE], id="idle before its first event"),
        pytest.param([ACTIVE, (100 * WINDOW, 0), ACTIVE], id="after a long pause"),
    ],
)
def test_a_source_is_predicted_as_well_after_a_pause_as_before(pieces: list[tuple[int, int]]) -> None:
    stragglers = observed(pieces).predict(0, WINDOW)

    assert stragglers.known
    assert stragglers.expected[0] == pytest.approx(EVENTS_PER_SLOT * MEAN_LAG, rel=0.35)
    assert 0.5 * np.sqrt(stragglers.expected[0]) < stragglers.deviation[0] < 0.3 * stragglers.expected[0]


def test_no_number_of_events_makes_a_source_known_that_is_younger_than_the_longest_lag() -> None:
    assert not observed([(KNOWN_AGE - 1, 200)]).predict(0, WINDOW).known
    assert observed([(KNOWN_AGE, 0)]).predict(0, WINDOW).known


def test_a_source_that_starts_anew_is_unknown_again_and_one_that_pauses_is_not() -> None:
    def new(sources: int) -> EarlyTrigger:
        return EarlyTrigger(sources, GRID, WINDOW, AccuracyTarget(), "count")

    def is_known_after(trigger: EarlyTrigger, slots: int, *reporting: bool) -> bool:
        rows = np.zeros((2, GRID.lags))
        rows[:, 2] = 20
        for _ in range(slots):
            trigger.on_slot(rows, np.array(reporting))
        return trigger.model.predict(0, WINDOW).known

    trigger = new(2)
    assert not is_known_after(trigger, KNOWN_AGE - 1, True, True)
    assert is_known_after(trigger, 5 * GRID.substream_slots, True, True)
    anew = EarlyTrigger.from_state(trigger.to_state())
    anew.take([0, None])
    assert anew.model.late == trigger.model.late and anew.model.late_from[1] >= GRID.lags
    assert is_known_after(trigger, WINDOW, True, False)
    assert not is_known_after(anew, KNOWN_AGE - 1, True, True)
    assert is_known_after(anew, 1, True, True)


def test_the_uncertainty_of_a_new_source_is_large_but_bounded() -> None:
    stragglers = observed([(10 * WINDOW, 0), (4 * WINDOW, EVENTS_PER_SLOT)]).predict(0, WINDOW)

    assert stragglers.known
    assert stragglers.deviation[0] < 0.5 * stragglers.expected[0]


def test_backtests_begin_with_the_history_of_the_longest_lag_and_pause_without_events() -> None:
    trigger = EarlyTrigger(2, GRID, WINDOW, AccuracyTarget(), "count")
    rows = np.zeros((2, GRID.lags))

    def recorded_after(slots: int, events: float) -> int:
        for _ in range(slots):
            rows[0, 2] = events
            trigger.on_slot(rows)  # the other source reports, but has no events
        return sum(len(a) for a in calibration_arrays(trigger)[:1]) + int(calibration_arrays(trigger)[1].sum())

    assert recorded_after(GRID.lags - 1, 20) == 0
    initial = recorded_after(WINDOW, 20)
    assert initial > 0 and calibration_arrays(trigger)[0][:, -1].all(), "they have less history than later ones"
    grown = recorded_after(2 * WINDOW, 20)
    assert grown > initial and not calibration_arrays(trigger)[0][:, -1].any()
    paused = recorded_after(GRID.lags + WINDOW, 0)  # until the predictions are settled and the last window is empty
    assert paused > grown
    assert recorded_after(10 * WINDOW, 0) == paused

    trigger = EarlyTrigger(2, GRID, WINDOW, AccuracyTarget(), "count")
    assert recorded_after(5 * WINDOW, 0) == 0, "nothing was expected and nothing came"
    assert recorded_after(GRID.lags - 1, 20) == 0, "the delays of the first events are not known yet"
    assert recorded_after(WINDOW, 20) > 0


OUTAGE, AFFECTED = 25, 0.2
"""Slots between two releases, and the part of the records that wait for each."""


@pytest.mark.parametrize("together", [True, False])
def test_first_intervals_contain_late_records_of_all_sources_that_are_released_together(together: bool) -> None:
    rng, slots = np.random.default_rng(20_261_123), KNOWN_AGE + 3 * OUTAGE
    count = rng.poisson(EVENTS_PER_SLOT, (slots, 2))
    born, source = np.repeat(np.arange(slots), count.sum(axis=1)), np.repeat(np.tile([0, 1], slots), count.ravel())
    lag = rng.exponential(MEAN_LAG / 2, len(born)).astype(int)
    release = OUTAGE - born % OUTAGE if together else rng.integers(0, OUTAGE, len(born))
    lag = np.where(rng.random(len(born)) < AFFECTED, np.maximum(lag, release), lag)
    table, on_time = np.zeros((slots, 2, GRID.lags)), born + lag < slots
    np.add.at(table, ((born + lag)[on_time], source[on_time], lag[on_time]), 1)

    trigger, found = EarlyTrigger(2, GRID, WINDOW, AccuracyTarget(), "count"), []
    for now, row in enumerate(table):
        trigger.on_slot(row)
        if now >= KNOWN_AGE:
            stragglers = trigger.model.predict(10, WINDOW)
            late = ((born > now - 10 - WINDOW) & (born <= now - 10) & (born + lag > now)).sum()
            width = [DEFAULT_FACTOR * np.sqrt((x**2).sum()) for x in (stragglers.untested, stragglers.deviation)]
            found.append(abs(late - stragglers.expected.sum()) <= width)
    of_clumps, one_by_one = np.mean(found, axis=0)
    assert of_clumps == 1
    assert trigger.model.late[0] > 100 and (one_by_one < 0.8 if together else width[0] < 1.05 * width[1])


POLL = 6
"""Slots between two batches: just as long as the blocks by which clumps of late records are learnt, which show none."""
POLLED = SlotGrid(slot_ms=20, substream_slots=5 * POLL, lags=120)


def polled(trigger: EarlyTrigger, slots: int) -> Iterator[tuple[int, int]]:
    """Advances the trigger by batches of 20 records per slot; yields time, and what is missing of the window that
    ended a batch before."""
    rng = np.random.default_rng(20_261_123)
    born = np.repeat(np.arange(slots), EVENTS_PER_SLOT)
    arrives = -(-(born + rng.exponential(MEAN_LAG, len(born))).astype(int) // POLL) * POLL
    lag, table = arrives - born, np.zeros((slots, 1, POLLED.lags))
    on_time = arrives < slots
    np.add.at(table, (arrives[on_time], 0, lag[on_time]), 1)
    for now, row in enumerate(table):
        trigger.on_slot(row)
        yield now, int(((born > now - POLL - WINDOW) & (born <= now - POLL) & (arrives > now)).sum())


def test_first_intervals_hold_between_the_batches_of_a_reader_that_polls() -> None:
    trigger = EarlyTrigger(1, POLLED, WINDOW, AccuracyTarget(), "count")
    found = []
    for now, late in polled(trigger, POLLED.lags + 2 * WINDOW):
        if now >= POLLED.lags + WINDOW and now % POLL > 1:
            stragglers = trigger.model.predict(POLL, WINDOW)
            widths = np.array([stragglers.untested[0], stragglers.deviation[0]])
            found.append(abs(late - stragglers.expected[0]) <= DEFAULT_FACTOR * widths)
    with_pauses, without = np.mean(found, axis=0)
    assert with_pauses == 1 > without


def test_inherited_delays_give_an_interval_with_a_batch_and_none_in_the_pauses_before_a_rate_is_learnt() -> None:
    trigger = EarlyTrigger(1, POLLED, WINDOW, AccuracyTarget(), "count")
    trigger.triangle.inherit(0, np.ones((2, 2, POLLED.lags), np.float32), POLLED.lags)
    known = {now: trigger.model.predict(0, WINDOW).known for now, _ in polled(trigger, 2 * WINDOW)}
    assert known == {now: now >= WINDOW and now % POLL == 0 for now in known}


@pytest.mark.parametrize("since_batch", [1, 3, 7, 9])
def test_the_expected_number_follows_the_time_since_the_last_batch(since_batch: int) -> None:
    period, rng = 10, np.random.default_rng(20_261_129)
    slots = 60 * period + since_batch
    table, missing = np.zeros((slots, POLLED.lags)), 0
    for born in range(slots):
        ready = born + rng.exponential(15.0, EVENTS_PER_SLOT)
        arrived = (np.ceil(ready / period) * period).astype(int)
        missing += int((arrived >= slots).sum()) if born >= slots - 100 else 0
        lags = np.minimum(arrived - born, POLLED.lags - 1)
        known = arrived < slots
        np.add.at(table, (arrived[known], lags[known]), 1)
    model = StragglerModel(ArrivalTriangle(1, POLLED))
    for slot, row in enumerate(table):
        model.triangle.advance(row[None])
        model.on_slot(row[None], slot)
        if (slot + 1) % POLLED.substream_slots == 0:
            model.on_substream()

    assert model.predict(0, 100).expected[0] == pytest.approx(missing, rel=0.12)
