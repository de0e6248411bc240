"""Triggers in a batch have the state and the estimates that each would have alone."""

from __future__ import annotations

import numpy as np
import pytest

from center.early.trigger import EarlyTrigger, TriggerBatch, window_models
from edgewater.arrivals import SlotGrid
from edgewater.arrivals.targets import AccuracyTarget, MeasureKind
from edgewater.arrivals.window_model import WindowSample
from edgewater.synopses import FloatArray
from tests.cells import at_night
from tests.center.early.lone_trigger import learn

GRID = SlotGrid(slot_ms=20, substream_slots=6, lags=90)
SLOTS, SOURCES = 30, 3
MEANS = (3.0, 6.0, 9.0, 5.0)
SILENT = range(330, 350)
"""Slots in which the last source does not report."""
CHANGE = 240
"""The slot at which the first trigger's delays become six times as long, so that its long memory is reset."""


def fresh(measure: MeasureKind = "sum") -> EarlyTrigger:
    return EarlyTrigger(SOURCES, GRID, SLOTS, AccuracyTarget(0.05, 0.95), measure)


def arrivals(rng: np.random.Generator, slot: int) -> FloatArray:
    """[trigger, source, lag] of one slot; the third trigger's last source has no events."""
    table = np.zeros((len(MEANS), SOURCES, GRID.lags))
    for i, mean in enumerate(MEANS):
        mean = 6 * mean if i == 0 and slot > CHANGE else mean
        for source in range(SOURCES if i != 2 else SOURCES - 1):
            lags = rng.exponential(mean, rng.poisson(8 + 4 * source)).astype(int)
            np.add.at(table[i, source], np.minimum(lags, min(slot, GRID.lags - 1)), 1)
    return table


def samples(rng: np.random.Generator, width: int) -> WindowSample:
    """A sample of all triggers, with most events processed."""
    by_lag = np.zeros((len(MEANS), SOURCES, width))
    by_lag[:, :, :5] = rng.poisson(60, (len(MEANS), SOURCES, 5))
    count = by_lag.sum(axis=2).T
    greatest = rng.uniform(5, 9, count.shape)
    return WindowSample(
        count + rng.poisson(20, count.shape), count, 3.0 * count, 11.0 * count, by_lag.reshape(-1, width),
        np.ones(count.shape), greatest,
    )  # fmt: skip


class Sides:
    """The same triggers, updated one by one and as a batch."""

    def __init__(self, measure: MeasureKind) -> None:
        self.alone, self.joint = ([fresh(measure) for _ in MEANS] for _ in range(2))
        self.batch = TriggerBatch(self.joint)
        self.rng, self.missed = np.random.default_rng(20_261_121), [[] for _ in MEANS]  # type: ignore[var-annotated]

    def run(self, slots: range) -> None:
        everyone = np.ones(SOURCES, bool)
        for slot in slots:
            table = arrivals(self.rng, slot)
            reporting = everyone if slot not in SILENT else np.arange(SOURCES) < SOURCES - 1
            if slot == SILENT.stop:
                last = np.arange(len(MEANS)) * SOURCES + SOURCES - 1
                self.batch.triangle.catch_up(last, np.array(self.missed).transpose(1, 0, 2))
            for i, row in enumerate(table):
                if slot == SILENT.stop:
                    self.alone[i].triangle.catch_up(np.array([SOURCES - 1]), np.array(self.missed[i])[:, None])
                if slot in SILENT:
                    self.missed[i].append(row[-1])
                self.alone[i].on_slot(row, reporting)
            self.batch.advance(table.reshape(-1, GRID.lags), np.tile(reporting, len(MEANS)))
            if slot % SLOTS == SLOTS - 1:
                self.learn(slot)

    def learn(self, slot: int) -> None:
        """Answers a window of all triggers but one."""
        selected = [i for i in range(len(MEANS)) if i != slot // SLOTS % len(MEANS)]
        width = self.alone[0].late.count.shape[1]
        sample = samples(self.rng, width)
        counts = sample.by_lag.reshape(len(MEANS), SOURCES, width)
        straggler, estimate = np.array([1.0, 2.0, np.inf, 4.0]), np.array([90.0, 0.0, 80.0, 70.0])
        with np.errstate(divide="ignore"):
            shares = straggler / estimate
        for i in selected:
            learn(self.alone[i], sample.of(i), (counts[i], 3 * counts[i], 11 * counts[i]), shares[i])
        mine = counts[selected].reshape(-1, width)
        of_selected = WindowSample(
            *(x[:, selected] for x in (sample.arrived, sample.count, sample.total, sample.squares)), mine,
            sample.least[:, selected], sample.greatest[:, selected],
        )  # fmt: skip
        self.batch.on_answered(selected, of_selected, (mine, 3 * mine, 11 * mine), shares[selected])

    def assert_same(self) -> None:
        for one, other in zip(self.alone, self.joint, strict=True):
            state, joint = one.to_state(), other.to_state()
            # The last number but one is the share of the stragglers, which depends on the order of sums.
            assert state.numbers[:-2] == joint.numbers[:-2]
            assert state.numbers[-2] == pytest.approx(joint.numbers[-2], rel=1e-9)
            for name, part in state.components.items():
                for array, values in part.arrays.items():
                    np.testing.assert_allclose(
                        joint.components[name].arrays[array], values, rtol=1e-6, atol=1e-9, err_msg=array
                    )


@pytest.mark.nightly
@pytest.mark.parametrize("measure", ["sum", *at_night("mean", "count")])
def test_a_batch_updates_each_trigger_as_if_alone_through_drift_and_silence(measure: MeasureKind) -> None:
    sides = Sides(measure)
    sides.run(range(SILENT.start + 10))
    assert sides.batch.triangle.silent_slots.any()
    sides.assert_same()
    sides.run(range(SILENT.start + 10, 480))
    assert not sides.batch.triangle.silent_slots.any()
    sides.assert_same()


def test_a_lasting_change_of_delays_replaces_the_long_memory_by_the_short_one() -> None:
    trigger, rng, differences = fresh(), np.random.default_rng(2), list[float]()
    for slot in range(CHANGE + 120):
        trigger.on_slot(arrivals(rng, slot)[0])
        if slot > CHANGE and slot % GRID.substream_slots == GRID.substream_slots - 1:
            long, short = trigger.triangle.distributions()
            differences.append(float(np.abs(long - short).max()))
    assert differences[0] > 0 and min(differences) == 0


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["mean", *at_night("sum", "count")])
def test_a_batch_models_windows_as_each_trigger_would(measure: MeasureKind) -> None:
    sides, at = Sides(measure), 0
    for slot in (20, 240, SILENT.start + 10):  # in the first window, as usual, and while a source is silent
        sides.run(range(at, slot))
        at = slot
        for offset in (0, 4, 80):
            compare(sides, offset)


def compare(sides: Sides, offset: int) -> None:
    sample = samples(sides.rng, sides.alone[0].late.count.shape[1])
    stragglers, model = window_models(sides.batch.triggers, sides.batch.model, offset, sample)
    widths = model.sampling_width(sample.count, np.array([m.quantile for m in sides.joint]))
    for i, trigger in enumerate(sides.alone):
        alone, its_model = window_models([trigger], trigger.model, offset, sample.of(i))
        mine = stragglers.of(i)
        for name in ("known", "drift", "alarm", "arrived", "expected", "deviation", "untested", "rate"):
            np.testing.assert_allclose(getattr(mine, name), getattr(alone, name), rtol=1e-9)
        for name in ("estimate", "size", "straggler_width", "population", "spread"):
            np.testing.assert_allclose(getattr(model.of(i), name), getattr(its_model, name), rtol=1e-9)
        assert widths[i] == pytest.approx(its_model.sampling_width(sample.of(i).count, trigger.quantile)[0])


def test_a_change_of_one_trigger_is_visible_in_the_batch() -> None:
    sides = Sides("sum")
    sides.run(range(30))
    before = sides.batch.triangle.distributions().copy()
    sides.joint[1].triangle.reset_long_memory()
    after = sides.batch.triangle.distributions()
    changed = (before != after).any(axis=(0, 2))
    assert changed.tolist() == [False] * SOURCES + [True] * SOURCES + [False] * (2 * SOURCES)
