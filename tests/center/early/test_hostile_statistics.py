"""Arrival statistics with numbers that no edge measures: they cost their own edge, and no exception of the ledger."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from edgewater.answers import Phase
from edgewater.arrivals import SubstreamStatistics
from tests.center.accuracy_world import Site, World, exponential, spec

NUMBERS = (math.nan, math.inf, 1.7e308)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_arrival_statistics_that_no_edge_measures_stop_no_query(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, turn = SubstreamStatistics.from_state, itertools.count()

    def falsified(state: bytes, grid: Any) -> SubstreamStatistics:
        result = read(state, grid)
        if next(turn) % 2:
            return result
        if result.value_sums.size:
            result.value_sums = result.value_sums.copy()
            result.value_sums[1:] = number
        return result

    monkeypatch.setattr(SubstreamStatistics, "from_state", staticmethod(falsified))
    sites = [Site.make(f"e{n}", n, 5.0, exponential(500)) for n in range(2)]
    world = World(spec(measures={"total": "mean(x)"}), sites)
    with np.errstate(all="ignore"):
        answers = world.run(8)
    assert [a for a in answers if a.phase is not Phase.EARLY]
    assert next(turn) > 10
