"""Samples of records per group: reservoir, Bernoulli, FIFO, biased reservoir, and rows for functions of samples.

The query functions `reservoir`, `bernoulli`, `fifo`, `biased`, `kmeans` and `exact_quantile` build them. A hash of a
record's identity decides whether the record is sampled, never a random generator. So samples merge exactly and replays
repeat them.
"""

from edgewater.synopses.sampling.bernoulli import BernoulliSample, BernoulliStack
from edgewater.synopses.sampling.biased_reservoir import BiasedReservoir, BiasedReservoirStack
from edgewater.synopses.sampling.fifo import FifoSample, FifoStack
from edgewater.synopses.sampling.reservoir import ReservoirSample, ReservoirStack
from edgewater.synopses.sampling.row_sample import RowSampleStack, is_sampled
from edgewater.synopses.sampling.sample_functions import sample_function
from edgewater.synopses.sampling.sample_rows import source_of
from edgewater.synopses.sampling.sample_stack import SampleStack, SingleSample

__all__ = [
    "BernoulliSample",
    "BernoulliStack",
    "BiasedReservoir",
    "BiasedReservoirStack",
    "FifoSample",
    "FifoStack",
    "ReservoirSample",
    "ReservoirStack",
    "RowSampleStack",
    "SampleStack",
    "SingleSample",
    "is_sampled",
    "sample_function",
    "source_of",
]
