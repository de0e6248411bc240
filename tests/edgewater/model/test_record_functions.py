from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from edgewater.base.errors import InvalidQuery
from edgewater.functions_cli import functions
from edgewater.model import record_functions
from edgewater.model.expressions import bind
from edgewater.model.query import QuerySpec
from edgewater.model.record_functions import (
    CallFailures,
    FunctionCallError,
    RecordFunction,
    RecordFunctions,
    RecordFunctionWarning,
)
from edgewater.model.syntax import null_rejecting_columns, parse_sql
from tests.edgewater.functions_world import Counting, install_functions
from tests.examples import examples
from tests.packages import write_package
from tests.query_specs import query_spec
from tests.refusals import refused

Install = Callable[[str, str], None]
COLUMNS = {"i": pa.int64(), "f": pa.float64(), "g": pa.float64(), "s": pa.string(), "b": pa.bool_()}
PACKAGE = """
    import pyarrow.compute as pc
    from edgewater.model.record_functions import RecordFunction
    ALL = RecordFunction("{name}", {arguments}, "{result}", {evaluate}, {expensive})
"""
DEFAULTS = {"name": "score", "arguments": ("string",), "result": "bool", "evaluate": "pc.string_is_ascii",
            "expensive": True}  # fmt: skip


def package(**parts: object) -> str:
    return PACKAGE.format(**{**DEFAULTS, **parts})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs distributions that provide `ALL` on a separate path; no others are discovered."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def points() -> list[Any]:
        found = distributions(path=[str(tmp_path)])
        return [p for d in found for p in d.entry_points.select(group=record_functions.GROUP)]

    monkeypatch.setattr(record_functions, "INSTALLED", RecordFunctions(points))
    modules = set(sys.modules)

    def put(distribution: str, source: str) -> None:
        write_package(tmp_path, distribution, source, record_functions.GROUP, {"it": f"{distribution}:ALL"})

    yield put
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def query(**parts: object) -> QuerySpec:
    return query_spec(parts)


def evaluate(text: str, failures: CallFailures | None = None, **columns: list[Any]) -> list[Any]:
    rows = max((len(v) for v in columns.values()), default=0)
    batch = pa.record_batch({n: pa.array(columns.get(n, [None] * rows), t) for n, t in COLUMNS.items()})
    bound = bind(parse_sql(text, "where"), COLUMNS, "where", failures)
    result = bound.array(batch)
    assert result.type == bound.type and len(result) == rows
    values: list[Any] = result.to_pylist()
    return values


def test_a_package_is_imported_only_when_a_query_calls_a_function_that_is_not_built_in(install: Install) -> None:
    install("scores", package())
    query(where="abs(i) > 3", measures={"total": "sum(round(f))"})
    assert "scores" not in sys.modules
    spec = query(where="Score(s)")
    assert "scores" in sys.modules
    assert QuerySpec.from_mapping(spec.to_mapping()) == spec
    assert evaluate("score(s)", s=["a", "é", None]) == [True, False, None]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import a_package_that_is_not_there\n", "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("ALL = len\n", "<built-in function len> is not a RecordFunction"),
        (package(name="Score"), "function 'Score': a name consists of lower-case letters"),
        (package(name="upper"), r"function upper: upper\(…\) has another meaning in SQL"),
        (package(name="case"), r"function case: case\(…\) has another meaning in SQL"),
        (package(name="md5"), r"function md5: md5\(…\) has another meaning in SQL"),
        (package(name="top_k"), "function top_k: a measure's function has this name"),
        (package(arguments=()), r"function score: arguments is \(\); expected a tuple of one or more of string, int64"),
        (package(arguments=("text",)), r"function score: \['text'\] are not column types"),
        (package(result="int32"), r"function score: \['int32'\] are not column types"),
        (package(evaluate="'twice'"), "function score: evaluate is 'twice'"),
        (package(expensive="'very'"), "function score: expensive is 'very'"),
        (package() + "    ALL = (ALL, ALL)\n", "it provides two functions with the same name"),
    ],
)
def test_an_invalid_plugin_is_named_and_the_others_load(install: Install, source: str, what: str) -> None:
    install("broken", source)
    install("sound", package(name="other"))
    with pytest.warns(RecordFunctionWarning, match=what) as caught:
        assert record_functions.find("OTHER") is not None
    assert str(caught[0].message).startswith("functions of broken 1.2 (entry point it = broken:ALL): ")
    assert list(record_functions.installed()) == ["other"], "an entry point is registered completely or not at all"
    with refused(InvalidQuery, "where"):
        query(where="nobodys(s)")


def test_of_two_packages_with_the_same_function_name_the_first_by_distribution_wins(install: Install) -> None:
    install("zebra", package())
    install("aardvark", package())
    with pytest.warns(RecordFunctionWarning, match=r"zebra 1\.2 .*'score' is already registered by aardvark 1\.2"):
        assert record_functions.find("score") is not None


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"where": "nobodys(s) > 1 AND i = 2"}, "where"),
        ({"measures": {"m": "sum(2 * nobodys(s))"}}, "measures.m"),
        ({"measures": {"m": "distinct(nobodys(s))"}}, "measures.m"),
    ],
)
def test_a_call_of_an_unknown_function_is_refused_when_the_query_is_read(
    install: Install, parts: dict[str, object], field: str
) -> None:
    install("scores", package())
    with refused(InvalidQuery, field):
        query(**parts)


TYPED = (
    "near(f)", "near(f, s)", "near(f, b)", "whole(f)", "whole(DISTINCT i)", "whole(*)", "near(f, missing)",
    "length(whole(i))",
)  # fmt: skip


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counting]:
    """Functions by name, for the tests of expressions."""
    broken = Counting(lambda value: 1 / 0)
    install_functions(
        monkeypatch,
        RecordFunction("near", ("float64", "float64"), "float64", lambda a, b: pc.abs(pc.subtract(a, b)), False),
        RecordFunction("whole", ("int64",), "int64", lambda a: pa.chunked_array([a])),
        RecordFunction("joined", ("string", "int64"), "string",
                       lambda s, i: pa.array([f"{a}{b}" for a, b in zip(s.to_pylist(), i.to_pylist(), strict=True)])),
        broken.named("broken"),
    )  # fmt: skip
    return {"broken": broken}


@pytest.mark.parametrize("text", TYPED)
def test_arguments_are_checked_when_the_expression_is_bound(known: object, text: str) -> None:
    with refused(InvalidQuery, "where"):
        evaluate(text, i=[1])


def test_calls_nest_widen_integers_and_take_literals(known: object) -> None:
    assert evaluate("near(i, 2.5)", i=[1, None, 4]) == [1.5, None, 1.5]
    assert evaluate("near(near(f, 1), -i) + 1", f=[3.0, 1.0], i=[2, 2]) == [5.0, 3.0]
    assert evaluate("joined('a', 7)", i=[0, 0]) == ["a7", "a7"]
    assert evaluate("CASE WHEN near(f, 0) > 1 THEN whole(i) ELSE 0 END", f=[2.0, 0.5], i=[5, 6]) == [5, 0]
    assert evaluate("near(f, NULL)", f=[1.0]) == [None]
    assert evaluate("near(f, 1.0)", f=[]) == []


cells = st.lists(st.tuples(st.none() | st.text(max_size=3), st.none() | st.integers(-9, 9)), max_size=12)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=cells)
def test_records_with_a_null_argument_are_not_evaluated_and_the_others_keep_their_order(
    known: object, rows: list[tuple[str | None, int | None]]
) -> None:
    """`joined` would print None for a null, and fails on empty arrays."""
    strings, numbers = [s for s, _ in rows], [i for _, i in rows]
    expected = [None if s is None or i is None else f"{s}{i}" for s, i in rows]
    assert evaluate("joined(s, i)", s=strings, i=numbers) == expected


def test_nan_and_infinities_are_null() -> None:
    result = RecordFunction("f", ("float64",), "float64", lambda x: x)([pa.array([1.0, float("nan"), float("inf")])])
    assert result.to_pylist() == [1.0, None, None]


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def speechless(_: pa.Array) -> pa.Array:
    raise Unreadable


def talkative(_: pa.Array) -> pa.Array:
    raise ValueError("x" * 10_000)


def leave(_: pa.Array) -> pa.Array:
    raise SystemExit("a script's habit")


@pytest.mark.parametrize(
    ("result", "function", "reason", "detail"),
    [
        ("float64", lambda x: 1 / 0, "ZeroDivisionError", "division by zero"),
        ("float64", leave, "SystemExit", "a script's habit"),
        ("float64", speechless, "Unreadable", "Unreadable: (its message cannot be read)"),
        ("float64", talkative, "ValueError", "ValueError: " + "x" * 500 + "…"),
        ("float64", lambda x: x.slice(1), "wrong length", "it returned 1 values for 2 records"),
        (
            "float64",
            lambda x: x.cast(pa.float32()),
            "wrong type",
            "it returned float; expected an Arrow array of double",
        ),
        ("float64", lambda x: x.to_numpy(), "wrong type", "it returned a ndarray; expected an Arrow array of double"),
        ("float64", lambda x: None, "wrong type", "it returned a NoneType"),
        ("string", lambda x: pa.Array.from_buffers(pa.string(), 2, [None, None, None]), "ArrowInvalid", ""),
    ],
)
def test_a_failed_call_gives_null_and_is_counted_by_reason(
    monkeypatch: pytest.MonkeyPatch, result: str, function: Callable[[Any], Any], reason: str, detail: str
) -> None:
    install_functions(monkeypatch, RecordFunction("wrong", ("float64",), result, function))
    failures = CallFailures()
    for _ in range(3):
        assert evaluate("wrong(f)", failures, f=[1.0, 2.0, None]) == [None, None, None]
    (failed,) = failures.take()
    assert (failed.function, failed.reason, failed.calls) == ("wrong", reason, 3) and detail in failed.detail
    assert failures.take() == []
    with pytest.raises(FunctionCallError):
        record_functions.installed()["wrong"]([pa.array([1.0, 2.0])])


def test_a_keyboard_interrupt_passes_through() -> None:
    def interrupted(_: pa.Array) -> pa.Array:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RecordFunction("f", ("float64",), "float64", interrupted)([pa.array([1.0])])


def test_failures_of_one_kind_keep_the_message_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(value: float) -> float:
        raise ValueError(f"of {value}")

    install_functions(monkeypatch, Counting(bad).named("wrong"))
    failures = CallFailures()
    for value in (1.0, 2.0, 3.0):
        evaluate("wrong(f)", failures, f=[value])
    (failed,) = failures.take()
    assert failed.detail == "ValueError: of 1.0" and failed.calls == 3


@pytest.mark.parametrize(
    ("measure", "expensive"),
    [
        ("count()", False),
        ("sum(f)", False),
        ("sum(abs(f))", False),
        ("sum(near(f, 1))", False),
        ("sum(whole(i))", True),
        ("mean(near(f, 1 + whole(i)))", True),
        ("distinct(WHOLE(i))", True),
    ],
)
def test_a_measure_is_expensive_if_it_calls_an_expensive_function(known: object, measure: str, expensive: bool) -> None:
    (read,) = query(measures={"m": measure}).measures
    assert read.is_expensive is expensive


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("whole(i)", ["i"]),
        ("near(f, g) * 2 - i", ["f", "g", "i"]),
        ("coalesce(whole(i), 0)", []),
        ("coalesce(f, 0) + near(f, g)", ["f", "g"]),
        ("CASE WHEN b THEN f ELSE g END", []),
        ("CAST(near(f, 1) > 2 AS BIGINT)", ["f"]),
        ("i IS NULL", []),
    ],
)
def test_columns_whose_null_makes_the_expression_null(known: object, text: str, columns: list[str]) -> None:
    assert null_rejecting_columns(parse_sql(text, "")) == columns
    rows = {name: [2] for name in ("i", "f", "g")}
    for name in columns:
        assert evaluate(text, **{**rows, "b": [True], name: [None]}) == [None]


def test_the_command_says_if_no_package_provides_functions(install: Install) -> None:
    listed = CliRunner().invoke(functions)
    assert listed.exit_code == 0 and "no installed package provides functions" in listed.output


def test_the_command_prints_types_cost_and_origin(install: Install) -> None:
    install("scores", package())
    listed = CliRunner().invoke(functions)
    assert listed.exit_code == 0, listed.output
    assert listed.output == "score(string) -> bool\n    expensive; from scores 1.2 (entry point it = scores:ALL)\n"


def test_the_command_fails_for_a_broken_package_and_names_it(install: Install) -> None:
    install("scores", package())
    install("broken", "ALL = 7\n")
    with pytest.warns(RecordFunctionWarning):
        record_functions.installed()
    as_json = CliRunner().invoke(functions, ["--json"])
    assert as_json.exit_code == 1 and "functions of broken 1.2" in as_json.stderr and "7 is not" in as_json.stderr
    (listed,) = json.loads(as_json.stdout)["functions"]
    assert listed == {
        "name": "score", "function": "score(string)", "arguments": ["string"], "result": "bool", "expensive": True,
        "origin": "scores 1.2 (entry point it = scores:ALL)",
    }  # fmt: skip
