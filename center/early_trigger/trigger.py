"""When a window may be answered: the decision, as a deterministic state machine.

Time, arrivals and samples come in; the verdict on a window is `Answer` or `Wait` (until a slot, by a timer: nothing
fires when no event arrives; corrections.md, Aion 11). A window is closed as a whole, never by sub-streams, whose own
deadlines throw away a third of the events (Aion 6).

The contract is met when sampling and stragglers together fit: width² = sampling² + stragglers² ≤ (error·|estimate|)².
The rate of the sample is set before the window begins, and an edge does not keep the events that it has passed over. So
waiting can narrow the stragglers' part only; a window whose sample is too small by itself is answered without it.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np

from center.early_trigger.batch import window_models
from center.early_trigger.calibration import OFFSETS, UNTRIED, Calibration
from center.early_trigger.estimate import Sampled, WindowModel
from center.early_trigger.late_values import LateValues
from center.early_trigger.rehearsal import pass_slot
from center.early_trigger.stragglers import StragglerModel, Stragglers
from center.early_trigger.triangle import LONG, ArrivalTriangle
from center.early_trigger.value_history import ValueHistory
from edgewater.accuracy import AccuracyTarget, MeasureKind, check_measure
from edgewater.arrivals import SlotGrid
from edgewater.errors import CorruptSynopsis, InvalidInput
from edgewater.synopses import BoolArray, FloatArray, normal_quantile
from edgewater.synopses.encoding import named_arrays as state


@dataclass(frozen=True, slots=True)
class Policy:
    """Trade-offs of the decision; the defaults are what `docs/decisions/0006-watermarks.md` measured.

    Attributes:
        sampling_failures: part of 1 - confidence that sampling may use up; the rest is for what no model foresees.
        straggler_confidence: of the straggler part of the interval.
        patience: least share of waits: the next look is after this part of the time waited so far.
    """

    sampling_failures: float = 0.99
    straggler_confidence: float = 0.98
    patience: float = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """The window's answer. Arrays are per group.

    Attributes:
        sampling, straggler: half-widths; the caller adds those of sketches and of withheld values.
        met: the contract is kept by the interval. False: time was up, or waiting can bring no more.
    """

    estimate: FloatArray
    sampling: FloatArray
    straggler: FloatArray
    size: FloatArray
    met: bool
    reason: str = ""

    @property
    def half_width(self) -> FloatArray:
        return np.hypot(self.sampling, self.straggler)


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again at this slot."""

    until: int


Verdict = Answer | Wait

SAMPLE_TOO_SMALL = "the edges were asked for too small a sample"


class Watermark:
    """One query's decision over `sources` strata (edges, or sources of edges).

    Args:
        window_slots: length of the query's windows.
        target: of one group; each group of a query has a watermark of its own.
        latest_slots: after a window's end the answer is given at the latest so many slots later; None: no budget.
    """

    def __init__(
        self,
        sources: int,
        grid: SlotGrid,
        window_slots: int,
        target: AccuracyTarget,
        measure: MeasureKind,
        *,
        latest_slots: int | None = None,
        policy: Policy | None = None,
    ) -> None:
        if window_slots < 1:
            raise InvalidInput("window", window_slots, "at least one slot")
        check_measure(measure)
        if target.groups != 1:
            raise InvalidInput("groups", target.groups, "one group: each has a watermark of its own")
        if latest_slots is not None and latest_slots < 0:
            raise InvalidInput("latest", latest_slots, "0 slots or more after the window's end")
        self.grid, self.window_slots, self.target, self.measure = grid, window_slots, target, measure
        self.policy = policy or Policy()
        self.latest_slots = latest_slots
        self.triangle = ArrivalTriangle(sources, grid)
        self.model = StragglerModel(self.triangle)
        self.late = LateValues(sources, grid.lags)
        self.history = ValueHistory(sources, 1)
        self.calibration = Calibration(tuple(o for o in OFFSETS if o < grid.lags // 2))
        self.slot = 0
        failures = (1 - target.confidence) * self.policy.sampling_failures
        self.quantile = normal_quantile(1 - failures)
        self.drifting = 0
        self._straggler_share = 0.02  # half-width relative to the estimate, as lately seen at the answer

    def on_slot(self, arrived: FloatArray, reporting: BoolArray | None = None) -> None:
        """A slot has passed: `arrived` events by [source, lag]; `reporting`: the sources that can be heard."""
        self.triangle.advance(arrived, reporting)
        pass_slot([self], self.model)

    def on_return(self, source: int, arrived: FloatArray) -> None:
        """A silent source tells what it had: `arrived` by [slot of its silence, lag]."""
        self.triangle.catch_up(source, arrived)

    def rates(self, ahead: Stragglers | None = None) -> FloatArray:
        """The part of the events that the window which begins now needs: Eq. 8 with n·N_e/N, and F for E[D]
        (corrections.md, Aion 3, 4). All of them without history (Aion 10).

        Args:
            ahead: what the model predicts of a window that ends now, if it is known.

        Returns:
            [source, group], in [0, 1].
        """
        shape = self.history.mean.shape
        if self.measure == "count":
            return np.zeros(shape)
        if not self.history.windows or not self.triangle.age.any():
            return np.ones(shape)
        ahead = ahead or self.model.predict(0, self.window_slots, lags_wanted=False)
        events = (ahead.rate * self.window_slots)[:, None] * self.history.share
        punctual = self.triangle.distributions()[LONG][:, : self.window_slots].mean(axis=1)[:, None]
        means = self.history.mean
        spread = np.sqrt(self.history.cautious_variation()) * np.abs(means)
        model = WindowModel(self.measure, events * punctual, means, spread, events, events, np.zeros(shape[1]))
        room = self._sampling_room(model.estimate, self._straggler_share * np.abs(model.estimate))
        sizes = model.sizes(room, self.quantile)
        rates = np.where(model.arrived > 0, sizes / np.maximum(model.arrived, 1e-9), 1.0)
        return np.asarray(np.clip(rates, 0.0, 1.0))

    def judge(self, end_slot: int, sampled: Sampled, modelled: tuple[Stragglers, WindowModel] | None = None) -> Verdict:
        """What to do about the window that ended at `end_slot`, now. `modelled`: its `window_model`, if it is known."""
        offset = self.slot - end_slot
        if offset < 0:
            return Wait(end_slot)
        stragglers, model = modelled or self.window_model(offset, sampled)
        estimate = model.estimate
        allowed = self.target.error * np.abs(estimate)
        sampling = model.sampling_width(sampled.count, self.quantile)
        if stragglers.known and (np.hypot(sampling, model.straggler_width) <= allowed).all():
            return _answer(model, sampling)
        if stragglers.known and self._is_too_small(sampled, model, allowed):
            return _answer(model, sampling, SAMPLE_TOO_SMALL)
        if self.latest_slots is not None and offset >= self.latest_slots:
            return _answer(model, sampling, "the staleness budget is spent")
        if stragglers.known and self._nothing_to_wait_for(offset, stragglers):
            return _answer(model, sampling, "no more is expected from the edges that can be heard")
        if stragglers.known and self._silence_decides(stragglers, model):
            return _answer(model, sampling, "edges that cannot be heard may hold more than the error")
        step = max(1, int(offset * self.policy.patience))
        until = self.slot + step
        if self.latest_slots is not None:
            until = min(until, end_slot + self.latest_slots)
        return Wait(until)

    def on_answered(self, sampled: Sampled, answer: Answer, sums: tuple[FloatArray, FloatArray, FloatArray]) -> None:
        """Learns from an answered window; `sums`: count, Σv, Σv² of its sample by [source, lag group]."""
        self.history.learn(sampled)
        self.late.learn(*sums, substreams=self.window_slots / self.grid.substream_slots)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.learn_share(float(np.max(answer.straggler / np.abs(answer.estimate))))

    def learn_share(self, share: float) -> None:
        """Stragglers' half-width relative to the estimate, as it was at an answer; infinite or NaN: unknown."""
        share = min(share if math.isfinite(share) else 1.0, self.target.error / 2)
        self._straggler_share += 0.2 * (share - self._straggler_share)

    def to_state(self) -> bytes:
        """All of it: 17 bytes per source and lag, or a few more, and 20 KB at most of predictions' record."""
        numbers = {
            "grid": astuple(self.grid), "window_slots": self.window_slots, "target": astuple(self.target),
            "measure": self.measure, "latest_slots": self.latest_slots, "policy": astuple(self.policy),
            "slot": self.slot, "drifting": self.drifting, "straggler_share": self._straggler_share,
        }  # fmt: skip
        return state.pack(numbers, {
            **state.with_prefix("triangle", self.triangle.to_state()),
            **state.with_prefix("model", self.model.to_state()),
            **state.with_prefix("late", self.late.to_state()),
            **state.with_prefix("history", self.history.to_state()),
            **state.with_prefix("calibration", self.calibration.to_state()),
        })  # fmt: skip

    @classmethod
    def from_state(cls, given: bytes) -> Watermark:
        """Goes on exactly as the one whose `to_state` it is.

        Raises:
            CorruptSynopsis, UnsupportedVersion.
        """
        numbers, arrays = state.unpack(given)
        try:
            grid, target = SlotGrid(*numbers["grid"]), AccuracyTarget(*numbers["target"])
            triangle = ArrivalTriangle.from_state(state.without_prefix("triangle", arrays), grid)
            result = cls(
                triangle.sources, grid, int(numbers["window_slots"]), target, numbers["measure"],
                latest_slots=numbers["latest_slots"], policy=Policy(*numbers["policy"]),
            )  # fmt: skip
            result.slot, result.drifting = int(numbers["slot"]), int(numbers["drifting"])
            result._straggler_share = float(numbers["straggler_share"])
            result.history.restore(state.without_prefix("history", arrays))
        except (KeyError, TypeError, ValueError, InvalidInput) as exc:
            raise CorruptSynopsis(f"watermark state cannot be read: {type(exc).__name__}: {exc}") from exc
        result.triangle, result.model = triangle, StragglerModel(triangle)
        result.model.restore(state.without_prefix("model", arrays))
        result.late.restore(state.without_prefix("late", arrays))
        result.calibration = Calibration.from_state(state.without_prefix("calibration", arrays))
        return result

    def window_model(self, offset: int, sampled: Sampled) -> tuple[Stragglers, WindowModel]:
        """`together.window_models`, of this one."""
        stragglers, model = window_models([self], self.model, offset, sampled)
        return stragglers.of(0), model

    def _sampling_room(self, estimate: FloatArray, straggler_width: FloatArray) -> FloatArray:
        allowed = self.target.error * np.abs(estimate)
        return np.asarray(np.sqrt(np.maximum(allowed**2 - straggler_width**2, 0.0)))

    def _is_too_small(self, sampled: Sampled, model: WindowModel, allowed: FloatArray) -> bool:
        """Whether the sample will be too small even when all stragglers have come, sampled as the others were."""
        if self.measure == "count":
            return False
        arrived = sampled.arrived.sum(axis=0)
        rate = sampled.count.sum(axis=0) / np.maximum(arrived, 1.0)
        expected = np.maximum(model.events - sampled.arrived, 0.0)
        width = model.sampling_width(sampled.count + rate * expected, self.quantile)
        return bool(((rate < 1) & (arrived > 0) & (width > allowed)).any())

    def _nothing_to_wait_for(self, offset: int, stragglers: Stragglers) -> bool:
        if offset + 1 >= self.grid.lags:
            return True
        # A chance of one more event that the failures allowed have room for.
        expected = float(stragglers.expected[self.triangle.behind == 0].sum())
        return expected < 0.45 * (1 - self.target.confidence)

    def _silence_decides(self, stragglers: Stragglers, model: WindowModel) -> bool:
        """Whether what silent edges may hold is by itself wider than the target: the others' stragglers cannot help."""
        silent = self.triangle.behind > 0
        if not silent.any():
            return False
        width = max(UNTRIED, self.quantile) * float(np.sqrt((stragglers.deviation[silent] ** 2).sum()))
        return width > 0.95 * self.target.error * float(model.size.sum())


def _answer(model: WindowModel, sampling: FloatArray, reason: str = "") -> Answer:
    """Args: reason: why it is given though it is not met; empty: it is met."""
    return Answer(model.estimate, sampling, model.straggler_width, model.size, not reason, reason)
