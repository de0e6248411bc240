"""The laws of `edgewater.synopses.testing` for every registered stack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgewater.base.errors import IncompatibleSynopses
from edgewater.synopses.registry import function_named
from edgewater.synopses.testing import Subject, algebra, cases
from tests.edgewater.synopses.battery import subjects

pytestmark = pytest.mark.slow  # thousands of cases: `make quick` leaves them to `make test`

ON_ALL_DATA = {
    algebra.the_order_of_values_makes_no_difference,
    algebra.one_batch_equals_many_batches,
    algebra.any_tree_of_merges_equals_one_pass,
    algebra.bounds_contain_the_estimate,
}
"""Laws that special values may break. The others are about groups, merges and bytes: `OTHER` is enough for them, and
`--full` tests them on all."""

OTHER = {"string": "words", "int64": "huge", "float64": "with NaN", "bool": "all false"}
"""A data set of a few hundred unusual values, by the type of values."""

DAMAGES = 20
"""Damaged messages per stack; `--full` reads as many as a `Subject` has by default."""


def cells() -> list[Any]:
    """Returns every stack. Of two with other parameters, all types of values but integers are nightly."""
    found, seen = [], set()
    for subject in subjects():
        kind = subject.name.partition("(")[0], subject.of
        repeats = kind in seen and subject.of != "int64"
        found.append(pytest.param(subject, id=subject.name, marks=[pytest.mark.nightly] if repeats else []))
        seen.add(kind)
    return found


@pytest.mark.parametrize("subject", cells())
def test_a_registered_stack_satisfies_the_laws(subject: Subject, pytestconfig: pytest.Config) -> None:
    full = pytestconfig.getoption("--full")
    broken = []
    for case in cases([subject if full else replace(subject, damages=DAMAGES)]):
        if full or case.data is None or case.law in ON_ALL_DATA or case.data == OTHER[subject.of]:
            try:
                case.check()
            except Exception as exc:
                broken.append(exc)
    if broken:
        raise ExceptionGroup(subject.name, broken)


@pytest.mark.parametrize(
    ("name", "other"), [("distinct", {"precision": 9}), ("quantiles", {"accuracy": 0.02}), ("kll", {"k": 9})]
)
def test_unequal_parameters_do_not_merge_and_both_are_named(name: str, other: dict[str, Any]) -> None:
    function = function_named(name)
    assert function is not None
    defaults = function.read_parameters([], {}, "m")
    left, right = function.make(defaults, None), function.make(function.read_parameters([], other, "m"), None)
    with pytest.raises(IncompatibleSynopses) as caught:
        left.merge(right, np.zeros(0, np.int64))
    for key, value in (*defaults, *other.items()):
        assert f"'{key}': {value}" in str(caught.value)
