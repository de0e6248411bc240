"""Distributions of event values. Every result states the origin of its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgewater.base.errors import InvalidConfig
from edgewater.synopses import FloatArray

NAMES = ("nyt", "ysb", "lognormal2", "pareto2.2", "constant")

TAXI_LEVELS = np.array([
    *np.arange(0.0, 0.976, 0.025), 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 0.9995, 0.9999, 1.0,
])  # fmt: skip
TAXI_MILES = np.array([
    0.01, 0.39, 0.57, 0.69, 0.78, 0.86, 0.93, 1.01, 1.09, 1.16, 1.23, 1.3, 1.38, 1.43, 1.5, 1.6, 1.67, 1.76, 1.85, 1.95,
    2.05, 2.17, 2.29, 2.4, 2.55, 2.7, 2.86, 3.04, 3.24, 3.48, 3.73, 4.0, 4.37, 4.81, 5.33, 5.94, 6.7, 7.52, 8.82, 11.37,
    12.34, 13.7, 15.92, 17.42, 18.51, 20.95, 27.11, 31.61, 46.84, 71.91,
])  # fmt: skip
"""Quantiles, at `TAXI_LEVELS`, of the distances in (0, 100) miles of the 198,490 trips of New York's green taxis in the
first quarter of 2022 (NYC Taxi and Limousine Commission). Linear interpolation has a mean of 3.08, a squared
coefficient
of variation of 1.06 and a skewness of 3.65; the trips have 3.07, 1.04 and 3.60."""

Draw = Callable[[np.random.Generator, int], FloatArray]


@dataclass(frozen=True, slots=True)
class ValueSource:
    """A distribution of values.

    Attributes:
        source: description of the distribution, for the output.
        draw: returns n values.
    """

    source: str
    draw: Draw

    @classmethod
    def named(cls, name: str) -> ValueSource:
        """Returns one of `NAMES`, or a file of numbers: .parquet[:column], .npy, or text with one number per line.

        Raises:
            InvalidConfig: neither, or a file without numbers.
        """
        match name:
            case "nyt":
                return cls(
                    "quantiles of NYC green taxi distances, 2022 Q1, miles",
                    lambda rng, n: np.interp(rng.random(n), TAXI_LEVELS, TAXI_MILES),
                )
            case "ysb":
                # 1 for one of three event types, as in the filter of the Yahoo streaming benchmark.
                return cls("views of 10 campaigns, 1/3 of events", lambda rng, n: (rng.random(n) < 1 / 3).astype(float))
            case "constant":
                return cls("1", lambda rng, n: np.ones(n))
            case "lognormal2":
                return cls("lognormal, sigma 2", lambda rng, n: rng.lognormal(0.0, 2.0, n))
            case "pareto2.2":
                return cls("Pareto, alpha 2.2", lambda rng, n: rng.pareto(2.2, n) + 1)
        path, _, column = name.partition(":")
        if not Path(path).is_file():
            raise InvalidConfig("--values", name, f"one of {', '.join(NAMES)}, or a file of numbers")
        return _recorded(_read(Path(path), column), name)


def _recorded(values: FloatArray, source: str) -> ValueSource:
    values = values[np.isfinite(values)]
    if not len(values):
        raise InvalidConfig("--values", source, "a file with at least one finite number")
    return ValueSource(source, lambda rng, n: values[rng.integers(0, len(values), n)])


def _read(path: Path, column: str) -> FloatArray:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(path, columns=[column] if column else None)
        return np.asarray(table.column(column or table.column_names[0]).to_numpy(), float)
    if path.suffix == ".npy":
        return np.asarray(np.load(path, allow_pickle=False), float).ravel()
    try:
        return np.loadtxt(path, ndmin=1).ravel()
    except ValueError as exc:
        raise InvalidConfig("--values", str(path), "a file with one number per line", str(exc)) from exc
