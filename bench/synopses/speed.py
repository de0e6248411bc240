"""Updates per second, compared with the peers on the same arrays in one run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from bench.synopses.peers import PAIRS, Pair


@dataclass(frozen=True, slots=True)
class SpeedSize:
    """The size of a run.

    Attributes:
        values: values per array.
        one_by_one: values for peers without array input.
    """

    values: int = 1 << 21
    one_by_one: int = 1 << 18
    repeats: int = 5


SMOKE = SpeedSize(2_000, 1_000, 1)


def best(run: Callable[[], object], repeats: int) -> float:
    """Returns the CPU seconds of the fastest of several runs, to exclude the influence of other processes."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return min(seconds)


def throughput(cores: int, size: SpeedSize) -> list[dict[str, Any]]:
    """Returns one row per pair: million updates per second, over `cores` processes with one core each."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < cores:
        return []
    rows = []
    # Spawned: a fork would share the warmed-up state of the parent.
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        for index, pair in enumerate(PAIRS):
            rates = list(pool.map(_rates, [(index, core, size) for core in allowed[:cores]]))
            ours, theirs = (sum(r[i] for r in rates) / 1e6 for i in (0, 1))
            rows.append(_row(pair, cores, ours, theirs))
    return rows


def _row(pair: Pair, cores: int, ours: float, theirs: float) -> dict[str, Any]:
    return {
        "synopsis": pair.name,
        "cores": cores,
        "ours_m_per_s": round(ours, 2),
        "theirs_m_per_s": round(theirs, 2) if pair.theirs else None,
        "peer": pair.theirs.library if pair.theirs else None,
        "ratio": round(ours / theirs, 2) if pair.theirs else None,
        "goal_ratio": (1.0 if pair.theirs.takes_arrays else 5.0) if pair.theirs else None,
        "goal_m_per_s": pair.goal_per_s / 1e6 if pair.goal_per_s and cores == 1 else None,
    }


def _rates(given: tuple[int, int, SpeedSize]) -> tuple[float, float]:
    """Returns the updates per second of both on one core. Runs alternate, so that conditions are equal."""
    index, core, size = given
    os.sched_setaffinity(0, {core})
    pair = PAIRS[index]
    rng = np.random.default_rng(core)
    values = pair.values(rng, size.values)
    few = values if pair.theirs and pair.theirs.takes_arrays else values[: size.one_by_one]
    ours, theirs = [], []
    for _ in range(size.repeats):
        ours.append(best(lambda: pair.ours().update(values), 1))
        if pair.theirs is not None:
            peer = pair.theirs
            theirs.append(best(lambda peer=peer: peer.add(peer.make(), few), 1))  # type: ignore[misc]
    return size.values / min(ours), len(few) / min(theirs) if theirs else 0.0
