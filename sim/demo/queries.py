"""The demo's queries, and their exact answers, computed from the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from sim.demo.data import TIME
from sim.demo.landings import END

DAY_MS = 86_400_000
QUANTILES = (0.5, 0.9, 0.99)

SPECS, WATCHED_SPECS = yaml.safe_load(files("sim.demo").joinpath("queries.yaml").read_text()).values()
"""The queries that are compared with the truth, and those to look at."""

QUESTIONS: dict[str, dict[str, Any]] = {"delay_quantiles": {"quantile": list(QUANTILES)}, "miles_landed": {"end": END}}
"""By query, parameters of the URL: which windows are compared, and questions to the synopses."""

Group = tuple[Any, ...]
Truth = Mapping[int, Mapping[Group, Mapping[str, float | None]]]
"""Window start (ms) -> group -> value name -> exact value; None if undefined, such as a mean without values."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected answers of a query.

    Attributes:
        columns: the columns that the query needs.
        budget: the contract, in words.
        truth: computes the exact answers.
        is_met: (errors, truths, inside) -> whether the contract was met; `inside` has per value whether the answer's
            interval contained the truth.
    """

    columns: list[str]
    budget: str
    truth: Callable[[pa.Table], Truth]
    is_met: Callable[[np.ndarray, np.ndarray, np.ndarray], bool]


def _windows(flights: pa.Table, size_ms: int) -> pa.Table:
    start = np.asarray(flights[TIME]) // size_ms * size_ms
    return flights.append_column("window", pa.array(start))


def _by_carrier(flights: pa.Table) -> Truth:
    table = _windows(flights, DAY_MS).group_by(["window", "carrier"])
    result: dict[int, dict[Group, dict[str, float]]] = {}
    for row in table.aggregate([([], "count_all"), ("dep_delay", "mean")]).to_pylist():
        values = {"flights": row["count_all"], "mean_delay": row["dep_delay_mean"]}
        result.setdefault(row["window"], {})[(row["carrier"],)] = values
    return result


def _miles(flights: pa.Table) -> Truth:
    table = _windows(flights, DAY_MS).group_by(["window", "dest"]).aggregate([("distance", "sum")])
    result: dict[int, dict[Group, dict[str, float]]] = {}
    for row in table.to_pylist():
        result.setdefault(row["window"], {})[(row["dest"],)] = {"miles": row["distance_sum"]}
    return result


def _landed(landings: pa.Table) -> Truth:
    table = _windows(landings, DAY_MS).group_by("window").aggregate([("distance", "sum"), ("distance", "count")])
    rows = {
        row["window"]: {"miles": row["distance_sum"], "flights": row["distance_count"]} for row in table.to_pylist()
    }
    return {start: {(): values} for start, values in rows.items() if start < max(rows)}


def _aircraft(flights: pa.Table) -> Truth:
    table = _windows(flights, 7 * DAY_MS).group_by("window").aggregate([("tailnum", "count_distinct")])
    return {row["window"]: {(): {"aircraft": row["tailnum_count_distinct"]}} for row in table.to_pylist()}


def _quantiles(flights: pa.Table) -> Truth:
    known = _windows(flights.filter(pc.is_valid(flights["dep_delay"])), DAY_MS)
    windows, delays = np.asarray(known["window"]), np.asarray(known["dep_delay"])
    result = {}
    for start in np.unique(windows).tolist():
        ordered = np.sort(delays[windows == start])
        # The value at a rank, without interpolation, as in DDSketch's guarantee.
        ranks = {q: ordered[int(q * (len(ordered) - 1))] for q in QUANTILES}
        result[start] = {(): {f"delay@{q}": float(value) for q, value in ranks.items()}}
    return result


def misses_allowed(total: int, rate: float = 0.05) -> int:
    """Returns how many of `total` values are outside of their intervals by chance at most, except in one of 10,000
    runs.
    """
    rng = np.random.default_rng(13)
    return int(np.quantile(rng.binomial(total, rate, 100_000), 0.9999))


def _is_exact(errors: np.ndarray, truths: np.ndarray, inside: np.ndarray) -> bool:
    return bool(inside.all() and (errors <= 1e-9 * np.maximum(1, abs(truths))).all())


EXPECTATIONS: dict[str, Expectation] = {
    "delay_by_carrier": Expectation(["carrier", "dep_delay"], "exact", _by_carrier, _is_exact),
    "miles_by_destination": Expectation(
        ["dest", "distance"],
        "6000 miles",
        _miles,
        lambda errors, truths, inside: bool(inside.all() and (errors <= 6000).all()),
    ),
    "aircraft_per_week": Expectation(
        ["tailnum"],
        "95 % interval",
        _aircraft,
        lambda errors, truths, inside: int((~inside).sum()) <= misses_allowed(len(inside)),
    ),
    "delay_quantiles": Expectation(
        ["dep_delay"],
        "1 % of the value",
        _quantiles,
        lambda errors, truths, inside: bool(inside.all() and (errors <= 0.01 * abs(truths) + 1e-9).all()),
    ),
    "miles_landed": Expectation(["distance"], "exact in the end", _landed, _is_exact),
}
