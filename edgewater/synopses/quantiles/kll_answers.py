"""What KLL sketches answer: ranks and quantiles of many groups, with their intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgewater.errors import InvalidRequest
from edgewater.synopses.base import Estimates, FloatArray, IntArray
from edgewater.synopses.quantiles.kll_blocks import Block


@dataclass(frozen=True, slots=True)
class Held:
    """Sketches of many groups.

    Attributes:
        rows: of all groups.
        n, least, greatest: how many values each group has seen, and its extremes.
        errors: how many values a rank may be off, with probability `confidence` not more.
    """

    rows: Block
    n: IntArray
    least: FloatArray
    greatest: FloatArray
    errors: FloatArray
    confidence: float


def ranks(held: Held, x: float, kind: str) -> Estimates:
    """The part of the values at most `x`; 0 and 1 are certain outside the extremes."""
    if math.isnan(x):
        raise InvalidRequest("x", x, "a number")
    groups, values, levels = held.rows
    n = held.n.astype(np.float64)
    below = np.bincount(groups, np.where(values <= x, 2.0**levels, 0.0), len(held.n))
    parts = []
    for counted in (below, below - held.errors, below + held.errors):
        inside = np.clip(np.where(held.errors > 0, np.clip(counted, 1, n - 1), counted), 0, n)
        certain = np.select([x >= held.greatest, x < held.least], [n, 0.0], inside)
        with np.errstate(invalid="ignore"):
            parts.append(certain / n)
    value, lower, upper = parts
    return Estimates(value, np.minimum(lower, value), np.maximum(upper, value), held.confidence, kind)


def quantiles(held: Held, q: float, kind: str) -> Estimates:
    """The value with rank ⌊q·(n - 1)⌋, from 0; between values that are that far away for certain enough."""
    if not 0 <= q <= 1:
        raise InvalidRequest("q", q, "a number from 0 to 1, such as 0.99")
    groups, values, levels = held.rows
    n = held.n
    rank = np.floor(q * np.maximum(n - 1, 0))
    starts = np.searchsorted(groups, np.arange(len(held.n) + 1))
    running = np.concatenate([[0.0], np.cumsum(2.0**levels)])
    base = running[starts[:-1]]
    # Not more than rank values are below `value`, and more than rank are at most it.
    at = np.searchsorted(running[1:], base + rank, side="right")
    up = np.searchsorted(running[1:], base + rank + held.errors, side="right")
    down = np.searchsorted(running[:-1], base + rank - held.errors, side="right") - 1
    padded = np.concatenate([values, [np.nan]])
    least, greatest = held.least, held.greatest
    end = starts[1:]
    value = np.where(at < end, padded[np.minimum(at, len(values))], greatest)
    upper = np.where(up < end, padded[np.minimum(up, len(values))], greatest)
    lower = np.where(down >= starts[:-1], padded[np.clip(down, 0, len(values))], least)
    lower = np.where(held.errors > 0, lower, value)
    results = []
    for result in (value, np.minimum(lower, value), np.maximum(upper, value)):
        result = np.where(rank == 0, least, np.where(rank == n - 1, greatest, result))
        results.append(np.where(n > 0, result, np.nan))
    value, lower, upper = results
    return Estimates(value, lower, upper, held.confidence, kind)
