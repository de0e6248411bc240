import pyarrow as pa
import pytest

from edgewater.base.errors import InvalidQuery
from edgewater.synopses import DDSketch, HyperLogLog
from edgewater.synopses.exact.aggregates import CountStack
from edgewater.synopses.registry import (
    REQUIRED,
    Function,
    function_named,
    function_names,
    register_function,
    register_kind,
)
from tests.refusals import refused


def test_built_in_functions_are_registered_under_every_name() -> None:
    assert {"count", "sum", "min", "max", "mean", "var", "distinct", "quantiles"} <= set(function_names())
    for alias, name in (("avg", "mean"), ("average", "mean"), ("minimum", "min"), ("variance", "var")):
        assert function_named(alias) is function_named(name) is not None
    assert function_named("median_of_medians") is None


def test_a_name_and_a_kind_are_registered_once() -> None:
    with pytest.raises(ValueError, match="count is registered"):
        register_function(Function("count", lambda *_: CountStack()))
    with pytest.raises(ValueError, match="avg is registered"):
        register_function(Function("brand_new", lambda *_: CountStack()), "avg")
    assert function_named("brand_new") is None, "nothing is registered by half"
    with pytest.raises(ValueError, match="kind count"):
        register_kind(CountStack)


def test_parameters_are_read_by_position_and_by_name_with_defaults() -> None:
    distinct, quantiles = function_named("distinct"), function_named("quantiles")
    assert distinct is not None and quantiles is not None
    assert distinct.read_parameters([], {}, "m") == (("precision", 14),)
    assert distinct.read_parameters([9], {}, "m") == distinct.read_parameters([], {"precision": 9}, "m")
    assert quantiles.read_parameters([0.05], {}, "m") == (("accuracy", 0.05),)


@pytest.mark.parametrize(
    ("name", "positional", "named", "field"),
    [
        ("distinct", [], {"precision": 3}, "measures.m.precision"),
        ("distinct", ["14"], {}, "measures.m.precision"),
        ("distinct", [14], {"precision": 14}, "measures.m.precision"),
        ("distinct", [14, 15], {}, "measures.m"),
        ("distinct", [], {"width": 7}, "measures.m.width"),
        ("quantiles", [0], {}, "measures.m.accuracy"),
        ("count", [], {"x": 1}, "measures.m.x"),
    ],
)
def test_errors_name_the_bad_parameter(name: str, positional: list, named: dict, field: str) -> None:
    function = function_named(name)
    assert function is not None
    with refused(InvalidQuery, field):
        function.read_parameters(positional, named, "measures.m")


def test_arguments_are_checked_by_type() -> None:
    quantiles, distinct = function_named("quantiles"), function_named("distinct")
    assert quantiles is not None and distinct is not None
    quantiles.check_argument(pa.int64(), "m")
    with refused(InvalidQuery, "m"):
        quantiles.check_argument(pa.string(), "m")
    for kind in (pa.string(), pa.int64(), pa.float64(), pa.bool_()):
        distinct.check_argument(kind, "m")


def test_a_single_synopsis_and_its_stack_are_of_one_kind() -> None:
    for single in (HyperLogLog, DDSketch):
        assert single.kind == single.stack_type.kind
        assert single.properties is single.stack_type.properties


def test_every_synopsis_with_a_seed_has_the_one_of_its_query() -> None:
    """`Function.seeded` tells; a kind that forgets it would keep the public default."""
    seeded = set()
    for name in function_names():
        function = function_named(name)
        assert function is not None
        if any(parameter.default is REQUIRED for parameter in function.parameters.values()):
            continue
        parameters = function.read_parameters([], {}, "m")
        default, drawn = function.stack(parameters, None), function.stack(parameters, None, 7)
        if default.to_message().seed:
            seeded.add(name)
            assert drawn.to_message().seed == 7 != default.to_message().seed, name
        assert function.seeded == (name in seeded), name
    assert seeded >= {"bloom", "count_min", "cuckoo", "distinct", "fast_agms", "kll", "kmeans", "reservoir", "top_k"}
