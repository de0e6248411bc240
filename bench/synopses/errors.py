"""Errors of Edgewater's and peers' synopses with equal parameters, and their serialised sizes."""

from __future__ import annotations

from typing import Any

import datasketches
import ddsketch
import numpy as np

from bench.synopses.peers import ALPHA, DEPTH, PRECISION, K, keys, latencies, one_by_one, zipf
from edgewater.synopses import CountMin, DDSketch, Frequency, HyperLogLog, Kll, Quantile, Rank

TRIALS, N = 200, 20_000
GOAL = 1.05


def errors(trials: int = TRIALS) -> list[dict[str, Any]]:
    few = max(trials // 10, 1)
    return [_distinct(False, trials), _distinct(True, trials), _ranks(False, trials), _ranks(True, trials),
            _frequencies(few), _quantiles(few)]  # fmt: skip


def _row(name: str, what: str, ours: float, theirs: float, bytes_ours: int, bytes_theirs: int) -> dict[str, Any]:
    return {
        "synopsis": name,
        "error": what,
        "ours": float(f"{ours:.4g}"),
        "theirs": float(f"{theirs:.4g}"),
        "ratio": round(ours / theirs, 3) if theirs else None,
        "goal_ratio": GOAL,
        "ours_bytes": bytes_ours,
        "theirs_bytes": bytes_theirs,
    }


def _rms(errors: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def _distinct(merged: bool, trials: int) -> dict[str, Any]:
    """Compares merged sketches, because for single sketches the library uses the order-dependent HIP estimator."""
    mine, theirs, sizes = [], [], (0, 0)
    for trial in range(trials):
        values = keys(np.random.default_rng(trial), N)
        truth = len(np.unique(values))
        halves = (values[: N // 2], values[N // 2 :]) if merged else (values,)
        sketches: list[HyperLogLog] = []
        union = datasketches.hll_union(PRECISION)
        for half in halves:
            sketches.append(HyperLogLog(PRECISION))
            sketches[-1].update(half)
            peer = datasketches.hll_sketch(PRECISION, datasketches.HLL_8)
            one_by_one("update")(peer, half)
            union.update(peer)
        one = sketches[0].merge_many(sketches[1:])
        estimate = union.get_estimate() if merged else peer.get_estimate()
        mine.append(one.query().value / truth - 1)
        theirs.append(estimate / truth - 1)
        sizes = len(one.to_bytes()), len(peer.serialize_compact())
    return _row("hll 2^12, merged" if merged else "hll 2^12, single (theirs: HIP)", "relative, RMS",
                _rms(mine), _rms(theirs), *sizes)  # fmt: skip


def _ranks(merged: bool, trials: int) -> dict[str, Any]:
    mine, theirs, sizes = [], [], (0, 0)
    for trial in range(trials):
        values = latencies(np.random.default_rng(trial), N)
        held = np.sort(values)
        sketches: list[Kll] = []
        peer = datasketches.kll_doubles_sketch(K)
        for part in np.split(values, 20 if merged else 1):
            sketches.append(Kll(K, source=20 * trial + len(sketches)))
            sketches[-1].update(part)
            other = datasketches.kll_doubles_sketch(K)
            other.update(part)
            peer.merge(other)
        one = sketches[0].merge_many(sketches[1:])
        for q in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
            x = float(held[int(q * N)])
            truth = float(np.searchsorted(held, x, "right")) / N
            mine.append(one.query(Rank(x)).value - truth)
            theirs.append(peer.get_rank(x, True) - truth)
        sizes = len(one.to_bytes()), len(peer.serialize())
    return _row(f"kll k=200, {'merged of 20' if merged else 'single'}", "rank, RMS", _rms(mine), _rms(theirs), *sizes)


def _frequencies(trials: int) -> dict[str, Any]:
    mine, theirs, sizes = [], [], (0, 0)
    for trial in range(trials):
        values = zipf(np.random.default_rng(trial), N)
        found, counts = np.unique(values, return_counts=True)
        one, peer = CountMin(1024, DEPTH, seed=trial), datasketches.count_min_sketch(DEPTH, 1024, seed=trial)
        one.update(values)
        one_by_one("update")(peer, values)
        for at in np.random.default_rng(trial).choice(len(found), 300, replace=False).tolist():
            item, count = int(found[at]), int(counts[at])
            mine.append(one.query(Frequency(item)).value - count)
            theirs.append(peer.get_estimate(item) - count)
        sizes = len(one.to_bytes()), len(peer.serialize())
    return _row("count-min 5x1024", "counts, RMS", _rms(mine), _rms(theirs), *sizes)


def _quantiles(trials: int) -> dict[str, Any]:
    mine, theirs = [], []
    for trial in range(trials):
        values = latencies(np.random.default_rng(trial), N)
        held = np.sort(values)
        one, peer = DDSketch(ALPHA), ddsketch.DDSketch(ALPHA)
        one.update(values)
        one_by_one("add")(peer, values)
        for q in (0.01, 0.1, 0.5, 0.9, 0.99, 0.999):
            truth = float(held[int(q * (N - 1))])
            mine.append(one.query(Quantile(q)).value / truth - 1)
            theirs.append((peer.get_quantile_value(q) or 0.0) / truth - 1)
    bins = 8 * len(peer._store.bins)  # serialisation needs protobuf, so counters count as doubles
    return _row("ddsketch 1 %", "relative, RMS", _rms(mine), _rms(theirs), len(one.to_bytes()), bins)
