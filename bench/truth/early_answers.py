"""Early answers: production's monitors, ledger and estimator under a virtual clock (`sim.early_answers.engine`).

A trial is a window: its first answer, if it is given before the window is complete. Two promises are counted: that the
stated interval contains the final value, and that the answer is within the error if it states that the contract is met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from bench.truth.arrivals import FLIP_WINDOWS, SHIFT_WINDOWS, LateRecords
from bench.truth.cases import CONFIDENCES, Case, State, Tallies, Tally
from edgewater.accuracy import AccuracyTarget, MeasureKind
from sim.early_answers.engine import EarlyAnswerSimulation, WindowOutcome

ERROR, SUBSTREAM_MS, DISORDER_MS = 0.05, 200, 20_000
COLD_WINDOWS, WARM_UP = 10, 10
"""Windows of each cold run, and windows before the steady state."""
CHANGED_WINDOWS = 4
"""Windows after a change that count as such."""
MEASURES: tuple[MeasureKind, ...] = ("count", "sum", "mean")


@dataclass(frozen=True, slots=True)
class _Data:
    """A workload by name.

    Attributes:
        change_every: windows between changes; 0: none.
        rate: the part of the records that edges sample.
    """

    name: str
    delays: str
    values: str = "gamma"
    event: str = ""
    change_every: int = 0
    rate: float = 1.0

    @property
    def measures(self) -> Sequence[MeasureKind]:
        """A count needs no sample."""
        return MEASURES if self.rate == 1 else ("sum", "mean")

    def records(self, windows: int, seed: int) -> LateRecords:
        return LateRecords(self.delays, self.values, self.event, windows, seed)


DATA = (
    _Data("gamma and lognormal delays", "gamma and lognormal"),
    _Data("Weibull delays", "Weibull"),
    _Data("exponential delays", "exponential"),
    _Data("diurnal ×50", "Weibull", event="diurnal"),
    _Data("Pareto values", "exponential", "Pareto"),
    _Data("95 % zeros", "exponential", "zeros"),
    _Data("normal sampled", "exponential", "normal", rate=0.1),
    _Data("lognormal σ=2 sampled", "exponential", "lognormal", rate=0.1),
    _Data("Pareto 2.1 sampled", "exponential", "Pareto", rate=0.1),
    _Data("95 % zeros sampled", "exponential", "zeros", rate=0.1),
    _Data("99.5 % zeros sampled", "exponential", "99.5 % zeros", rate=0.1),
    _Data("one outlier sampled", "exponential", "one outlier", rate=0.1),
    _Data("outages of cells", "exponential", event="outages"),
    _Data("batches", "exponential", event="batches"),
    _Data("flipping correlation", "exponential", event="flips", change_every=FLIP_WINDOWS),
    _Data("shifting delays", "exponential", event="shifts", change_every=SHIFT_WINDOWS),
)


def cases() -> Iterator[Case]:
    for data in DATA:
        states: dict[State, Callable[..., Tallies]] = {"cold": _cold, "steady": _steady}
        if data.change_every:
            states["after a change"] = _changed
        for state, run in states.items():
            yield Case(
                f"{data.name}, {state}", data.name, state, "production cores", partial(run, data), trials=300,
                smoke=2 if state == "cold" and data.delays == "gamma and lognormal" else 0,
            )  # fmt: skip


def _cold(data: _Data, seed: int, trials: int) -> Tallies:
    def outcomes(measure: MeasureKind, confidence: float) -> Iterator[WindowOutcome]:
        windows = min(COLD_WINDOWS, trials)
        for run in range(-(-trials // windows)):
            yield from _simulated(data, data.records(windows, 1_000 * seed + run), measure, confidence)

    return _tallies(data.measures, outcomes)


def _steady(data: _Data, seed: int, trials: int) -> Tallies:
    def outcomes(measure: MeasureKind, confidence: float) -> Sequence[WindowOutcome]:
        return _simulated(data, data.records(trials + WARM_UP, seed), measure, confidence)[WARM_UP:]

    return _tallies(data.measures, outcomes)


def _changed(data: _Data, seed: int, trials: int) -> Tallies:
    def outcomes(measure: MeasureKind, confidence: float) -> Iterator[WindowOutcome]:
        every = data.change_every
        windows = (trials // CHANGED_WINDOWS + 1) * every
        for index, outcome in enumerate(_simulated(data, data.records(windows, seed), measure, confidence)):
            if index >= every and index % every < CHANGED_WINDOWS:
                yield outcome

    return _tallies(data.measures, outcomes)


def _simulated(data: _Data, records: LateRecords, measure: MeasureKind, confidence: float) -> list[WindowOutcome]:
    target = AccuracyTarget(ERROR, confidence)
    return EarlyAnswerSimulation(
        records, target, measure, 0.0, substream_ms=SUBSTREAM_MS, sampling=data.rate < 1, disorder_ms=DISORDER_MS,
        fixed_rate=data.rate,
    ).run()  # fmt: skip


def _tallies(
    measures: Sequence[MeasureKind],
    outcomes: Callable[[MeasureKind, float], Sequence[WindowOutcome] | Iterator[WindowOutcome]],
) -> Tallies:
    result: Tallies = {}
    for measure in measures:
        for confidence in CONFIDENCES:
            interval = result[f"early {measure}", confidence] = Tally()
            met = result[f"early {measure}, met", confidence] = Tally()
            for outcome in outcomes(measure, confidence):
                if not outcome.early:
                    continue
                estimate, half, truth = (float(x[0]) for x in (outcome.estimate, outcome.half_width, outcome.truth))
                slack = 1e-9 * abs(truth)
                interval.note(estimate - half, estimate + half, truth, slack)
                if outcome.met:
                    within = ERROR * abs(truth)
                    met.note(truth - within, truth + within, estimate, slack)
    return result
