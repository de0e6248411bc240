"""When in a slice the records of a group arrive, and how many: learnt from earlier slices.

A slice has `PARTS` equal parts. A *shape* is the fraction of a group's records that is still to come after each part.
It is estimated from the group's counts and the counts of all groups, as the mean of a Dirichlet posterior. The number
of records to come is the mean of a Gamma posterior. Its data are the records so far, and earlier slices.

Not chosen from slice to slice: prequential selection (Dawid, JRSS A 147, 1984) among 80 combinations of bases and
weights, and a factor for all rates, sent no fewer entries than these weights (`bench.constants`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewater.synopses import FloatArray, IntArray

PARTS = 16  # limit: memory of a group of the history
SHAPE_RECORDS = 1.0  # measured: bench.constants; half and double change costs by less than 3 %, in both directions
"""All groups count in the shape of a group as so many records of each slice."""
SLICES = 2.0  # measured: bench.constants; with 1, exact results are 4 % later
MOST_RECORDS = 8.0  # measured: bench.constants; half and double change costs by less than 4 %, in both directions
"""Earlier slices count as `SLICES` slices, or as the part of a slice in which a group has so many records. Groups of
many records change by more than a Poisson process does."""
MAX_COUNT = 6e4
"""The maximum of a count, which fits into float16. A group with so many records has its own shape either way."""


def shapes(all_counts: FloatArray, group_counts: npt.NDArray[np.floating]) -> FloatArray:
    """Returns the shapes of groups, float64 [group, part + 1], from 1 to 0.

    Args:
        all_counts: [part], mean records per slice of all groups.
        group_counts: [group, part], mean records per slice; zeros for new groups.
    """
    base = SHAPE_RECORDS * (all_counts + 1.0 / PARTS) / (all_counts.sum() + 1.0)
    own = group_counts.astype(np.float64)
    parts = (base + own) / (SHAPE_RECORDS + own.sum(axis=1, keepdims=True))
    result = np.zeros((len(own), PARTS + 1))
    result[:, :PARTS] = np.cumsum(parts[:, ::-1], axis=1)[:, ::-1]
    return result


def records_to_come(so_far: FloatArray, past: FloatArray, left: FloatArray) -> FloatArray:
    """Returns the expected number of records to come, float64 per group.

    It is the mean of the Gamma posterior of a Poisson rate (Gelman et al., "Bayesian Data Analysis", 3rd ed., section
    2.6), times the exposure to come.

    Args:
        so_far: records in this slice.
        past: mean records of earlier slices.
        left: the fraction of a slice's records that is to come.
    """
    slices = MOST_RECORDS / np.maximum(past, MOST_RECORDS / SLICES)
    return np.asarray((so_far + slices * past) / (1.0 - left + slices) * left)


def parts_of(times: IntArray, start_ms: int, slice_ms: int) -> IntArray:
    """Returns the part of the slice of each event time, 0 to `PARTS` - 1."""
    return np.minimum(np.maximum((times - start_ms) * PARTS // slice_ms, 0), PARTS - 1)  # np.clip takes twice as long
