"""The compared pairs: a synopsis, and a library's sketch with the same guarantee and size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datasketches
import ddsketch
import numpy as np

from edgewater.synopses import BloomFilter, CountMin, DDSketch, HyperLogLog, Kll, ReservoirSample

ALPHA, PRECISION, K, SAMPLE, DEPTH = 0.01, 12, 200, 1024, 5


@dataclass(frozen=True)
class Theirs:
    """A library's sketch.

    Attributes:
        add: inserts values in the fastest way: an array, or one call per item.
        takes_arrays: whether `add` takes an array.
    """

    library: str
    make: Callable[[], Any]
    add: Callable[[Any, np.ndarray], None]
    takes_arrays: bool


@dataclass(frozen=True)
class Pair:
    """A synopsis and its peer; `goal_per_s`: the goal of the synopsis in updates per second on one core."""

    name: str
    ours: Callable[[], Any]
    theirs: Theirs | None
    values: Callable[[np.random.Generator, int], np.ndarray]
    goal_per_s: float | None = None


def keys(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 1 << 40, n)


def zipf(rng: np.random.Generator, n: int) -> np.ndarray:
    ranks = np.arange(1, 100_001)
    weights = ranks**-1.1
    return rng.choice(ranks, n, p=weights / weights.sum())


def latencies(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.lognormal(3, 1, n)


def one_by_one(method: str) -> Callable[[Any, np.ndarray], None]:
    def add(sketch: Any, values: np.ndarray) -> None:
        put = getattr(sketch, method)
        for value in values.tolist():
            put(value)

    return add


def an_array(sketch: Any, values: np.ndarray) -> None:
    sketch.update(values)


def _hll() -> Any:
    return datasketches.hll_sketch(PRECISION, datasketches.HLL_8)


def _count_min(width: int) -> Any:
    return datasketches.count_min_sketch(DEPTH, width)


def _kll() -> Any:
    return datasketches.kll_doubles_sketch(K)


def _dd() -> Any:
    return ddsketch.DDSketch(ALPHA)


def _count_min_pair(width: int, values: Callable[[np.random.Generator, int], np.ndarray], name: str) -> Pair:
    def make() -> Any:
        return _count_min(width)

    theirs = Theirs("datasketches", make, one_by_one("update"), False)
    return Pair(name, lambda: CountMin(width, DEPTH), theirs, values, 12e6 if width == 65536 else None)


PAIRS = (
    Pair("hll 2^12", lambda: HyperLogLog(PRECISION),
         Theirs("datasketches", _hll, one_by_one("update"), False), keys, 25e6),
    _count_min_pair(65536, zipf, "count-min 5x65536, Zipf"),
    _count_min_pair(65536, keys, "count-min 5x65536, all different"),
    _count_min_pair(1024, zipf, "count-min 5x1024, Zipf"),
    Pair("kll k=200", lambda: Kll(K),
         Theirs("datasketches", _kll, an_array, True), latencies),
    Pair("kll k=200, per item", lambda: Kll(K),
         Theirs("datasketches", _kll, one_by_one("update"), False), latencies),
    Pair("ddsketch 1 %", lambda: DDSketch(ALPHA),
         Theirs("ddsketch", _dd, one_by_one("add"), False), latencies, 40e6),
    Pair("reservoir 1024", lambda: ReservoirSample(SAMPLE),
         Theirs("datasketches var_opt", lambda: datasketches.var_opt_sketch(SAMPLE), one_by_one("update"), False),
         latencies),
    Pair("bloom 1 % of 1 M", lambda: BloomFilter.for_capacity(1_000_000, 0.01), None, keys),
)  # fmt: skip
"""Without Bloom filters: the Python bindings of datasketches 5.2 have none."""
