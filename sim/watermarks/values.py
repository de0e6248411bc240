"""Values of events: where they are from is part of every result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgewater.errors import InvalidConfig
from edgewater.synopses.base import FloatArray

TAXI = Path("../shared/data/nyc_green_taxi_2022q1")
TAXI_COLUMN = "trip_distance"
NAMES = ("nyt", "ysb", "lognormal2", "pareto2.2", "constant")

Draw = Callable[[np.random.Generator, int], FloatArray]


@dataclass(frozen=True, slots=True)
class Values:
    """Attributes:
    source: what was really used, for the output.
    """

    source: str
    draw: Draw

    @classmethod
    def named(cls, name: str, root: Path = Path()) -> Values:
        """One of `NAMES`, or a file of numbers: .parquet (`column=` after a colon), .npy, or text, one per line.

        Raises:
            InvalidConfig: neither, or a file without numbers.
        """
        match name:
            case "nyt":
                return _taxi(root)
            case "ysb":
                # Clicks of a campaign: 1 for one of three event types, as in the benchmark's filter.
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


def _recorded(values: FloatArray, source: str) -> Values:
    values = values[np.isfinite(values)]
    if not len(values):
        raise InvalidConfig("--values", source, "a file with at least one finite number")
    return Values(source, lambda rng, n: values[rng.integers(0, len(values), n)])


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


def _taxi(root: Path) -> Values:
    """Trip distances in (0, 100) miles; without the files, a lognormal of the same mean and variance."""
    files = sorted((root / TAXI).glob("*.parquet"))
    if not files:
        return Values(
            "lognormal fitted to NYC green taxi distances (mean 3.0, CV² 1.03)",
            lambda rng, n: rng.lognormal(0.745, 0.8417, n),
        )
    values = np.concatenate([_read(f, TAXI_COLUMN) for f in files])
    return _recorded(values[(values > 0) & (values < 100)], f"{TAXI.name}, {TAXI_COLUMN} in (0, 100)")
