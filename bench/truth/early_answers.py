"""Early answers: production's monitors, ledger and estimator under a virtual clock (`sim.early_answers.engine`).

A trial is a window: its first answer, if it is given before the window is complete. Two promises are counted: that the
stated interval contains the final value, and that the answer is within the error if it states that the contract is met.
All measures and confidences of one kind of data are queries over the same edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from bench.truth.arrivals import FLIP_WINDOWS, SHIFT_WINDOWS, LateRecords
from bench.truth.cases import CONFIDENCES, Case, State, Tallies, Tally
from edgewater.arrivals.targets import AccuracyTarget, MeasureKind
from sim.early_answers.engine import EarlyAnswerSimulation, WindowOutcome

ERROR, SUBSTREAM_MS = 0.05, 500
COLD_WINDOWS, WARM_UP = 10, 10
"""Windows of each cold run, and windows before the steady state."""
CHANGED_WINDOWS = 4
"""Windows after a change that count as changed."""

WEAK = "[early answers](explanation/early-answers.md#where-it-is-weak)"
_MEASURES = [f"early {measure}{met}" for measure in ("count", "sum", "mean") for met in ("", ", met")]

Query = tuple[MeasureKind, float]


@dataclass(frozen=True, slots=True)
class _Data:
    """A workload by name.

    Attributes:
        disorder_ms: the edges' watermark delay and the query's lateness: about the longest delay of a run.
        change_every: windows between changes; 0: none.
        rate: the part of the records that edges sample.
        delays_ms: declared delays.
        watched: number of windows for which another query was registered before.
        listed: the states whose coverage is below its band, as `WEAK` says.
    """

    name: str
    delays: str
    disorder_ms: int
    values: str = "gamma"
    event: str = ""
    change_every: int = 0
    rate: float = 1.0
    delays_ms: int | None = None
    watched: int = 0
    listed: tuple[State, ...] = ()

    @property
    def queries(self) -> Iterator[list[Query]]:
        """The measures and confidences, by what their reports contain: counts need no values, and no sample."""
        kinds: list[list[MeasureKind]] = [["sum", "mean"]] if self.rate < 1 else [["count"], ["sum", "mean"]]
        for measures in kinds:
            yield [(measure, confidence) for measure in measures for confidence in CONFIDENCES]

    @property
    def states(self) -> Iterator[tuple[State, Callable[..., Tallies]]]:
        """Yields the states that differ. Before the first answer, edges do not sample and delays do not shift."""
        if self.rate == 1 and self.event != "shifts":
            yield "cold", _cold
        if not self.watched:
            yield "steady", _steady
        if self.change_every:
            yield "after a change", _changed

    def outcomes(self, queries: Sequence[Query], windows: int, seed: int) -> list[list[WindowOutcome]]:
        """Returns the windows' outcomes by query."""
        targets = [(AccuracyTarget(ERROR, confidence), measure) for measure, confidence in queries]
        records = LateRecords(self.delays, self.values, self.event, self.watched + windows, seed)
        return EarlyAnswerSimulation(
            records,  # type: ignore[arg-type]
            *targets[0], 0.0, substream_ms=SUBSTREAM_MS, sampling=self.rate < 1, fixed_rate=self.rate,
            disorder_ms=self.disorder_ms, delays_ms=self.delays_ms, watched=self.watched, others=targets[1:],
        ).run_each()  # fmt: skip


DATA = (
    _Data("gamma and lognormal delays", "gamma and lognormal", 20_000, listed=("cold",)),
    _Data("Weibull delays", "Weibull", 7_000),
    _Data("exponential delays", "exponential", 3_000),
    _Data("delays declared", "at most 900 ms", 3_000, delays_ms=900),
    _Data("delays learnt by another query", "Weibull", 3_000, watched=20),
    _Data("diurnal ×50", "Weibull", 7_000, event="diurnal"),
    _Data("Pareto values", "exponential", 3_000, "Pareto"),
    _Data("95 % zeros", "exponential", 3_000, "zeros"),
    _Data("normal sampled", "exponential", 3_000, "normal", rate=0.1),
    _Data("lognormal σ=2 sampled", "exponential", 3_000, "lognormal", rate=0.1),
    _Data("Pareto 2.1 sampled", "exponential", 3_000, "Pareto", rate=0.1),
    _Data("95 % zeros sampled", "exponential", 3_000, "zeros", rate=0.1),
    _Data("99.5 % zeros sampled", "exponential", 3_000, "99.5 % zeros", rate=0.1),
    _Data("one outlier sampled", "exponential", 3_000, "one outlier", rate=0.1, listed=("steady",)),
    _Data("outages of cells", "exponential", 4_000, event="outages"),
    _Data("batches", "exponential", 3_500, event="batches"),
    _Data("polls of 100 ms", "exponential", 3_000, event="polls of 100 ms"),
    _Data("polls of 50 ms", "exponential", 3_000, event="polls of 50 ms"),
    _Data(
        "flipping correlation",
        "exponential",
        8_000,
        event="flips",
        change_every=FLIP_WINDOWS,
        listed=("after a change",),
    ),
    _Data("shifting delays", "exponential", 8_000, event="shifts", change_every=SHIFT_WINDOWS),
)


def cases() -> Iterator[Case]:
    for data in DATA:
        for state, run in data.states:
            yield Case(
                f"{data.name}, {state}", data.name, state, "production cores", partial(run, data), trials=300,
                smoke=2 if state == "cold" and data.delays == "gamma and lognormal" else 0,
                listed=dict.fromkeys(_MEASURES, WEAK) if state in data.listed else {},
            )  # fmt: skip


def _cold(data: _Data, seed: int, trials: int) -> Tallies:
    result: Tallies = {}
    windows = min(COLD_WINDOWS, trials)
    for queries in data.queries:
        for run in range(-(-trials // windows)):
            for query, outcomes in zip(queries, data.outcomes(queries, windows, 1_000 * seed + run), strict=True):
                _count(result, query, outcomes)
    return result


def _steady(data: _Data, seed: int, trials: int) -> Tallies:
    result: Tallies = {}
    for queries in data.queries:
        for query, outcomes in zip(queries, data.outcomes(queries, trials + WARM_UP, seed), strict=True):
            _count(result, query, outcomes[WARM_UP:])
    return result


def _changed(data: _Data, seed: int, trials: int) -> Tallies:
    every, result = data.change_every, Tallies()
    windows = (trials // CHANGED_WINDOWS + 1) * every
    after = [i for i in range(every, windows) if i % every < CHANGED_WINDOWS]
    for queries in data.queries:
        for query, outcomes in zip(queries, data.outcomes(queries, windows, seed), strict=True):
            _count(result, query, [outcomes[i] for i in after])
    return result


def _count(result: Tallies, query: Query, outcomes: Sequence[WindowOutcome]) -> None:
    """Adds the early answers to one query."""
    measure, confidence = query
    interval = result.setdefault((f"early {measure}", confidence), Tally())
    met = result.setdefault((f"early {measure}, met", confidence), Tally())
    for outcome in outcomes:
        if not outcome.early:
            continue
        estimate, half, truth = (float(x[0]) for x in (outcome.estimate, outcome.half_width, outcome.truth))
        slack = 1e-9 * abs(truth)
        interval.note(estimate - half, estimate + half, truth, slack)
        if outcome.met:
            within = ERROR * abs(truth)
            met.note(truth - within, truth + within, estimate, slack)
