"""A trigger restored at any moment continues exactly as the uninterrupted one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.early.trigger import AnswerNow, EarlyTrigger, TriggerBatch
from edgewater.arrivals import SlotGrid
from edgewater.arrivals.targets import MEASURES, AccuracyTarget
from edgewater.arrivals.window_model import WindowSample
from edgewater.base.errors import CorruptSynopsis, UnsupportedVersion
from edgewater.synopses.encoding.state import State
from tests.center.early.lone_trigger import decide, learn
from tests.examples import examples

pytestmark = pytest.mark.slow

GRID = SlotGrid(slot_ms=20, substream_slots=5, lags=90)
SLOTS = 20


def packed(trigger: EarlyTrigger) -> bytes:
    return trigger.to_state().pack("trigger")


def unpacked(data: bytes) -> EarlyTrigger:
    return EarlyTrigger.from_state(State.unpack(data, "trigger"))


class World:
    """A trigger over sources whose delays change, one of which is silent now and then."""

    def __init__(self, trigger: EarlyTrigger, seed: int) -> None:
        self.trigger, self.rng = trigger, np.random.default_rng(seed)
        self.sources = trigger.triangle.sources
        self.silent: list[np.ndarray] = []
        self.decisions: list[object] = []

    def step(self) -> None:
        trigger, rng = self.trigger, self.rng
        born = rng.poisson(12, self.sources)
        row = np.zeros((self.sources, GRID.lags))
        mean = 4 if trigger.slot < 300 else 9
        for source, count in enumerate(born):
            lag = np.minimum(rng.exponential(mean, count).astype(int), min(trigger.slot, GRID.lags - 1))
            np.add.at(row[source], lag, 1)
        is_silent = self.sources > 1 and trigger.slot % 97 > 80
        if is_silent:
            self.silent.append(row[-1])
            trigger.on_slot(row, np.arange(self.sources) < self.sources - 1)
        else:
            if self.silent:
                trigger.triangle.catch_up(np.array([self.sources - 1]), np.array(self.silent)[:, None])
                self.silent = []
            trigger.on_slot(row)
        if trigger.slot % SLOTS == 0:
            self.answer()

    def answer(self) -> None:
        trigger, rng = self.trigger, self.rng
        rates, _ = TriggerBatch([trigger]).rates()
        arrived = rng.poisson(200, (self.sources, 1)).astype(float)
        count = np.floor(arrived * np.maximum(rates, 0.5))
        value = count * rng.normal(3, 0.1, count.shape)
        by_lag = np.zeros(trigger.late.count.shape)
        by_lag[:, :4] = count.sum(axis=1, keepdims=True) / 4
        ends = np.ones(count.shape), rng.uniform(5, 9, count.shape)
        sample = WindowSample(arrived, count, value, 12 * count, by_lag, *ends)
        decision, model = decide(trigger, trigger.slot, sample)
        self.decisions.append(repr(decision))
        if isinstance(decision, AnswerNow):
            share = float(model.straggler_width[0] / model.estimate[0])
            learn(trigger, sample, (by_lag, 3 * by_lag, 12 * by_lag), share)


@examples(12)
@given(st.data())
def test_a_restored_trigger_continues_as_the_uninterrupted_one(data):
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    before = data.draw(st.integers(0, 420), "slots before")
    measure = data.draw(st.sampled_from(MEASURES), "measure")
    sources = data.draw(st.sampled_from([1, 2, 3]), "sources")
    max_wait = data.draw(st.sampled_from([None, 4]), "max_wait")
    target = AccuracyTarget(0.1, 0.9)
    whole = World(EarlyTrigger(sources, GRID, SLOTS, target, measure, max_wait_slots=max_wait), seed)
    for _ in range(before):
        whole.step()
    state = packed(whole.trigger)
    again = World(unpacked(state), 0)
    again.rng.bit_generator.state = whole.rng.bit_generator.state
    again.silent, again.decisions = list(whole.silent), list(whole.decisions)
    assert packed(again.trigger) == state
    for _ in range(130):
        whole.step()
        again.step()
    assert again.decisions == whole.decisions
    assert packed(again.trigger) == packed(whole.trigger)


@pytest.mark.nightly
def test_the_state_does_not_grow_with_time():
    world = World(EarlyTrigger(3, GRID, SLOTS, AccuracyTarget(), "mean"), 1)
    sizes = []
    for _ in range(4):
        for _ in range(500):
            world.step()
        sizes.append(len(packed(world.trigger)))
    record = 6 * 3 * 150 * 8  # six offsets, three queues of at most 150 floats each
    assert sizes[-1] < 3 * GRID.lags * 18 + record + 4000
    assert sizes[-1] < 1.1 * sizes[-2]


@examples(40)
@given(st.data())
def test_damaged_state_is_refused(data):
    state = bytearray(packed(EarlyTrigger(2, GRID, SLOTS, AccuracyTarget(), "sum")))
    state[data.draw(st.integers(0, len(state) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises((CorruptSynopsis, UnsupportedVersion)):
        unpacked(bytes(state))


@pytest.mark.parametrize(
    ("number", "value"), [(0, 3), (1, [20, 5, 91]), (1, [20, 5]), (2, 0), (4, "median"), (5, "soon")]
)
def test_an_inconsistent_state_is_refused(number, value):
    state = EarlyTrigger(2, GRID, SLOTS, AccuracyTarget(), "sum").to_state()
    state.numbers[number] = value
    with pytest.raises(CorruptSynopsis):
        EarlyTrigger.from_state(state)


def test_a_state_without_an_array_is_refused():
    state = EarlyTrigger(2, GRID, SLOTS, AccuracyTarget(), "sum").to_state()
    del state.components["triangle"].arrays["sums"]
    with pytest.raises(CorruptSynopsis):
        EarlyTrigger.from_state(state)
