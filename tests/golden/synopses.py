"""The synopses of the golden set: from equal input, each release makes the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.base.streams import COLUMN_TYPES
from edgewater.synopses import (
    BernoulliSample,
    BiasedReservoir,
    BloomFilter,
    CountingCuckooFilter,
    CountMin,
    CuckooFilter,
    DDSketch,
    EquiDepthHistogram,
    EquiWidthHistogram,
    FastAgms,
    FifoSample,
    GeneralManager,
    GroupedAggregate,
    HaarWavelet,
    HyperLogLog,
    Kll,
    ReservoirSample,
    SliceManager,
    TopK,
)
from edgewater.synopses.registry import function_named


def _integers(n: int) -> np.ndarray:
    """Returns numbers that do not depend on a random generator, whose stream may change with the NumPy version."""
    return np.arange(n, dtype=np.int64) * 7919 % 10_007


def _hyperloglog(n: int, precision: int) -> bytes:
    sketch = HyperLogLog(precision)
    sketch.update(_integers(n))
    return sketch.to_bytes()


def _strings() -> bytes:
    sketch = HyperLogLog(12)
    sketch.update(pa.array([f"user-{i}" for i in range(300)] + ["", "ä", "日本", "x" * 300]))
    return sketch.to_bytes()


def _ddsketch(values: np.ndarray, accuracy: float = 0.01) -> bytes:
    sketch = DDSketch(accuracy)
    sketch.update(values)
    return sketch.to_bytes()


def _updated(synopsis: Any, *batches: Any) -> bytes:
    """Returns the bytes of a synopsis after these batches."""
    for batch in batches:
        synopsis.update(batch)
    return bytes(synopsis.to_bytes())


URLS = pa.array([f"/{'x' * (i % 19)}/{i * i % 31}" for i in range(600)] + ["", "ä", "日本"])
HALVES = np.arange(400) % 37 / 2 - 4


def _grouped(keys: dict[str, pa.Array], measures: dict[str, tuple[str, pa.Array | None]], rows: int) -> bytes:
    stacks = {}
    for name, (function_name, values) in measures.items():
        function = function_named(function_name)
        assert function is not None
        stacks[name] = function.make(function.read_parameters([], {}, name), None if values is None else values.type)
    aggregate = GroupedAggregate({name: column.type for name, column in keys.items()}, stacks)
    aggregate.update(list(keys.values()), {name: values for name, (_, values) in measures.items()}, rows)
    return aggregate.to_bytes()


def _flights() -> bytes:
    carriers = pa.array(["AA", "B6", None, "ünï", ""] * 40)
    hours = pa.array(_integers(200) % 3)
    delays = pa.array([None if i % 7 == 0 else i / 4 - 10 for i in range(200)], pa.float64())
    measures = {
        "n": ("count", None),
        "miles": ("sum", pa.array(_integers(200))),
        "delay": ("sum", delays),
        "least": ("min", delays),
        "most": ("max", delays),
        "mean": ("mean", delays),
        "var": ("var", pa.array(_integers(200) % 8)),
        "tails": ("distinct", carriers),
        "quantiles": ("quantiles", delays),
    }
    return _grouped({"carrier": carriers, "hour": hours}, measures, 200)


def _all_keys() -> bytes:
    keys = {
        "s": pa.array(["a", None, "b", "b"], COLUMN_TYPES["string"]),
        "i": pa.array([1 << 62, -1, None, 0], COLUMN_TYPES["int64"]),
        "f": pa.array([0.5, float("nan"), float("inf"), None], COLUMN_TYPES["float64"]),
        "b": pa.array([True, None, False, True], COLUMN_TYPES["bool"]),
    }
    return _grouped(keys, {"n": ("count", None)}, 4)


ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324, 1e300, -1e-300])


def _timed(sample: Any) -> bytes:
    sample.update(_integers(600), times=_integers(600) // 100)
    return sample.to_bytes()


def _merged(synopses: list[Any]) -> bytes:
    for number, synopsis in enumerate(synopses):
        synopsis.update(_integers(1000) + number)
    return synopses[0].merge_many(synopses[1:]).to_bytes()


def _haar(values: np.ndarray, coefficients: int) -> HaarWavelet:
    wavelet = HaarWavelet(coefficients)
    wavelet.update(values)
    return wavelet


def _slices(values: np.ndarray) -> SliceManager:
    return SliceManager([(1000 * k, _haar(part, 20)) for k, part in enumerate(np.array_split(values, 3))])


SAMPLES: dict[str, Callable[[], bytes]] = {
    "hyperloglog-empty": lambda: _hyperloglog(0, 14),
    "hyperloglog-sparse": lambda: _hyperloglog(500, 14),
    "hyperloglog-dense": lambda: _hyperloglog(10_000, 11),
    "hyperloglog-strings": _strings,
    "ddsketch-empty": lambda: _ddsketch(np.zeros(0)),
    "ddsketch-integers": lambda: _ddsketch(_integers(3000).astype(float) - 5000),
    "ddsketch-odd": lambda: _ddsketch(np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324, 1e300, -1e-300])),
    "ddsketch-collapsed": lambda: _ddsketch(np.arange(1024, 262_144) / 1024, 0.001),
    "count_min-empty": lambda: _updated(CountMin()),
    "count_min-sparse": lambda: _updated(CountMin(), _integers(200)),
    "count_min-dense": lambda: _updated(CountMin(256, 4), _integers(9000), _integers(300)),
    "count_min-strings": lambda: _updated(CountMin(64, 3), URLS),
    "fast_agms-empty": lambda: _updated(FastAgms()),
    "fast_agms-integers": lambda: _updated(FastAgms(128, 5), _integers(5000)),
    "fast_agms-strings": lambda: _updated(FastAgms(256, 3), URLS),
    "bloom-empty": lambda: _updated(BloomFilter()),
    "bloom-sparse": lambda: _updated(BloomFilter.for_capacity(100_000, 0.01), _integers(50)),
    "bloom-strings": lambda: _updated(BloomFilter.for_capacity(300, 0.02), URLS),
    "bloom-flags": lambda: _updated(BloomFilter(64, 9), np.array([True])),
    "cuckoo-empty": lambda: _updated(CuckooFilter()),
    "cuckoo-strings": lambda: _updated(CuckooFilter(256), URLS),
    "cuckoo-overfull": lambda: _updated(CuckooFilter(16), _integers(100), _integers(120)),
    "counting_cuckoo-integers": lambda: _updated(
        CountingCuckooFilter(1024), _integers(2000)[500:], np.zeros(70_000, np.int64)
    ),
    "top_k-empty": lambda: _updated(TopK()),
    "top_k-strings": lambda: _updated(TopK(10), URLS),
    "top_k-full": lambda: _updated(TopK(3, 40), _integers(20_000) % 97 // 3, _integers(30_000) ** 2 % 211),
    "reservoir-empty": lambda: _updated(ReservoirSample()),
    "reservoir-full": lambda: _updated(ReservoirSample(30, source=7), _integers(5000)),
    "reservoir-strings": lambda: _updated(ReservoirSample(50), URLS),
    "bernoulli-sparse": lambda: _updated(BernoulliSample(0.01, source=7), _integers(5000)),
    "fifo-timed": lambda: _timed(FifoSample(25, source=3)),
    "fifo-merged": lambda: _merged([FifoSample(10, source=k) for k in range(3)]),
    "biased_reservoir-thinned": lambda: _timed(BiasedReservoir(32, source=3, p_in=0.25)),
    "biased_reservoir-timed": lambda: _timed(BiasedReservoir(32, source=3)),
    "equi_width-empty": lambda: _updated(EquiWidthHistogram(0, 1)),
    "equi_width-outside": lambda: _updated(EquiWidthHistogram(-5, 9000.5, 64), _integers(3000), ODD),
    "equi_depth-integers": lambda: _updated(EquiDepthHistogram(7, accuracy=0.02), _integers(3000), ODD),
    "kll-empty": lambda: _updated(Kll()),
    "kll-few": lambda: _updated(Kll(64), HALVES[:40], ODD),
    "kll-many": lambda: _updated(Kll(32, source=5), np.tile(_integers(10_000), 5), _integers(900)),
    "haar-empty": lambda: HaarWavelet().to_bytes(),
    "haar-exact": lambda: _haar(np.repeat(_integers(9), 100), 200).to_bytes(),
    "haar-summed": lambda: _haar(_integers(700) % 8, 10).merge_many([_haar(_integers(300) % 16, 10)]).to_bytes(),
    "slice_manager-window": lambda: _slices(_integers(700) % 32).to_bytes(),
    "general_manager-dealt": lambda: GeneralManager(
        2, 3, [(p, _slices(_integers(120).reshape(-1, 3)[p::2].reshape(-1))) for p in (0, 1)]
    ).to_bytes(),
    "grouped-flights": _flights,
    "grouped-all-keys": _all_keys,
    "grouped-no-keys": lambda: _grouped({}, {"n": ("count", None), "q": ("quantiles", pa.array([1, 2, 3]))}, 3),
    "grouped-empty": lambda: _grouped({"k": pa.array([], pa.string())}, {"n": ("count", None)}, 0),
}
