"""Merging many stacks at once equals merging them one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from edgewater.synopses import Kll, Rank


@pytest.mark.slow
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
