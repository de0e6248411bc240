from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from center.job.warm_up import installed_on_executors, problem_of_executors

pytestmark = pytest.mark.spark


def test_executors_with_this_release_have_no_problem(spark: Any) -> None:
    assert set(installed_on_executors(spark, 2).values()) == {version("edgewater")}
    assert problem_of_executors(spark, 2) == ""


@pytest.mark.parametrize(
    ("distribution", "found"),
    [("no-such-distribution", "no no-such-distribution"), ("numpy", f"numpy {version('numpy')}")],
)
def test_executors_without_it_or_with_another_release_are_named_with_the_remedy(
    spark: Any, distribution: str, found: str
) -> None:
    problem = problem_of_executors(spark, 1, distribution)

    assert f"has {found}; expected {version('edgewater')}" in problem
    assert "spark.archives" in problem
