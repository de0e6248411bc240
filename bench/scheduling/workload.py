"""Arrivals of many queries at a node: batches of records, and watermarks that are delayed by the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.scheduling.costs import Operator
from bench.scheduling.queries import QueryProfile
from edgewater.synopses import FloatArray

BENCHMARKS = ("ysb", "lrb", "nyt")
DELAYS = ("uniform", "zipf", "exponential", "drifting")
COSTS = ("equal", "mixed")
MAX_DELAY_MS = 1_000
ZIPF = 0.99
BATCH_MS = 200.0
"""Records arrive in batches of this much time, as an edge's decoder makes them."""
BURSTS = 4.0
"""Shape of the gamma distribution of a batch's size: a coefficient of variation of one half."""
MAX_BATCH = 6.0
"""Maximum size, as a multiple of the mean: sources cut larger batches, of which there is one in ten million."""
MIXED_SIGMA = 1.0
"""Standard deviation of the logarithm of the queries' cost factors, with --costs mixed."""
JOIN_INPUTS = 3

FILTER, PARSE, ENRICH, AGGREGATE, JOIN = 0.15, 0.25, 0.30, 0.30, 0.45
"""Relative costs per record that reaches the operator."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A benchmark's query: relative costs, selectivities and windows.

    Attributes:
        operators: (relative cost, selectivity, keeps records until the window fires).
        period_ms: distance of the window ends.
        firing: relative cost of a firing, in records' worth of the whole pipeline.
    """

    name: str
    operators: tuple[tuple[float, float, bool], ...]
    period_ms: float
    inputs: int = 1
    firing: float = 100.0


_VIEWS = ((PARSE, 1.0, False), (FILTER, 1 / 3, False), (ENRICH, 1.0, False), (AGGREGATE, 0.0, False))
_ACCIDENTS = ((PARSE, 1.0, False), (FILTER, 0.3, False), (AGGREGATE, 0.0, False))
_TOLLS = ((PARSE, 1.0, False), (ENRICH, 0.8, False), (JOIN, 0.0, True))
_RIDES = ((PARSE, 1.0, False), (FILTER, 0.9, False), (ENRICH, 1.0, False), (AGGREGATE, 0.0, False))
PIPELINES: dict[str, tuple[Pipeline, ...]] = {
    # Views out of all events, projection, join with the table of campaigns, count per campaign and window.
    "ysb": (Pipeline("ysb", _VIEWS, 10_000),),
    # Accidents (sliding window of 5 s every 3 s) and tolls (a join of position reports, speeds and accidents).
    "lrb": (Pipeline("accidents", _ACCIDENTS, 3_000), Pipeline("tolls", _TOLLS, 3_000, JOIN_INPUTS, 400.0)),
    # Stateless cleaning, then a sliding window of 2 s every 1 s.
    "nyt": (Pipeline("rides", _RIDES, 1_000),),
}


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """The work of a node.

    Attributes:
        share: offered work as a share of one core's time.
        rate: records per second and query.
        seconds: simulated time in which records arrive.
    """

    benchmark: str = "ysb"
    queries: int = 60
    share: float = 0.94
    delays: str = "uniform"
    costs: str = "equal"
    rate: float = 10_000.0
    seconds: float = 120.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """Records or (with `watermark_ms`) a watermark of one input of a query, which arrive at `at_ms`."""

    at_ms: float
    query: int
    number: int
    records: float
    watermark_ms: float | None = None


def profiles(load: OfferedLoad) -> list[QueryProfile]:
    """Returns the queries. Their costs are such that all queries together need `load.share` of a core."""
    rng = np.random.default_rng([load.seed, 1])
    kinds = PIPELINES[load.benchmark]
    factors = np.exp(rng.normal(0.0, MIXED_SIGMA, load.queries)) if load.costs == "mixed" else np.ones(load.queries)
    made = []
    for index in range(load.queries):
        kind = kinds[index % len(kinds)]
        operators = [
            Operator(cost * factors[index], selectivity, stores) for cost, selectivity, stores in kind.operators
        ]
        offset_ms = float(rng.integers(0, int(kind.period_ms)))
        firing_ms = kind.firing * factors[index] * _per_record(operators)
        made.append(QueryProfile(f"{kind.name}-{index}", operators, kind.period_ms, offset_ms, kind.inputs, firing_ms))
    per_ms = math.fsum(_per_record(q.operators) * load.rate / 1e3 + q.firing_ms / q.period_ms for q in made)
    scale = load.share / per_ms
    return [
        replace(
            q, operators=[replace(o, cost_ms=o.cost_ms * scale) for o in q.operators], firing_ms=q.firing_ms * scale
        )
        for q in made
    ]


def _per_record(operators: Sequence[Operator]) -> float:
    cost, kept = 0.0, 1.0
    for operator in operators:
        cost += kept * operator.cost_ms
        kept *= operator.selectivity
    return cost


def draw_delays(name: str, count: int, rng: np.random.Generator) -> FloatArray:
    """Returns the delays of successive watermarks, float64, ms.

    Uniform up to a second; Zipf(0.99) over 1 … 1000; exponential with a mean of 200; drifting: exponential with a mean
    that moves between 100 and 500.
    """
    if name == "uniform":
        return rng.uniform(0, MAX_DELAY_MS, count)
    if name == "zipf":
        return _ZIPF_QUANTILES(rng.random(count))
    if name == "exponential":
        return rng.exponential(200.0, count)
    return rng.exponential(300.0 + 200.0 * np.sin(np.arange(count) * (2 * np.pi / 300)), count)


def _zipf_quantiles() -> Callable[[FloatArray], FloatArray]:
    rank = np.arange(1, MAX_DELAY_MS + 1)
    cumulated = np.cumsum(rank**-ZIPF)
    cumulated /= cumulated[-1]
    return lambda u: 1.0 + np.searchsorted(cumulated, u).astype(float)


_ZIPF_QUANTILES = _zipf_quantiles()


def arrivals(load: OfferedLoad, queries: list[QueryProfile]) -> Iterator[Arrival]:
    """Yields all arrivals in order of time. The watermarks of an input never overtake each other."""
    rng = np.random.default_rng([load.seed, 2])
    at, query, number, records, watermark = [], [], [], [], []
    duration_ms = load.seconds * 1e3
    for index, profile in enumerate(queries):
        ends = np.arange(profile.next_end_ms(0.0), duration_ms, profile.period_ms)
        for each in range(profile.inputs):
            begin = rng.uniform(0, BATCH_MS)
            times = np.arange(begin, duration_ms, BATCH_MS)
            mean = load.rate * BATCH_MS / 1e3 / profile.inputs
            sizes = np.minimum(np.rint(rng.gamma(BURSTS, mean / BURSTS, len(times))), np.floor(MAX_BATCH * mean))
            swept_at = np.maximum.accumulate(ends + draw_delays(load.delays, len(ends), rng))
            at += [times, swept_at]
            records += [sizes, np.zeros(len(ends))]
            watermark += [np.full(len(times), np.nan), ends]
            query.append(np.full(len(times) + len(ends), index))
            number.append(np.full(len(times) + len(ends), each))
    columns = [np.concatenate(column) for column in (at, query, number, records, watermark)]
    order = np.argsort(columns[0], kind="stable")
    for when, which, each, size, sweep in zip(*(column[order].tolist() for column in columns), strict=True):
        yield Arrival(when, which, each, size, None if sweep != sweep else sweep)
