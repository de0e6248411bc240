"""Watermarks side by side are those that each would be alone."""

from __future__ import annotations

import numpy as np
import pytest

from center.early_trigger.batch import Together
from center.early_trigger.estimate import Sampled
from center.early_trigger.trigger import Answer, Watermark
from edgewater.accuracy import MEASURES, AccuracyTarget, MeasureKind
from edgewater.arrivals import SlotGrid
from edgewater.synopses import FloatArray
from edgewater.synopses.encoding import named_arrays as state

GRID = SlotGrid(slot_ms=20, substream_slots=6, lags=90)
SLOTS, SOURCES = 30, 3
MEANS = (3.0, 6.0, 9.0, 5.0)
SILENT = range(330, 350)
"""Slots in which the last source cannot be heard."""
CHANGE = 240
"""The slot at which the first watermark's delays become six times as long: its memories start anew."""


def fresh(measure: MeasureKind = "sum") -> Watermark:
    return Watermark(SOURCES, GRID, SLOTS, AccuracyTarget(0.05, 0.95), measure)


def arrivals(rng: np.random.Generator, slot: int) -> FloatArray:
    """[watermark, source, lag] of one slot; the third watermark's last source has nothing."""
    table = np.zeros((len(MEANS), SOURCES, GRID.lags))
    for mark, mean in enumerate(MEANS):
        mean = 6 * mean if mark == 0 and slot > CHANGE else mean
        for source in range(SOURCES if mark != 2 else SOURCES - 1):
            lags = rng.exponential(mean, rng.poisson(8 + 4 * source)).astype(int)
            np.add.at(table[mark, source], np.minimum(lags, min(slot, GRID.lags - 1)), 1)
    return table


def samples(rng: np.random.Generator, width: int) -> Sampled:
    """Of all watermarks, most of it processed."""
    by_lag = np.zeros((len(MEANS), SOURCES, width))
    by_lag[:, :, :5] = rng.poisson(60, (len(MEANS), SOURCES, 5))
    count = by_lag.sum(axis=2).T
    return Sampled(count + rng.poisson(20, count.shape), count, 3.0 * count, 11.0 * count, by_lag.reshape(-1, width))


class Sides:
    """The same watermarks told one by one, and told together."""

    def __init__(self, measure: MeasureKind) -> None:
        self.alone, self.joint = ([fresh(measure) for _ in MEANS] for _ in range(2))
        self.together = Together(self.joint)
        self.rng, self.missed = np.random.default_rng(20_261_121), [[] for _ in MEANS]  # type: ignore[var-annotated]

    def run(self, slots: range) -> None:
        everyone = np.ones(SOURCES, bool)
        for slot in slots:
            table = arrivals(self.rng, slot)
            heard = everyone if slot not in SILENT else np.arange(SOURCES) < SOURCES - 1
            if slot == SILENT.stop:
                last = np.arange(len(MEANS)) * SOURCES + SOURCES - 1
                self.together.triangle.catch_up_all(last, np.array(self.missed).transpose(1, 0, 2))
            for mark, row in enumerate(table):
                if slot == SILENT.stop:
                    self.alone[mark].on_return(SOURCES - 1, np.array(self.missed[mark]))
                if slot in SILENT:
                    self.missed[mark].append(row[-1])
                self.alone[mark].on_slot(row, heard)
            self.together.advance(table.reshape(-1, GRID.lags), np.tile(heard, len(MEANS)))
            if slot % SLOTS == SLOTS - 1:
                self.learn(slot)

    def learn(self, slot: int) -> None:
        """A window has been answered, of all but one of them."""
        chosen = [i for i in range(len(MEANS)) if i != slot // SLOTS % len(MEANS)]
        width = self.alone[0].late.count.shape[1]
        given = samples(self.rng, width)
        counts = given.by_lag.reshape(len(MEANS), SOURCES, width)
        straggler, estimate = np.array([1.0, 2.0, np.inf, 4.0]), np.array([90.0, 0.0, 80.0, 70.0])
        for i in chosen:
            answer = Answer(estimate[i : i + 1], np.zeros(1), straggler[i : i + 1], np.ones(1), True)
            self.alone[i].on_answered(given.of(i), answer, (counts[i], 3 * counts[i], 11 * counts[i]))
        mine = counts[chosen].reshape(-1, width)
        of_chosen = Sampled(*(x[:, chosen] for x in (given.arrived, given.count, given.total, given.squares)), mine)
        with np.errstate(divide="ignore"):
            shares = (straggler / estimate)[chosen]
        self.together.on_answered(chosen, of_chosen, (mine, 3 * mine, 11 * mine), shares)

    def assert_same(self) -> None:
        for one, other in zip(self.alone, self.joint, strict=True):
            (numbers, arrays), (others, joint) = (state.unpack(m.to_state()) for m in (one, other))
            assert numbers.pop("straggler_share") == pytest.approx(others.pop("straggler_share"), rel=1e-9)
            assert numbers == others
            for name, array in arrays.items():
                np.testing.assert_allclose(joint[name], array, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("measure", MEASURES)
def test_told_together_each_is_as_if_told_alone_through_drift_silence_and_return(measure: MeasureKind) -> None:
    sides = Sides(measure)
    sides.run(range(SILENT.start + 10))
    assert sides.together.triangle.behind.any()
    sides.assert_same()
    sides.run(range(SILENT.start + 10, 480))
    assert not sides.together.triangle.behind.any()
    sides.assert_same()


@pytest.mark.parametrize("measure", MEASURES)
def test_a_window_modelled_together_is_that_of_each(measure: MeasureKind) -> None:
    sides, at = Sides(measure), 0
    for slot in (20, 240, SILENT.start + 10):  # in the first window, as usual, and while a source is silent
        sides.run(range(at, slot))
        at = slot
        for offset in (0, 4, 80):
            compare(sides, offset)


def compare(sides: Sides, offset: int) -> None:
    given = samples(sides.rng, sides.alone[0].late.count.shape[1])
    stragglers, model = sides.together.window_models(offset, given)
    widths = model.sampling_width(given.count, np.array([m.quantile for m in sides.joint]))
    for i, mark in enumerate(sides.alone):
        alone, its_model = mark.window_model(offset, given.of(i))
        mine = stragglers.of(i)
        assert (mine.known, mine.drift, mine.alarm) == pytest.approx((alone.known, alone.drift, alone.alarm))
        for name in ("arrived", "expected", "deviation", "rate"):
            np.testing.assert_allclose(getattr(mine, name), getattr(alone, name), rtol=1e-9)
        for name in ("estimate", "size", "straggler_width", "population", "spread"):
            np.testing.assert_allclose(getattr(model.of(i), name), getattr(its_model, name), rtol=1e-9)
        assert widths[i] == pytest.approx(its_model.sampling_width(given.of(i).count, mark.quantile)[0])


def test_what_one_of_them_changes_by_itself_is_seen_by_all() -> None:
    sides = Sides("sum")
    sides.run(range(200))
    before = sides.together.triangle.distributions().copy()
    sides.joint[1].triangle.forget_long()
    after = sides.together.triangle.distributions()
    changed = (before != after).any(axis=(0, 2))
    assert changed.tolist() == [False] * SOURCES + [True] * SOURCES + [False] * (2 * SOURCES)
