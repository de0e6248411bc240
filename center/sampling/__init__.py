"""Load shedding: when an edge samples, at which rate, and how an answer explains it.

Called by `center.ingest` (rates per session), `center.job` (rates to store) and the ledger (reasons in answers).
Pure: no I/O, no clock.
"""

from center.sampling.policy import (
    RATE_MARGIN,
    RATES_EVERY_MS,
    EdgeSamplingController,
    SamplingRequirement,
    is_expensive,
    needed_rate,
    rates_differ,
)
from center.sampling.reasons import SamplingReasonHistory, describe_reasons

__all__ = [
    "RATES_EVERY_MS",
    "RATE_MARGIN",
    "EdgeSamplingController",
    "SamplingReasonHistory",
    "SamplingRequirement",
    "describe_reasons",
    "is_expensive",
    "needed_rate",
    "rates_differ",
]
