"""The subjects of `test_battery.py`: every registered stack."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgewater.base.streams import COLUMN_TYPES
from edgewater.synopses import plugins
from edgewater.synopses.frequency.count_min import CountMinStack
from edgewater.synopses.frequency.fast_agms import FastAgmsStack
from edgewater.synopses.frequency.top_k import TopKStack
from edgewater.synopses.histograms.equi_depth import EquiDepthStack
from edgewater.synopses.histograms.equi_width import EquiWidthStack
from edgewater.synopses.items import ITEM_TYPES
from edgewater.synopses.membership.bloom import BloomStack
from edgewater.synopses.membership.cuckoo import CountingCuckooStack, CuckooStack
from edgewater.synopses.quantiles.kll import KllStack
from edgewater.synopses.registry import function_named, function_names
from edgewater.synopses.sampling.bernoulli import BernoulliStack
from edgewater.synopses.sampling.biased_reservoir import BiasedReservoirStack
from edgewater.synopses.sampling.fifo import FifoStack
from edgewater.synopses.sampling.reservoir import ReservoirStack
from edgewater.synopses.sampling.row_sample import RowSampleStack
from edgewater.synopses.sampling.sample_stack import SampleStack
from edgewater.synopses.testing import Subject

FLOAT_STATE = {"variance", "ddsketch", "equi_depth"}
"""Kinds whose state has float64 sums: equal up to rounding; all others have equal bytes."""

BOUNDED_STATE = {"top_k", "kll"}
"""Kinds whose answers depend on the order of values within their bounds: intervals of equal values must overlap."""

SMALL = {
    "count_min", "fast_agms", "bloom", "cuckoo", "counting_cuckoo", "top_k", "reservoir", "fifo", "biased", "bernoulli",
    "equi_width", "equi_depth", "kmeans", "exact_quantile",
}  # fmt: skip
"""Functions whose stacks have small parameters below, since their defaults are too large for the tests."""


def subjects() -> list[Subject]:
    """Returns every function of the registry, with every argument type and several parameters."""
    found = []
    variants: dict[str, tuple[dict[str, Any], ...]] = {
        "distinct": ({}, {"precision": 4}, {"precision": 11}),
        "quantiles": ({}, {"accuracy": 0.001}, {"accuracy": 0.2}),
    }
    for name in sorted(set(function_names()) - SMALL - set(plugins.INSTALLED.origins)):
        function = function_named(name)
        assert function is not None
        for variant in variants.get(name, ({},)):
            parameters = function.read_parameters([], variant, "measures.m")
            for type_ in function.types:
                label = f"{name}({type_}{''.join(f', {k}={v}' for k, v in variant.items())})"
                make = function.make
                found.append(Subject(label, lambda m=make, p=parameters, t=type_: m(p, COLUMN_TYPES[t]), type_))
    return [_with_equality(s) for s in found + stacks_of_items() + samples_and_histograms()]


def _with_equality(subject: Subject) -> Subject:
    stack = subject.make()
    equal: Any = "rounding" if stack.kind in FLOAT_STATE else "bounds" if stack.kind in BOUNDED_STATE else "bytes"
    return replace(subject, equal=equal)


def stacks_of_items() -> list[Subject]:
    """Returns sketches of items with small parameters, with every type of items."""
    kinds: tuple[tuple[type[Any], dict[str, int]], ...] = (
        (CountMinStack, {"width": 64, "depth": 3}),
        (CountMinStack, {"width": 32, "depth": 1}),
        (FastAgmsStack, {"width": 64, "depth": 3}),
        (BloomStack, {"bits": 1024, "hashes": 3}),
        (BloomStack, {"bits": 128, "hashes": 9}),
        (CuckooStack, {"buckets": 512}),
        (CuckooStack, {"buckets": 4}),
        (CountingCuckooStack, {"buckets": 256}),
        (CountingCuckooStack, {"buckets": 1}),
        (TopKStack, {"k": 10, "capacity": 50}),
        (TopKStack, {"k": 2, "capacity": 3}),
    )
    return [
        Subject(
            f"{kind.kind}({type_}{''.join(f', {k}={v}' for k, v in given.items())})",
            lambda k=kind, p=given, t=type_: k(item_type=t, **p),
            type_,
        )
        for kind, given in kinds
        for type_ in ITEM_TYPES
    ]


def samples_and_histograms() -> list[Subject]:
    kinds: tuple[tuple[type[Any], dict[str, Any], tuple[str, ...]], ...] = (
        (ReservoirStack, {"size": 50}, ("int64", "float64", "bool")),
        (ReservoirStack, {"size": 3}, ("float64",)),
        (BernoulliStack, {"rate": 0.5}, ("int64", "float64", "bool")),
        (BernoulliStack, {"rate": 1.0, "limit": 30}, ("float64",)),
        (RowSampleStack, {}, ("int64", "float64")),
        (RowSampleStack, {"limit": 30}, ("float64",)),
        (RowSampleStack, {"limit": 2}, ("int64",)),
        (FifoStack, {"size": 50}, ("int64", "float64", "bool")),
        (FifoStack, {"size": 2}, ("float64",)),
        (FifoStack, {"size": 50, "quota": 4}, ("int64",)),
        (BiasedReservoirStack, {"size": 64}, ("int64", "float64", "bool")),
        (BiasedReservoirStack, {"size": 2}, ("float64",)),
        (BiasedReservoirStack, {"size": 64, "p_in": 0.4}, ("int64",)),
        (EquiWidthStack, {"low": -10, "high": 10.5, "bins": 64}, ("int64", "float64")),
        (EquiWidthStack, {"low": 0, "high": 1e-300, "bins": 2}, ("float64",)),
        (EquiDepthStack, {"buckets": 5, "accuracy": 0.02}, ("int64", "float64")),
        (KllStack, {"k": 16}, ("int64", "float64")),
    )
    return [
        Subject(
            f"{kind.kind}({type_}{''.join(f', {k}={v}' for k, v in given.items())})",
            partial(kind, **given, **({"item_type": type_} if issubclass(kind, SampleStack) else {})),
            type_,
        )
        for kind, given, types in kinds
        for type_ in types
    ]
