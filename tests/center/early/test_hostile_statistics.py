"""Arrival statistics with numbers that no edge measures: they cost their own edge, and no exception of the ledger."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from center.early import observed_arrivals
from edgewater.answers import Phase
from edgewater.arrivals import SubstreamStatistics, read_report
from tests.center.accuracy_world import Site, World, exponential, spec

NUMBERS = (math.nan, math.inf, 1.7e308)


@pytest.mark.nightly
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_arrival_statistics_that_no_edge_measures_stop_no_query(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = itertools.count()

    def falsified(state: bytes, grid: Any, **parts: Any) -> list[SubstreamStatistics]:
        result = read_report(state, grid, **parts)
        for each in result:
            if next(turn) % 2 and each.value_sums.size:
                each.value_sums = each.value_sums.copy()
                each.value_sums[1:] = number
        return result

    monkeypatch.setattr(observed_arrivals, "read_report", falsified)
    sites = [Site.make(f"e{n}", n, 5.0, exponential(500)) for n in range(2)]
    world = World(spec(measures={"total": "mean(x)"}), sites)
    with np.errstate(all="ignore"):
        answers = world.run(8)
    assert [a for a in answers if a.phase is not Phase.EARLY]
    assert next(turn) > 10
