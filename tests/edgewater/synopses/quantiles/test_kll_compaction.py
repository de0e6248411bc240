"""Thinning of many sorted sketches before they are sorted together."""

from __future__ import annotations

import numpy as np
import pytest

from edgewater.synopses import Kll, Quantile, Rank, from_bytes, merge_bytes
from edgewater.synopses.hashing import finalised_word
from edgewater.synopses.quantiles.kll_compaction import cascaded, height_for, thinned

SEED = 31


def word_of(key: int):  # type: ignore[no-untyped-def]
    return lambda values, level: finalised_word(int(values.view(np.uint64).sum()) + level & (1 << 64) - 1, key)


def sketches(count: int, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns values and levels of `count` sketches, concatenated and each sorted."""
    values = np.sort(rng.normal(0, 1, (count, size)), axis=1).ravel()
    return values, rng.integers(0, 4, count * size).astype(np.uint8)


def weight_to(x: float, values: np.ndarray, levels: np.ndarray) -> float:
    return float((2.0**levels)[values <= x].sum())


def test_thinning_keeps_weights_is_unbiased_and_its_variance_is_at_most_the_tracked_one() -> None:
    """600 keys: a mean, or a variance equal to the tracked one, deviates by 5 standard errors for one of a million
    seeds."""
    values, levels = sketches(40, 53, np.random.default_rng(SEED))
    for height, x in ((1, 0.3), (3, -0.7), (5, 0.0), (9, 0.2)):
        truth, errors, counted = weight_to(x, values, levels), [], 0.0
        for key in range(600):
            runs, counted = thinned(values, levels, height, 40, word_of(key))
            held, at = (np.concatenate([run[i] for run in runs]) for i in (1, 2))
            assert (2.0**at).sum() == (2.0**levels).sum()
            errors.append(weight_to(x, held, at) - truth)
        assert abs(np.mean(errors)) < 5 * np.std(errors) / np.sqrt(len(errors))
        assert 0 < np.var(errors) < counted * (1 + 5 * np.sqrt(2 / len(errors)))


def test_a_height_of_0_changes_nothing_but_the_order() -> None:
    values, levels = sketches(7, 20, np.random.default_rng(SEED))
    runs, counted = thinned(values, levels, 0, 7, word_of(1))
    held, at = (np.concatenate([run[i] for run in runs]) for i in (1, 2))
    order, mine = np.lexsort((values, levels)), np.lexsort((held, at))
    assert counted == 0 and (held[mine] == values[order]).all() and (at[mine] == levels[order]).all()


def test_thinning_adds_at_most_half_of_the_variance_of_the_union() -> None:
    for n, mean, k in ((2_000_000, 2000.0, 200), (10**9, 50.0, 8), (10**12, 1e6, 65_536), (5000, 5000.0, 200)):
        height = height_for(n, mean, k)
        assert height == 0 or n / mean * 4.0**height <= (n / k) ** 2 / 8
        assert n / mean * 4.0 ** (height + 1) > (n / k) ** 2 / 8


def test_a_cascade_leaves_room_in_every_level_and_keeps_weights() -> None:
    values, levels = sketches(300, 90, np.random.default_rng(SEED))
    runs, _ = thinned(values, levels, 2, 300, word_of(3))
    (groups, held, at), counted = cascaded(runs, 200, word_of(4))
    assert (2.0**at).sum() == (2.0**levels).sum() and counted > 0 and not groups.any()
    assert np.bincount(at).max() <= 200 and (held[1:] >= held[:-1]).all()


@pytest.mark.parametrize("ordered", [False, True])
def test_ranks_of_hundreds_of_merged_sketches_are_within_the_stated_error(ordered: bool) -> None:
    """Intervals at 1 - 1e-7 per rank for 18 ranks; the error is that of k, for any order of merges."""
    values = np.random.default_rng(SEED).lognormal(0, 2, (600, 500))
    if ordered:
        values = np.sort(values, axis=None).reshape(values.shape)
    parts = []
    for source, held in enumerate(values):
        parts.append(Kll(64, source=source))
        parts[-1].update(held)
    merged = parts[0].merge_many(parts[1:])
    assert merged.to_bytes() == merge_bytes([part.to_bytes() for part in parts])
    for q in np.arange(0.05, 0.95, 0.05):
        x = float(np.quantile(values, q))
        answer = merged.query(Rank(x, 1 - 1e-7))
        assert answer.lower <= np.mean(values <= x) <= answer.upper
    assert merged.rank_error() < 2.1 / 64 and len(merged.to_bytes()) < 4000
    assert from_bytes(merged.to_bytes()).query(Quantile(0.5)) == merged.query(Quantile(0.5))  # type: ignore[union-attr]


@pytest.mark.slow
def test_ranks_after_merging_bytes_are_unbiased_and_their_error_is_well_within_the_stated_one() -> None:
    """6 seeds × 5 ranks: the mean error exceeds 3.3 standard errors for one of a thousand choices of seeds. The stated
    bound at 95 % holds for any data, so it is at least twice the root mean square of normal errors."""
    errors, stated = [], []
    for seed in range(6):
        values = np.random.default_rng(seed).lognormal(3, 1, (400, 500))
        parts = []
        for source, held in enumerate(values):
            parts.append(Kll(64, source=1000 * seed + source))
            parts[-1].update(held)
        merged = Kll.from_bytes(merge_bytes([part.to_bytes() for part in parts]))
        stated.append(merged.rank_error())
        for x in np.quantile(values, (0.1, 0.3, 0.5, 0.7, 0.9)).tolist():
            errors.append(merged.query(Rank(x)).value - np.mean(values <= x))
    root = np.sqrt(np.mean(np.square(errors)))
    assert root < min(stated) / 2 and max(stated) < 1.5 / 64
    assert abs(np.mean(errors)) < 3.3 * root / np.sqrt(len(errors) / 5), "errors of one sketch are correlated"
