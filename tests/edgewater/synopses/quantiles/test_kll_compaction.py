"""The merge of many sketches."""

from __future__ import annotations

import numpy as np
import pytest

from edgewater.synopses import Kll, Quantile, Rank, from_bytes, merge_bytes

SEED = 31


@pytest.mark.parametrize(
    ("ordered", "sketches"),
    [(False, 150), *(pytest.param(each, 600, marks=pytest.mark.nightly) for each in (False, True))],
)
def test_ranks_of_hundreds_of_merged_sketches_are_within_the_stated_error(ordered: bool, sketches: int) -> None:
    """Intervals at 1 - 1e-7 per rank for 18 ranks; the error is that of k, for any order of merges."""
    values = np.random.default_rng(SEED).lognormal(0, 2, (sketches, 500))
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_thousands_of_kll_sketches_keep_their_bound() -> None:
    """Rank errors are within the stated ones, at 1 - 1e-6 per rank for 19 ranks."""
    rng = np.random.default_rng(6)
    values = rng.lognormal(0, 2, (1500, 1000))
    parts = []
    for source, held in enumerate(values):
        parts.append(Kll(100, source=source))
        parts[-1].update(held)
    merged = parts[0].merge_many(parts[1:])
    for q in np.arange(0.05, 1, 0.05):
        x = float(np.quantile(values, q))
        answer = merged.query(Rank(x, 1 - 1e-6))
        assert answer.lower <= np.mean(values <= x) <= answer.upper
    assert merged.rank_error() < 0.02 and merged.nbytes < 20_000
