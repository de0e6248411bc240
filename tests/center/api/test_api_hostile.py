"""Requests that are made to cost: each is refused, in time that is linear in its bytes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from bench.hostile.__main__ import fuzz
from bench.hostile.targets import all_targets
from edgewater.base.errors import InvalidQuery
from edgewater.base.plain_yaml import MAX_NESTING
from edgewater.model.syntax import MAX_EXPRESSIONS_LENGTH, MAX_TOKENS, parse_sql
from tests.refusals import refused

SPEC: dict[str, Any] = {"name": "n", "from": "flights", "measures": {"n": "count()"}, "window": {"tumbling": "1h"}}
LIMIT_S = 3.0
"""Of CPU time. Far above what is measured (0.4 s at most), far below what the attacks took (seconds to years)."""


def post(desk, body: Any, content_type: str = "application/yaml"):
    content = body if isinstance(body, str) else json.dumps(body)
    return desk.ask("POST", "/v1/queries", content=content, headers={"Content-Type": content_type})


COSTLY: dict[str, tuple[Any, int]] = {
    "500 KB of [": ("[" * 500_000, 413),
    "64 KB of [": ("[" * 65_000, 422),
    "[ in lines": ("[\n" * 32_000, 422),
    "nested sequences": ("- " * 32_000, 422),
    "nested keys": ("? " * 32_000, 422),
    "a number to the base of 60": ("1" + ":59" * 21_000, 422),
    "dates": ("[" + "2013-01-01," * 5_900 + "]", 422),
    "a long list": ({**SPEC, "where": "a in (" + ",".join(["1"] * 20_000) + ")"}, 422),
    "struct(struct(": ({**SPEC, "where": "struct(" * 40 + "a" + ")" * 40}, 422),
    "char(a,char(a,": ({**SPEC, "where": "char(a," * 40}, 422),
    "many expressions": (
        {**SPEC, "measures": {f"m{i}": f"sum(coalesce({','.join('a' * 900)}))" for i in range(32)}},
        422,
    ),
    "LIMIT": ({**SPEC, "measures": {"n": "sum(" + "a ( TANH LIMIT " * 30}}, 422),
    "digits": ({**SPEC, "measures": {"n": "count_min(a, width=" + "9" * 5_000 + ")"}}, 422),
    "half a number": ({**SPEC, "where": "a > 1e"}, 422),
    "digits in an expression": ({**SPEC, "measures": {"n": "sum(a + " + "9" * 5_000 + ")"}}, 422),
}


@pytest.mark.slow
def test_a_query_that_is_made_to_cost_is_refused_in_bounded_time(desk):
    for name, (body, status) in COSTLY.items():
        began_s = time.process_time()
        refused = post(desk, body)
        assert time.process_time() - began_s < LIMIT_S, name
        assert (refused.status_code, len(refused.content) < 2_000) == (status, True), name


@pytest.mark.parametrize("name", ["query/json", "query/yaml", "query/expression", "request"])
def test_mutants_of_honest_input_cost_little_and_are_never_an_error_of_the_center(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = fuzz(all_targets()[name], seed=5, seconds=0, mutants=40, measure=1 << 30)
    assert (outcome.mutants, outcome.failures) == (40, {})


def test_yaml_may_be_nested_as_far_as_the_limit_says(desk):
    nested = "[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1)
    assert f"more than {MAX_NESTING} levels" in post(desk, nested).json()["detail"]
    assert "a mapping" in post(desk, nested[1:-1]).json()["detail"]


def test_an_expression_has_at_most_so_many_tokens():
    with refused(InvalidQuery, "where"):
        parse_sql(f"a IN ({', '.join(['1'] * (MAX_TOKENS // 2))})", "where")
    parse_sql(f"a IN ({', '.join(['1'] * (MAX_TOKENS // 2 - 2))})", "where")


def test_a_longer_expression_is_refused_before_it_is_read():
    text = "'" + "x" * (MAX_EXPRESSIONS_LENGTH - 2) + "'"
    assert parse_sql(text, "where").is_string
    with refused(InvalidQuery, "where"):
        parse_sql(f"{text} ", "where")
