"""Merging many stacks at once equals merging them one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewater.model.errors import IncompatibleSynopses
from edgewater.synopses import Count, CountMin, FastAgms, HyperLogLog, Kll, Maximum, Minimum, Rank

MAKERS: dict[str, Any] = {
    "sparse": lambda: HyperLogLog(14),
    "dense": lambda: HyperLogLog(6),
    "count_min": lambda: CountMin(64, 3),
    "fast_agms": lambda: FastAgms(64, 3),
    "kll": lambda: Kll(16),
}
each = pytest.mark.parametrize("make", [pytest.param(m, id=n) for n, m in MAKERS.items()])


def parts_of(make: Any, sizes: tuple[int, ...] = (0, 1, 300, 2000, 0, 50, 5000)) -> list[Any]:
    rng = np.random.default_rng(5)
    parts = []
    for size in sizes:
        parts.append(make())
        parts[-1].update(rng.integers(-1000, 1000, size).astype(float))
    return parts


@each
def test_merging_many_at_once_equals_merging_one_after_the_other(make: Any) -> None:
    parts = parts_of(make)
    assert hasattr(parts[0]._stack, "merge_singles")
    before = [p.to_bytes() for p in parts]
    many = parts[0].merge_many(parts[1:])
    row = parts[0]
    for part in parts[1:]:
        row = row.merge_many([part])
    assert many.records == row.records == 7351
    if isinstance(many, Kll):
        for question in (Count(), Minimum(), Maximum()):
            assert many.query(question) == row.query(question)
    else:
        assert many.to_bytes() == row.to_bytes()
    assert [p.to_bytes() for p in parts] == before


@each
def test_an_incompatible_stack_is_refused_and_both_are_named(make: Any) -> None:
    others: list[Any] = [HyperLogLog(5), CountMin(32, 3), FastAgms(32, 3), Kll(17)]
    stranger = next(o for o in others if o.kind == make().kind)
    with pytest.raises(IncompatibleSynopses, match=f"{make().kind}: .* and .*"):
        make().merge_many([make(), stranger, make()])


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
