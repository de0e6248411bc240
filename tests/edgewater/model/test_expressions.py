from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import InvalidQuery
from edgewater.model.binding import Binder, BoundExpression
from edgewater.model.expressions import bind, bind_condition
from edgewater.model.syntax import MAX_DEPTH, column_names, parse_sql
from tests.examples import examples
from tests.refusals import refused

COLUMNS = {
    "i": pa.int64(),
    "j": pa.int64(),
    "f": pa.float64(),
    "s": pa.string(),
    "b": pa.bool_(),
    "c": pa.bool_(),
    "g": pa.float64(),
}
LEAST, GREATEST = -(1 << 63), (1 << 63) - 1


def batch_of(**columns: list[Any]) -> pa.RecordBatch:
    rows = max(len(v) for v in columns.values())
    return pa.record_batch({n: pa.array(columns.get(n, [None] * rows), t) for n, t in COLUMNS.items()})


def evaluate(text: str, **columns: list[Any]) -> list[Any]:
    bound = bind(parse_sql(text, "where"), COLUMNS, "where")
    result = bound.array(batch_of(**columns))
    assert result.type == bound.type, "the type that was announced"
    values: list[Any] = result.to_pylist()
    return values


def alike(left: Any, right: Any) -> bool:
    return left == right or (left != left and right != right)


EDGE_INTEGERS = st.sampled_from([LEAST, LEAST + 1, GREATEST, 1 << 53, (1 << 53) + 1])
INTEGERS = st.none() | st.integers(-5, 5) | EDGE_INTEGERS | st.integers(LEAST, GREATEST)
FLOATS = st.none() | st.sampled_from([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan]) | st.floats()
TEXTS = st.none() | st.sampled_from(["", "a", "A", "ab", "a%b", "ä", "x\ny", " a "]) | st.text(max_size=4)


def in_int64(value: int) -> int | None:
    return value if LEAST <= value <= GREATEST else None


def remainder(a: int, b: int) -> int | None:
    """SQL's: with the sign of the dividend."""
    return None if b == 0 else abs(a) % abs(b) * (-1 if a < 0 else 1)


EXACT: dict[str, Callable[[int, int], int | None]] = {
    "i + j": lambda a, b: in_int64(a + b),
    "i - j": lambda a, b: in_int64(a - b),
    "i * j": lambda a, b: in_int64(a * b),
    "i % j": remainder,
}


@examples(300)
@given(st.sampled_from(sorted(EXACT)), st.lists(st.tuples(INTEGERS, INTEGERS), min_size=1, max_size=8))
def test_integer_arithmetic_is_exact_and_null_beyond_64_bits(text: str, rows: list[tuple[Any, Any]]) -> None:
    expected = [None if a is None or b is None else EXACT[text](a, b) for a, b in rows]
    assert evaluate(text, i=[a for a, _ in rows], j=[b for _, b in rows]) == expected


@given(st.lists(INTEGERS, min_size=1, max_size=6))
def test_signs_of_integers(values: list[int | None]) -> None:
    assert evaluate("-i", i=values) == [None if v is None else in_int64(-v) for v in values]
    assert evaluate("abs(i)", i=values) == [None if v is None else in_int64(abs(v)) for v in values]


@given(st.lists(st.tuples(INTEGERS, INTEGERS), min_size=1, max_size=6))
def test_division_is_floating_point_and_null_by_zero(rows: list[tuple[Any, Any]]) -> None:
    expected = [None if a is None or b is None or b == 0 else float(a) / float(b) for a, b in rows]
    assert evaluate("i / j", i=[a for a, _ in rows], j=[b for _, b in rows]) == expected


@given(st.lists(st.tuples(FLOATS, INTEGERS), min_size=1, max_size=6))
def test_mixed_numbers_become_floats(rows: list[tuple[Any, Any]]) -> None:
    f, i = [a for a, _ in rows], [b for _, b in rows]
    got = evaluate("f + i", f=f, i=i)
    expected = [None if a is None or b is None else a + float(b) for a, b in rows]
    assert all(map(alike, got, expected))
    assert evaluate("f < i", f=f, i=i) == [None if a is None or b is None else a < float(b) for a, b in rows]


def test_division_by_a_float_zero_is_null_too() -> None:
    assert evaluate("1 / f", f=[0.0, -0.0, 2.0, None]) == [None, None, 0.5, None]
    assert evaluate("f % 0", f=[1.0]) == [None]
    assert evaluate("f % 2", f=[5.5, -5.5]) == [1.5, -1.5]
    assert evaluate("1 / 0", i=[1]) == [None]


COMPARISONS = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@given(st.sampled_from(sorted(COMPARISONS)), st.lists(st.tuples(INTEGERS, INTEGERS), min_size=1, max_size=6))
def test_a_comparison_with_null_is_unknown(sign: str, rows: list[tuple[Any, Any]]) -> None:
    expected = [None if a is None or b is None else COMPARISONS[sign](a, b) for a, b in rows]
    assert evaluate(f"i {sign} j", i=[a for a, _ in rows], j=[b for _, b in rows]) == expected


def conjunction(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def disjunction(a: bool | None, b: bool | None) -> bool | None:
    return True if a or b else None if a is None or b is None else False


@pytest.mark.parametrize("a", [True, False, None])
@pytest.mark.parametrize("b", [True, False, None])
def test_logic_has_three_values(a: bool | None, b: bool | None) -> None:
    assert evaluate("b AND c", b=[a], c=[b]) == [conjunction(a, b)]
    assert evaluate("b OR c", b=[a], c=[b]) == [disjunction(a, b)]
    assert evaluate("NOT b", b=[a], c=[b]) == [None if a is None else not a]
    assert evaluate("b = c", b=[a], c=[b]) == [None if a is None or b is None else a == b]


def test_null_as_every_operand() -> None:
    assert evaluate("i = NULL", i=[1, None]) == [None, None]
    assert evaluate("i IS NULL", i=[1, None]) == [False, True]
    assert evaluate("i IS NOT NULL", i=[1, None]) == [True, False]
    assert evaluate("f IS NULL", f=[math.nan, None]) == [False, True]
    assert evaluate("NULL", i=[1, 2]) == [None, None]
    assert evaluate("i + NULL", i=[1, 2]) == [None, None]
    assert evaluate("abs(NULL)", i=[1]) == [None]


@given(st.lists(INTEGERS, min_size=1, max_size=6))
def test_between_and_in_and_their_negations(values: list[int | None]) -> None:
    known = [v is not None for v in values]
    assert evaluate("i BETWEEN -1 AND 3", i=values) == [
        -1 <= v <= 3 if k else None for v, k in zip(values, known, strict=True)
    ]  # type: ignore[operator]
    assert evaluate("i NOT BETWEEN -1 AND 3", i=values) == [
        not -1 <= v <= 3 if k else None for v, k in zip(values, known, strict=True)
    ]  # type: ignore[operator]
    assert evaluate("i IN (1, -2, 5)", i=values) == [
        v in (1, -2, 5) if k else None for v, k in zip(values, known, strict=True)
    ]
    assert evaluate("i NOT IN (1, 2.5)", i=values) == [
        float(v) not in (1, 2.5) if k else None for v, k in zip(values, known, strict=True)
    ]  # type: ignore[arg-type]


def test_between_with_a_null_bound_may_be_false() -> None:
    assert evaluate("i BETWEEN NULL AND 3", i=[1, 4, None]) == [None, False, None]
    assert evaluate("s BETWEEN 'a' AND 'c'", s=["b", "d", None]) == [True, False, None]


def test_in_takes_every_type() -> None:
    assert evaluate("s IN ('a', 'it''s')", s=["a", "it's", "b", None]) == [True, True, False, None]
    assert evaluate("b IN (true)", b=[True, False, None]) == [True, False, None]
    assert evaluate("1 IN (1, 2)", i=[None]) == [True]


def test_like() -> None:
    texts = ["abc", "aXc", "ac", "a\nc", "", None, "a%c"]
    assert evaluate("s LIKE 'a_c'", s=texts) == [True, True, False, True, False, None, True]
    assert evaluate("s LIKE 'a%c'", s=texts) == [True, True, True, True, False, None, True]
    assert evaluate("s NOT LIKE 'a%'", s=texts) == [False, False, False, False, True, None, False]
    assert evaluate("NOT s LIKE 'a%'", s=texts) == [False, False, False, False, True, None, False]
    assert evaluate("s NOT ILIKE 'A%'", s=texts) == [False, False, False, False, True, None, False]
    assert evaluate("s ILIKE 'A_C'", s=texts) == [True, True, False, True, False, None, True]
    assert evaluate("s LIKE 'a.c'", s=["abc", "a.c"]) == [False, True], "no regular expression"


def test_case_takes_the_first_branch_that_is_true() -> None:
    text = "CASE WHEN i > 10 THEN 'big' WHEN i > 0 THEN 'small' ELSE 'none' END"
    assert evaluate(text, i=[11, 5, -1, None]) == ["big", "small", "none", "none"]
    assert evaluate("CASE WHEN i > 0 THEN 1 END", i=[1, 0, None]) == [1, None, None]
    assert evaluate("CASE WHEN b THEN i ELSE f END", b=[True, False, None], i=[1, 1, 1], f=[0.5] * 3) == [1.0, 0.5, 0.5]
    assert evaluate("CASE WHEN b THEN NULL ELSE i END", b=[True, False], i=[1, 2]) == [None, 2]


def test_coalesce_and_nullif() -> None:
    assert evaluate("coalesce(i, j, 0)", i=[1, None, None], j=[5, 2, None]) == [1, 2, 0]
    assert evaluate("coalesce(i, 0.5)", i=[1, None]) == [1.0, 0.5]
    assert evaluate("ifnull(s, '?')", s=["a", None]) == ["a", "?"]
    assert evaluate("nullif(i, 0)", i=[0, 1, None]) == [None, 1, None]
    assert evaluate("nullif(i, j)", i=[1, 1, None], j=[1, None, None]) == [None, 1, None]


def test_number_functions() -> None:
    assert evaluate("ceil(f)", f=[1.2, -1.2, None]) == [2.0, -1.0, None]
    assert evaluate("floor(f)", f=[1.2, -1.2, None]) == [1.0, -2.0, None]
    assert evaluate("round(f)", f=[0.4, 0.6, -0.6, None]) == [0.0, 1.0, -1.0, None]
    assert evaluate("round(f, 1)", f=[1.26]) == [1.3]
    assert evaluate("sqrt(i)", i=[9, None]) == [3.0, None]
    assert math.isnan(evaluate("sqrt(i)", i=[-1])[0])
    assert evaluate("ln(f)", f=[1.0, 0.0]) == [0.0, -math.inf]
    assert evaluate("abs(f)", f=[-1.5]) == [1.5]
    assert evaluate("isnan(f)", f=[1.0, math.nan, math.inf, None]) == [False, True, False, None]
    assert evaluate("isfinite(f)", f=[1.0, math.nan, -math.inf, None]) == [True, False, False, None]
    assert evaluate("isfinite(i)", i=[1, None]) == [True, None]


def as_spark_rounds(value: float, decimals: int) -> float:
    return float(Decimal(repr(value)).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP))


@given(
    st.sampled_from([0, 1, 2, 3]),
    st.lists(
        st.floats(-1e9, 1e9)
        | st.integers(-(10**6), 10**6).map(lambda n: n / 8)
        | st.integers(-(10**6), 10**6).map(lambda n: n / 1000)
        | st.integers(0, 10**5).map(lambda n: math.nextafter((n + 0.5) / 100, 0)),
        min_size=1,
    ),
)
@examples(200)
def test_ties_are_rounded_away_from_zero_as_in_spark(decimals: int, values: list[float]) -> None:
    assert evaluate(f"round(f, {decimals})", f=values) == [as_spark_rounds(value, decimals) for value in values]


def test_rounding_of_ties_negatives_and_values_that_are_not_finite() -> None:
    values = [0.5, 1.5, 2.5, -0.5, -2.5, -0.3, math.inf, None, 2.0**52 + 1]
    assert evaluate("round(f)", f=values) == [1.0, 2.0, 3.0, -1.0, -3.0, 0.0, math.inf, None, 2.0**52 + 1]
    assert evaluate("round(f, 2)", f=[1.005, 2.675, -2.675, 0.145]) == [1.01, 2.68, -2.68, 0.15]
    assert math.isnan(evaluate("round(f)", f=[math.nan])[0])
    assert evaluate("round(2.5)", i=[1]) == [3.0]


def test_nan_is_greater_than_all_numbers_in_greatest_and_least_and_unlike_all_in_comparisons() -> None:
    left, right = [math.nan, 1.0, None, math.nan, None, math.nan], [1.0, math.nan, math.nan, None, None, math.nan]
    expected = [math.nan, math.nan, math.nan, math.nan, None, math.nan]
    assert all(map(alike, evaluate("greatest(f, g)", f=left, g=right), expected))
    expected = [1.0, 1.0, math.nan, math.nan, None, math.nan]
    assert all(map(alike, evaluate("least(f, g)", f=left, g=right), expected))
    assert all(map(alike, evaluate("greatest(f, 1, i)", f=[math.nan, 0.5], i=[7, None]), [math.nan, 1.0]))
    assert evaluate("greatest(i, j)", i=[1, None, None], j=[2, 3, None]) == [2, 3, None]
    assert evaluate("greatest(s, 'b')", s=["a", "c", None]) == ["b", "c", "b"]
    for sign in ("=", "<", ">", "<=", ">="):
        assert evaluate(f"f {sign} g", f=[math.nan, math.nan, 1.0], g=[math.nan, 1.0, None]) == [False, False, None]
    assert evaluate("f <> g", f=[math.nan, math.nan], g=[math.nan, 1.0]) == [True, True]
    assert evaluate("f BETWEEN 0 AND 9", f=[math.nan, None, 5.0]) == [False, None, True]


def test_remainders_have_the_sign_of_the_dividend_and_are_exact() -> None:
    assert evaluate("i % j", i=[-7, 7, -7, LEAST], j=[2, -2, -2, -1]) == [-1, 1, -1, 0]
    values, divisors = [-7.5, 7.5, 1e17, 5.5, math.inf, 1.0, None], [2.0, -2.0, 3.0, math.inf, 2.0, 0.0, 1.0]
    got = evaluate("f % g", f=values, g=divisors)
    assert all(map(alike, got, [-1.5, 1.5, 1.0, 5.5, math.nan, None, None]))
    assert evaluate("i / j", i=[-7, 7, 1], j=[2, -2, 0]) == [-3.5, -3.5, None]


def test_text_functions() -> None:
    assert evaluate("lower(s)", s=["Ä", None]) == ["ä", None]
    assert evaluate("upper(s)", s=["ä"]) == ["Ä"]
    assert evaluate("trim(s)", s=["  a b "]) == ["a b"]
    assert evaluate("length(s)", s=["日本", "", None]) == [2, 0, None]


@given(st.lists(TEXTS | st.integers(LEAST - 2, GREATEST + 2).map(str), min_size=1, max_size=8))
def test_a_text_that_is_not_a_number_casts_to_null(texts: list[str | None]) -> None:
    def integer(text: str | None) -> int | None:
        stripped = (text or "").strip()
        digits = stripped.removeprefix("+") if stripped.startswith("+") else stripped.removeprefix("-")
        return in_int64(int(stripped)) if digits.isascii() and digits.isdigit() else None

    assert evaluate("CAST(s AS BIGINT)", s=texts) == [integer(t) for t in texts]


def test_casts_between_all_types() -> None:
    assert evaluate("CAST(s AS BIGINT)", s=["+007", " 12 ", "-0", "1.0", "", "9223372036854775808", "1e3"]) == [
        7, 12, 0, None, None, None, None]  # fmt: skip
    got = evaluate("CAST(s AS DOUBLE)", s=["1", "-.5e1", "+2.", "inf", "-Infinity", "NaN", "x", "1e999", "0x10", "1_0"])
    expected = [1.0, -5.0, 2.0, math.inf, -math.inf, math.nan, None, math.inf, None, None]
    assert all(map(alike, got, expected))
    assert evaluate("CAST(s AS BOOLEAN)", s=["true", " FALSE", "1", "yes", None]) == [True, False, True, None, None]
    assert evaluate("CAST(f AS BIGINT)", f=[1.9, -1.9, math.nan, math.inf, 1e19, 2.0**63, -(2.0**63)]) == [
        1, -1, None, None, None, None, LEAST]  # fmt: skip
    assert evaluate("CAST(i AS VARCHAR)", i=[1, None]) == ["1", None]
    assert evaluate("CAST(b AS BIGINT)", b=[True, None]) == [1, None]
    assert evaluate("CAST(i AS BOOLEAN)", i=[0, 2]) == [False, True]
    assert evaluate("TRY_CAST(s AS BIGINT)", s=["x", "1"]) == [None, 1]
    assert evaluate("i::DOUBLE", i=[GREATEST]) == [2.0**63]


@given(st.lists(TEXTS, min_size=1, max_size=8), st.integers(-3, 4).filter(bool), st.sampled_from(["a", "x", "\n"]))
def test_parts_of_texts(values: list[str | None], number: int, part: str) -> None:
    def part_of(text: str) -> str:
        parts = text.split(part)
        at = number - 1 if number > 0 else len(parts) + number
        return parts[at] if 0 <= at < len(parts) else ""

    cases: dict[str, Callable[[str], Any]] = {
        f"split_part(s, '{part}', {number})": part_of,
        f"substring(s, {abs(number)}, 2)": lambda s: s[abs(number) - 1 : abs(number) + 1],
        f"substring(s, {abs(number)})": lambda s: s[abs(number) - 1 :],
        f"left(s, {number})": lambda s: s[:number],
        f"right(s, {number})": lambda s: s[-number:],
        f"replace(s, '{part}', '<->')": lambda s: s.replace(part, "<->"),
        f"starts_with(s, '{part}')": lambda s: s.startswith(part),
        f"ends_with(s, '{part}')": lambda s: s.endswith(part),
        f"contains(s, '{part}')": lambda s: part in s,
        "s || '-' || s": lambda s: f"{s}-{s}",
        "CASE s WHEN 'a' THEN 1 WHEN 'A' THEN 2 ELSE 3 END": lambda s: {"a": 1, "A": 2}.get(s, 3),
    }
    for text, truth in cases.items():
        expected = [None if value is None else truth(value) for value in values]
        if text.startswith("CASE"):
            expected = [3 if value is None else truth(value) for value in values]
        assert evaluate(text, s=values) == expected, text
    assert evaluate("concat(s, i, 'x')", s=values, i=[None] * len(values)) == [f"{value or ''}x" for value in values]


PATTERNS = ["a", "(a)(b)?", "^.", "(?i)A", "[^a]+", r"(\w)\b", "x\ny", "(?:a|ab)(.*)", "b$"]


@given(st.lists(TEXTS.filter(lambda s: s is None or s.isascii()), min_size=1, max_size=8), st.sampled_from(PATTERNS))
def test_regular_expressions(values: list[str | None], pattern: str) -> None:
    compiled = re.compile(pattern.replace("$", r"\Z"))
    first = int(compiled.groups > 0)
    matches = [None if value is None else compiled.search(value) for value in values]
    got = evaluate(f"regexp_extract(s, '{pattern}')", s=values)
    assert got == [None if match is None else match.group(first) or "" for match in matches]
    assert evaluate(f"regexp_extract(s, '{pattern}', 0)", s=values) == [m and m.group() for m in matches]
    tests = evaluate(f"regexp_like(s, '{pattern}')", s=values)
    assert tests == [None if v is None else m is not None for v, m in zip(values, matches, strict=True)]


ZONES = ["UTC", "Europe/Berlin", "America/Sao_Paulo", "Australia/Lord_Howe", "Asia/Kathmandu", "Pacific/Apia"]
CLOCK_CHANGES = [
    1_729_990_800_000,  # Berlin: 2024-10-27, an hour twice
    1_711_846_800_000,  # Berlin: 2024-03-31, an hour skipped
    1_541_300_400_000,  # Sao Paulo: 2018-11-04, no midnight
    1_728_142_200_000,  # Lord Howe: 2024-10-06, half an hour
    1_325_239_200_000,  # Apia: 2011-12-30, no such day
]
TIMES = st.sampled_from(CLOCK_CHANGES).flatmap(lambda at: st.integers(at - 90_000_000, at + 90_000_000)) | st.integers(
    -10_000_000_000, 4_000_000_000_000
)


@given(st.lists(TIMES, min_size=1, max_size=6), st.sampled_from(ZONES))
def test_calendars_follow_the_clocks_of_a_zone(times: list[int], zone: str) -> None:
    at = f"i AT TIME ZONE '{zone}'"
    local = [datetime.fromtimestamp(ms // 1000, ZoneInfo(zone)) for ms in times]
    assert evaluate(f"hour({at})", i=times) == [t.hour for t in local]
    assert evaluate(f"extract(isodow FROM {at})", i=times) == [t.isoweekday() for t in local]
    assert evaluate(f"week({at})", i=times) == [t.isocalendar().week for t in local]
    assert evaluate(f"strftime({at}, '%Y-%m-%d %H:%M:%S')", i=times) == [f"{t:%Y-%m-%d %H:%M:%S}" for t in local]
    for begin, ms in zip(evaluate(f"date_trunc('day', {at})", i=times), times, strict=True):
        day = datetime.fromtimestamp(begin / 1000, ZoneInfo(zone))
        assert begin <= ms and day.date() == datetime.fromtimestamp(ms / 1000, ZoneInfo(zone)).date()
        before = datetime.fromtimestamp(begin / 1000 - 0.001, ZoneInfo(zone))
        assert before.date() < day.date(), "the first instant of the day"
    for begin, ms in zip(evaluate(f"date_trunc('minute', {at})", i=times), times, strict=True):
        assert begin == ms // 60_000 * 60_000


def test_times_outside_the_calendar_are_null() -> None:
    for text in ("hour(i)", "date_trunc('month', i AT TIME ZONE 'Europe/Berlin')", "strftime(i, '%Y')"):
        assert evaluate(text, i=[LEAST, GREATEST, None, 1 << 52]) == [None] * 4


@given(st.lists(TEXTS, min_size=1, max_size=8))
def test_an_expression_of_one_text_column_reads_each_distinct_text_once(values: list[str | None]) -> None:
    doubled = evaluate("coalesce(s, 'none') || length(s)", s=values + values)
    assert doubled == [None if v is None else v + str(len(v)) for v in values + values]


def test_constants_fill_the_batch_whatever_its_length() -> None:
    bound = bind(parse_sql("1 + 1", ""), COLUMNS, "")
    for rows in (0, 1, 3):
        assert bound.array(batch_of(i=[1] * rows) if rows else batch_of(i=[1]).slice(1)).to_pylist() == [2] * rows


REFUSED = (
    "x > 1", "t.i > 1", 'i = "a"', "i > 'a'", "b = 1", "s + 1", "lower(i)", "i LIKE 'a'", "s LIKE s",
    "s LIKE ANY ('a', 'b')", "i IN (1, NULL)", "i IN (j)", "i IN (-j)", "i IN (SELECT 1)", "i IN ()", "i IS TRUE",
    "CASE i WHEN 'x' THEN 2 END", "if(b, 1, 'x')", "CASE WHEN i THEN 2 END", "CASE WHEN b THEN 1 ELSE 'x' END",
    "coalesce(i, 'x')", "round(f, j)", "round(f, -1)", "round(f, 1, 1)", "trim('x' FROM s)", "ltrim(s)",
    "ceil(f, 2)", "i BETWEEN SYMMETRIC 3 AND 1", "CAST(s AS BIGINT FORMAT 'x')", "CAST(i AS DECIMAL)", "count(*)",
    "sha256(s)", "dow(i)", "substr(s, i)", "substring(s, 1, -1)", "left(s, 'x')", "split_part(s, '', 1)",
    "split_part(s, '/', 0)", "split_part(s, s, 1)", "replace(s, '', 'x')", "starts_with(s, s)",
    "regexp_like(s, 's', 'i')", "regexp_like(s, '(')", "regexp_like(s, '(?=s)')", r"regexp_extract(s, '(s)\1')",
    "regexp_extract(s, '(s)', 2)", "regexp_extract(s, '(s)', 9)", r"regexp_replace(s, 's', '\1')",
    "regexp_like(s, '" + 1_001 * "x" + "')", "regexp_like(s, 's{1001}')", "s || '" + 5_000 * "x" + "'",
    " || ".join(["s"] * 65), "replace(s, 's', '" + 100 * "x" + "')",
    "replace(replace(s, 's', 'ttttttttt'), 't', 'uuuuuuuuu')", "hour(s)", "hour(i AT TIME ZONE 'Mars/Base')",
    "hour(i AT TIME ZONE s)", "i AT TIME ZONE 'UTC'", "date_trunc('fortnight', i)", "extract(dow FROM i)",
    "strftime(i)", "strftime(i, s)", "99999999999999999999 > i", "i AND b", "NOT i",
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_an_expression_that_does_not_bind_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        bind(parse_sql(text, "where"), COLUMNS, "where")
    assert caught.value.field == "where" and caught.value.accepted


@pytest.mark.parametrize(
    "text", ["", "i >", "i > 1)", "SELECT 1", "DROP TABLE x; SELECT 1", "DELETE FROM x", "i; j", "'open"]
)
def test_statements_and_bad_syntax_are_refused(text: str) -> None:
    with refused(InvalidQuery, "where"):
        bind(parse_sql(text, "where"), COLUMNS, "where")


@pytest.mark.parametrize(
    "text", ["+".join(["i"] * 1900), "(" * 500 + "i" + ")" * 500, " OR ".join(["b"] * (MAX_DEPTH + 1))]
)
def test_an_expression_that_is_nested_too_deeply_is_refused(text: str) -> None:
    with refused(InvalidQuery, "where"):
        parse_sql(text, "where")


@pytest.mark.parametrize("operator", ["+", "-", "*", "/", "%"])
def test_each_operand_of_a_chain_is_bound_once(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []
    original = Binder.bind

    def counted(self: Binder, node: Any) -> BoundExpression:
        bound.append(node)
        return original(self, node)

    monkeypatch.setattr(Binder, "bind", counted)
    operations = 10  # each doubled the work
    bind(parse_sql("i" + f" {operator} i" * operations, "where"), COLUMNS, "where")
    assert len(bound) == 2 * operations + 1


def test_a_condition_must_be_boolean() -> None:
    assert bind_condition(parse_sql("i > 0", "where"), COLUMNS, "where").type == pa.bool_()
    for text in ("i", "NULL", "'true'"):
        with refused(InvalidQuery, "where"):
            bind_condition(parse_sql(text, "where"), COLUMNS, "where")


def test_columns_are_listed_once_in_order_of_appearance() -> None:
    assert column_names(parse_sql("j > 0 AND i IN (1) OR upper(s) = 'x' AND j < 3", "")) == ["j", "i", "s"]


@examples(300)
@given(st.text(max_size=25) | st.text("ijfsb()+-*/<>='\" ANDORSTNULL1.,", max_size=25))
def test_any_text_is_bound_or_refused(text: str) -> None:
    try:
        bound = bind(parse_sql(text, "where"), COLUMNS, "where")
    except InvalidQuery:
        return
    values = bound.array(
        batch_of(i=[1, None], j=[0, 3], f=[math.nan, 1.0], s=["", "x"], b=[True, None], c=[False, True])
    )
    assert len(values) == 2 and values.type == bound.type


ATOMS = st.sampled_from(["i", "j", "f", "1", "0.5", "NULL", "-3", "CAST(s AS BIGINT)", "length(s)"])
NUMBERS = st.recursive(
    ATOMS,
    lambda inner: (
        st.builds(lambda a, op, b: f"({a} {op} {b})", inner, st.sampled_from("+-*/%"), inner)
        | st.builds(lambda a, b: f"coalesce({a}, {b})", inner, inner)
        | st.builds(lambda a, b: f"CASE WHEN {a} > 0 THEN {b} ELSE 7 END", inner, inner)
        | st.builds(lambda a: f"abs({a})", inner)
    ),
    max_leaves=8,
)


@examples(200)
@given(NUMBERS)
def test_the_canonical_text_means_the_same(text: str) -> None:
    columns = {
        "i": [1, None, GREATEST, -7],
        "j": [0, 2, GREATEST, 3],
        "f": [0.5, None, math.nan, -1e300],
        "s": ["5", "x", None, ""],
    }
    canonical = parse_sql(text, "").sql()
    assert parse_sql(canonical, "").sql() == canonical
    assert all(map(alike, evaluate(text, **columns), evaluate(canonical, **columns)))


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("round(f, 2)", 1e308, 1e308),
        ("round(f, 2)", -2.345, -2.35),
        ("round(f, 15)", 0.1234567890123456, 0.123456789012346),
        ("round(f)", math.inf, math.inf),
        ("round(f, 2)", None, None),
        ("NULL = NULL", 1.0, None),
        ("NULL <> NULL", 1.0, None),
        ("NULL BETWEEN NULL AND NULL", 1.0, None),
        ("nullif(NULL, NULL)", 1.0, None),
    ],
)
def test_undefined_values_are_null_and_do_not_fail_the_batch(
    text: str, value: float | None, expected: float | None
) -> None:
    (result,) = evaluate(text, f=[value])
    assert result == (pytest.approx(expected) if expected is not None else None)


def test_more_decimals_than_a_float_has_are_refused() -> None:
    with refused(InvalidQuery, "m"):
        bind(parse_sql("round(f, 16)", "m"), {"f": pa.float64()}, "m")
