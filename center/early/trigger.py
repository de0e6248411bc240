"""Decides when a window is answered early, as a deterministic state machine.

The decision about a window is to `AnswerNow` or to `Wait` until a slot. A timer must ask again at that slot: no event
may arrive by then, which Algorithms 1 and 2 of the Aion paper do not handle. A window is decided as a whole. Closing
each sub-stream at its own deadline, as the paper does, drops a third of the events although the answer is not due yet.

The target is met when sampling and stragglers together fit: width² = sampling² + stragglers² ≤ (error·|estimate|)².
The sampling rate is set before the window begins, and edges do not keep events that were not sampled. Waiting can
therefore reduce the stragglers' part only; a window whose sample alone is too small is answered at once.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np

from center.early import named_arrays
from center.early.backtest import advance_slot
from center.early.calibration import DEFAULT_FACTOR, OFFSETS, Calibration
from center.early.estimate import WindowModel, WindowSample
from center.early.late_values import LateValues
from center.early.stragglers import SILENT_SUBSTREAMS, StragglerModel, Stragglers
from center.early.triangle import LONG, ArrivalTriangle
from center.early.trigger_batch import window_models
from center.early.value_history import ValueHistory
from edgewater.arrivals import SlotGrid
from edgewater.model.accuracy import AccuracyTarget, MeasureKind, check_measure
from edgewater.model.errors import CorruptSynopsis, InvalidInput
from edgewater.synopses import BoolArray, FloatArray, normal_quantile

STATE_KIND = "early-trigger"

NEGLIGIBLE_FAILURES = 0.45
"""Expected records, in units of the allowed failures, below which no more records are expected."""

SAMPLE_TOO_SMALL = "the sample of the window is too small for the error, however long the answer waits"
OUT_OF_TIME = "the staleness budget has expired"
NOTHING_EXPECTED = "no more records are expected from the reporting edges"
SILENCE_TOO_WIDE = "silent edges may hold more than the allowed error"


@dataclass(frozen=True, slots=True)
class TriggerPolicy:
    """Trade-offs of the decision. The defaults are measured in `docs/decisions/0007-early-answers.md`.

    Attributes:
        sampling_failures: share of 1 - confidence that sampling errors may use; the rest is for unmodelled errors.
        straggler_confidence: confidence of the stragglers' part of the interval.
        backoff: minimum wait until the next evaluation, relative to the time waited so far.
    """

    sampling_failures: float = 0.99
    straggler_confidence: float = 0.98
    backoff: float = 0.1


@dataclass(frozen=True, slots=True)
class AnswerNow:
    """The window's answer. Arrays are (1,).

    Attributes:
        sampling, straggler: half-widths; the caller adds those of sketches and of withheld values.
        met: the interval meets the target. If not, `reason` is why the window is answered nevertheless.
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
    """Decide again at this slot."""

    until: int


Decision = AnswerNow | Wait


class EarlyTrigger:
    """The decision for one query without groups, or for one group, over `sources` strata (edges).

    Args:
        window_slots: length of the query's windows.
        target: of one group.
        max_wait_slots: slots after a window's end at which it is answered at the latest; None: no limit.
        horizon: lags that can occur, if fewer than the grid's.
    """

    def __init__(
        self,
        sources: int,
        grid: SlotGrid,
        window_slots: int,
        target: AccuracyTarget,
        measure: MeasureKind,
        *,
        max_wait_slots: int | None = None,
        policy: TriggerPolicy | None = None,
        horizon: int | None = None,
    ) -> None:
        if window_slots < 1:
            raise InvalidInput("window", window_slots, "at least one slot")
        check_measure(measure)
        if target.groups != 1:
            raise InvalidInput("groups", target.groups, "one group: each group has a trigger of its own")
        if max_wait_slots is not None and max_wait_slots < 0:
            raise InvalidInput("max_wait", max_wait_slots, "0 slots or more after the window's end")
        self.grid, self.window_slots, self.target, self.measure = grid, window_slots, target, measure
        self.policy = policy or TriggerPolicy()
        self.max_wait_slots = max_wait_slots
        self.triangle = ArrivalTriangle(sources, grid)
        self.triangle.horizon = min(grid.lags, horizon or grid.lags)
        self.model = StragglerModel(self.triangle)
        self.late = LateValues(sources, grid.lags)
        self.history = ValueHistory(sources)
        self.calibration = Calibration(tuple(o for o in OFFSETS if o < grid.lags // 2))
        self.slot = 0
        failures = (1 - target.confidence) * self.policy.sampling_failures
        self.quantile = normal_quantile(1 - failures)
        self.drifting_substreams = 0
        self._straggler_share = 0.02  # half-width relative to the estimate at recent answers

    def on_slot(self, arrived: FloatArray, reporting: BoolArray | None = None) -> None:
        """Advances time by one slot.

        Args:
            arrived: events that arrived in the slot, [source, lag].
            reporting: mask of the sources that have reported; default all.
        """
        self.triangle.advance(arrived, reporting)
        advance_slot([self], self.model, arrived)

    def rates(self, stragglers: Stragglers | None = None) -> FloatArray:
        """Returns the sampling rates that the window that begins now needs, [source, 1], in [0, 1].

        They are Eq. 8 of the Aion paper with n·N_e/N for n (the paper divides the window's n by a sub-stream's N,
        which makes the rate as many times too large as there are sub-streams), and with the delay distribution for its
        mean. Without history they are 1.

        Args:
            stragglers: the model's prediction for a window that ends now, if it is known already.
        """
        shape = self.history.mean.shape
        if self.measure == "count":
            return np.zeros(shape)
        if not self.history.windows.any() or not self.triangle.age.any():
            return np.ones(shape)
        stragglers = stragglers or self.model.predict(0, self.window_slots, lags_wanted=False)
        events = (stragglers.rate * self.window_slots)[:, None] * self.history.share
        punctual = self.triangle.distributions()[LONG][:, : self.window_slots].mean(axis=1)[:, None]
        means = self.history.mean
        spread = np.sqrt(self.history.inflated_variation()) * np.abs(means)
        # Where the range of values is not known, no size of the sample gives an interval; the estimate has its size.
        ends = np.stack(self.history.range)
        reach = np.maximum(np.where(np.isfinite(ends), ends - means, 0.0) * [[[-1]], [[1]]], 0.0)[:, None]
        reach = np.concatenate([reach, reach], axis=1)
        model = WindowModel(self.measure, events * punctual, means, spread, events, events, np.zeros(shape[1]), reach)
        allowed, straggler_width = (f * np.abs(model.estimate) for f in (self.target.error, self._straggler_share))
        sampling_width = np.sqrt(np.maximum(allowed**2 - straggler_width**2, 0.0))
        sizes = model.sizes(sampling_width, self.quantile)
        rates = np.where(model.arrived > 0, sizes / np.maximum(model.arrived, 1e-9), 1.0)
        return np.asarray(np.clip(rates, 0.0, 1.0))

    def decide(
        self,
        end_slot: int,
        sample: WindowSample,
        modelled: tuple[Stragglers, WindowModel] | None = None,
        *,
        earned: bool = True,
    ) -> Decision:
        """Decides about the window that ended at `end_slot`.

        Args:
            modelled: its `window_model`, if it is known already.
            earned: enough is known for an interval. If not, the window does not meet the target.
        """
        offset = self.slot - end_slot
        if offset < 0:
            return Wait(end_slot)
        stragglers, model = modelled or self.window_model(offset, sample)
        allowed = self.target.error * np.abs(model.estimate)
        sampling = model.sampling_width(sample.count, self.quantile)
        if earned and stragglers.known and model.is_within(self.target.error, sampling).all():
            return _answer(model, sampling)
        if stragglers.known and self._is_too_small(sample, model, allowed):
            return _answer(model, sampling, SAMPLE_TOO_SMALL)
        if self.max_wait_slots is not None and offset >= self.max_wait_slots:
            return _answer(model, sampling, OUT_OF_TIME)
        if self._expects_nothing(offset, stragglers, earned):
            return _answer(model, sampling, NOTHING_EXPECTED)
        if self._is_silence_too_wide(stragglers, model):
            return _answer(model, sampling, SILENCE_TOO_WIDE)
        until = self.slot + max(1, int(offset * self.policy.backoff))
        if self.triangle.is_young(self.grid.lags).any():  # what is known grows by age, not by the time waited
            until = min(until, (self.slot // self.grid.substream_slots + 1) * self.grid.substream_slots)
        if self.max_wait_slots is not None:
            until = min(until, end_slot + self.max_wait_slots)
        return Wait(until)

    def on_answered(
        self, sample: WindowSample, answer: AnswerNow, sums: tuple[FloatArray, FloatArray, FloatArray]
    ) -> None:
        """Learns from an answered window.

        Args:
            sums: count, Σv, Σv² of its sample, each [source, lag group].
        """
        self.history.learn(sample)
        self.late.learn(*sums, substreams=self.window_slots / self.grid.substream_slots)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.learn_straggler_share(float(np.max(answer.straggler / np.abs(answer.estimate))))

    def learn_straggler_share(self, share: float) -> None:
        """Learns the stragglers' half-width relative to the estimate at an answer; infinity or NaN: unknown."""
        share = min(share if math.isfinite(share) else 1.0, self.target.error / 2)
        self._straggler_share += 0.2 * (share - self._straggler_share)

    def to_state(self) -> bytes:
        """The whole state: about 17 bytes per source and lag, and at most 20 KB of calibration record."""
        numbers = {
            "grid": astuple(self.grid), "window_slots": self.window_slots, "target": astuple(self.target),
            "measure": self.measure, "max_wait_slots": self.max_wait_slots, "policy": astuple(self.policy),
            "slot": self.slot, "drifting_substreams": self.drifting_substreams,
            "straggler_share": self._straggler_share, "horizon": self.triangle.horizon,
        }  # fmt: skip
        arrays: named_arrays.Arrays = {}
        for name in ("triangle", "model", "late", "history", "calibration"):
            arrays |= named_arrays.with_prefix(name, getattr(self, name).to_state())
        return named_arrays.pack(STATE_KIND, numbers, arrays)

    @classmethod
    def from_state(cls, state: bytes) -> EarlyTrigger:
        """Returns a trigger that continues exactly as the one whose `to_state` this is.

        Raises:
            CorruptSynopsis, UnsupportedVersion.
        """
        numbers, arrays = named_arrays.unpack(STATE_KIND, state)
        try:
            grid, target = SlotGrid(*numbers["grid"]), AccuracyTarget(*numbers["target"])
            triangle = ArrivalTriangle.from_state(named_arrays.without_prefix("triangle", arrays), grid)
            result = cls(
                triangle.sources, grid, int(numbers["window_slots"]), target, numbers["measure"],
                max_wait_slots=numbers["max_wait_slots"], policy=TriggerPolicy(*numbers["policy"]),
            )  # fmt: skip
            triangle.horizon = int(numbers["horizon"])
            result.slot, result.drifting_substreams = int(numbers["slot"]), int(numbers["drifting_substreams"])
            result._straggler_share = float(numbers["straggler_share"])
        except (KeyError, TypeError, ValueError, InvalidInput) as exc:
            raise CorruptSynopsis(f"{STATE_KIND} state cannot be read: {type(exc).__name__}: {exc}") from exc
        result.triangle, result.model = triangle, StragglerModel(triangle)
        for name in ("model", "late", "history"):
            getattr(result, name).restore(named_arrays.without_prefix(name, arrays))
        result.calibration = Calibration.from_state(named_arrays.without_prefix("calibration", arrays))
        return result

    def window_model(self, offset: int, sample: WindowSample) -> tuple[Stragglers, WindowModel]:
        """Returns the stragglers and the model of a window `offset` slots after its end."""
        stragglers, model = window_models([self], self.model, offset, sample)
        return stragglers.of(0), model

    def _is_too_small(self, sample: WindowSample, model: WindowModel, allowed: FloatArray) -> bool:
        """Whether the sample will be too small even when all stragglers have arrived, sampled at the same rate."""
        if self.measure == "count":
            return False
        arrived = sample.arrived.sum(axis=0)
        rate = sample.count.sum(axis=0) / np.maximum(arrived, 1.0)
        if not (rate < 1).any():
            return False
        expected = np.maximum(model.events - sample.arrived, 0.0)
        width = model.sampling_width(sample.count + rate * expected, self.quantile)
        return bool(((rate < 1) & (arrived > 0) & (width > allowed)).any())

    def _expects_nothing(self, offset: int, stragglers: Stragglers, earned: bool) -> bool:
        """Whether the probability of one more event is within the allowed failures, or no longer lags are resolved.

        A window without an interval may get one while its sources are young: it then waits although nothing is
        expected.
        """
        if offset + 1 >= self.grid.lags:
            return True
        if not stragglers.known or (not earned and self.triangle.is_young(self.grid.lags).any()):
            return False
        expected = float(stragglers.expected[self.triangle.silent_slots == 0].sum())
        return expected < NEGLIGIBLE_FAILURES * (1 - self.target.confidence)

    def _is_silence_too_wide(self, stragglers: Stragglers, model: WindowModel) -> bool:
        """Whether the interval of silent sources alone is wider than the target, so that waiting for others is vain."""
        silent = self.triangle.silent_slots > 0
        if not silent.any():
            return False
        if (self.model.weight[silent] < SILENT_SUBSTREAMS).any():
            return True
        width = max(DEFAULT_FACTOR, self.quantile) * float(np.sqrt((stragglers.deviation[silent] ** 2).sum()))
        return width > 0.95 * self.target.error * float(model.size.sum())


def _answer(model: WindowModel, sampling: FloatArray, reason: str = "") -> AnswerNow:
    return AnswerNow(model.estimate, sampling, model.straggler_width, model.size, not reason, reason)
