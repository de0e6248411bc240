"""The generated traces of the benchmarks."""

from __future__ import annotations

import numpy as np

from sim.budgets.trace import Trace

ZIPF_EXPONENT = 1.1


def zipf(
    windows: int,
    window_ms: int,
    *,
    records: int = 100_000,
    groups: int = 40_000,
    sigma: float = 1.5,
    exponent: float = ZIPF_EXPONENT,
    seed: int = 1,
) -> Trace:
    """Returns `records` per window at uniform times, with Zipf-distributed groups and lognormal values.

    With the defaults, about 13,500 of the groups occur in a window.
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, groups + 1) ** -ZIPF_EXPONENT
    total = windows * records
    times = np.sort(rng.integers(0, windows * window_ms, total))
    keys = rng.choice(groups, total, p=weights / weights.sum())
    return Trace.from_columns(times, {"key": keys}, {"value": np.exp(rng.normal(10.0, sigma, total))})


RHYTHM_RATIO = 12.0
RHYTHM_ACTIVE = 0.25
RHYTHM_DRIFT = 0.1


def rhythm(
    windows: int, window_ms: int, *, records: int = 100_000, groups: int = 40_000, sigma: float = 1.5, seed: int = 1
) -> Trace:
    """Returns up to `records` per window, like `zipf` but with a rhythm that repeats in every window.

    The rate rises and falls by a factor of 12 within a window. Each group occurs in only one quarter of the window, and
    each group has its own phase. From window to window its weight is multiplied by a lognormal factor of 0.1.
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, groups + 1) ** -ZIPF_EXPONENT
    begin, drift = rng.random(groups), np.zeros(groups)
    times, keys = [], []
    for number in range(windows):
        drift += rng.normal(0.0, RHYTHM_DRIFT, groups)
        weight = weights * np.exp(drift)
        key = rng.choice(groups, 3 * records, p=weight / weight.sum())
        phase = (begin[key] + RHYTHM_ACTIVE * rng.random(len(key))) % 1.0
        rate = 1.0 + (RHYTHM_RATIO - 1.0) * (1.0 - np.cos(2.0 * np.pi * phase)) / 2.0
        chosen = np.flatnonzero(rng.random(len(key)) < rate / RHYTHM_RATIO)[:records]
        times.append(number * window_ms + np.minimum(phase[chosen] * window_ms, window_ms - 1).astype(np.int64))
        keys.append(key[chosen])
    at = np.concatenate(times)
    values = np.exp(rng.normal(10.0, sigma, len(at)))
    return Trace.from_columns(at, {"key": np.concatenate(keys)}, {"value": values})
