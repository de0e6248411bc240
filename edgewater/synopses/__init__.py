"""Mergeable synopses: the states that an edge ships and the center merges, with an interval on every estimate.

Edges, the center and the simulator use them through this facade; a query builds them by name (`Function`). Input are
batches of values; output are states, bytes and estimates. The package reads no clock and no files, has no threads, and
imports neither the edge nor the center. Importing it registers the built-in functions and kinds.
"""

from __future__ import annotations

from edgewater.synopses.array_stack import ArrayStack
from edgewater.synopses.base import (
    ITEM_TYPES,
    BoolArray,
    BoundedError,
    Count,
    Distinct,
    DivisibleSum,
    Estimate,
    Estimates,
    FloatArray,
    Incremental,
    IntArray,
    Maximum,
    Mean,
    Minimum,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
    SampleFunction,
    Stack,
    Sum,
    Synopsis,
    Variance,
)
from edgewater.synopses.distinct.hyperloglog import HyperLogLog
from edgewater.synopses.exact.aggregates import CountStack, ExtremumStack, MaxStack, SumStack
from edgewater.synopses.frequency.count_min import CountMin
from edgewater.synopses.frequency.fast_agms import FastAgms
from edgewater.synopses.frequency.top_k import TopK
from edgewater.synopses.grouped import GroupedAggregate
from edgewater.synopses.hashing import DEFAULT_SEED, finalised, finalised_word, hash_values
from edgewater.synopses.histograms.equi_depth import EquiDepthHistogram
from edgewater.synopses.histograms.equi_width import EquiWidthHistogram
from edgewater.synopses.intervals import normal_quantile
from edgewater.synopses.key_table import EncodedKeys, KeyTable, count_distinct
from edgewater.synopses.manager import GeneralManager, SliceManager
from edgewater.synopses.membership.bloom import BloomFilter
from edgewater.synopses.membership.cuckoo import CountingCuckooFilter, CuckooFilter
from edgewater.synopses.quantiles.ddsketch import DDSketch
from edgewater.synopses.quantiles.kll import Kll, KllStack
from edgewater.synopses.questions import (
    Contains,
    FalsePositiveRate,
    Frequency,
    IntersectionSize,
    ItemRanking,
    JoinSize,
    Point,
    Proportion,
    Range,
    RangeSum,
    SelfJoinSize,
    SubsetCount,
    TopItems,
    UnionSize,
    ValueSample,
)
from edgewater.synopses.registry import (
    REQUIRED,
    Function,
    Parameter,
    Parameters,
    function_named,
    function_names,
    meant_function,
    require_fit,
    stack_from_message,
)
from edgewater.synopses.salvage import merge_what_fits
from edgewater.synopses.sampling.bernoulli import BernoulliSample
from edgewater.synopses.sampling.biased_reservoir import BiasedReservoir
from edgewater.synopses.sampling.fifo import FifoSample
from edgewater.synopses.sampling.reservoir import ReservoirSample
from edgewater.synopses.sampling.row_sample import RowSampleStack, is_sampled
from edgewater.synopses.sampling.sample_functions import sample_function
from edgewater.synopses.sampling.sample_rows import source_of
from edgewater.synopses.sampling.sample_stack import SampleStack
from edgewater.synopses.serialized import AnySynopsis, from_bytes, merge_bytes
from edgewater.synopses.single import SingleSynopsis
from edgewater.synopses.wavelets.haar import HaarWavelet
from edgewater.synopses.wavelets.haar_max import MaxErrorWavelet

__all__ = [
    "DEFAULT_SEED", "ITEM_TYPES", "REQUIRED", "AnySynopsis", "ArrayStack", "BernoulliSample", "BiasedReservoir",
    "BloomFilter", "BoolArray", "BoundedError", "Contains", "Count", "CountMin", "CountStack", "CountingCuckooFilter",
    "CuckooFilter", "DDSketch", "Distinct", "DivisibleSum", "EncodedKeys", "EquiDepthHistogram", "EquiWidthHistogram",
    "Estimate", "Estimates", "ExtremumStack", "FalsePositiveRate", "FastAgms", "FifoSample", "FloatArray", "Frequency",
    "Function", "GeneralManager", "GroupedAggregate", "HaarWavelet", "HyperLogLog", "Incremental", "IntArray",
    "IntersectionSize", "ItemRanking", "JoinSize", "KeyTable", "Kll", "KllStack", "MaxErrorWavelet", "MaxStack",
    "Maximum", "Mean", "Minimum", "Parameter", "Parameters", "Point", "Properties", "Proportion", "Quantile",
    "Question", "Questions", "Range", "RangeSum", "Rank", "ReservoirSample", "RowSampleStack", "SampleFunction",
    "SampleStack", "SelfJoinSize", "SingleSynopsis", "SliceManager", "Stack", "SubsetCount", "Sum", "SumStack",
    "Synopsis", "TopItems", "TopK", "UnionSize", "ValueSample", "Variance", "count_distinct", "finalised",
    "finalised_word", "from_bytes", "function_named", "function_names", "hash_values", "is_sampled", "meant_function",
    "merge_bytes", "merge_what_fits", "normal_quantile", "require_fit", "sample_function", "source_of",
    "stack_from_message",
]  # fmt: skip
