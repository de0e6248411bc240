"""What every registered stack must hold, by generated tests. The claims are those of its `properties`.

The laws are those of `edgewater.synopses.testing`, which users put their own stacks through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewater.errors import IncompatibleSynopses
from edgewater.synopses.registry import function_named
from edgewater.synopses.testing import Subject, algebra, contract
from tests.edgewater.synopses.battery import subjects

pytestmark = pytest.mark.slow  # thousands of cases: `make quick` leaves them to `make test`

SUBJECTS = subjects()
each_subject = pytest.mark.parametrize("subject", [pytest.param(s, id=s.name) for s in SUBJECTS])

ON_ALL_DATA = {
    algebra.the_order_of_values_makes_no_difference,
    algebra.one_batch_and_many_give_the_same,
    algebra.any_tree_of_merges_gives_what_one_pass_gives,
    algebra.bounds_bracket_their_own_estimate,
}
"""Laws that special values may break. The others are about groups, merges and bytes: two data sets show what breaks
them, and `--full` puts them to all."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "values" not in metafunc.fixturenames:
        return
    law = getattr(algebra, metafunc.function.__name__.removeprefix("test_"))
    every = metafunc.config.getoption("--full") or law in ON_ALL_DATA
    cases = [
        pytest.param(subject, values, id=f"{subject.name}-{name}")
        for subject in SUBJECTS
        for name, values in (subject.zoo() if every else two_largest(subject)).items()
    ]
    metafunc.parametrize(("subject", "values"), cases)


def two_largest(subject: Subject) -> dict[str, Any]:
    largest = sorted(subject.zoo().items(), key=lambda item: len(item[1]))[-2:]
    return dict(largest)


def test_every_law_is_tested_here() -> None:
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {law.__name__ for law in (*algebra.LAWS, *contract.LAWS)} <= here


def test_the_order_of_values_makes_no_difference(subject: Subject, values: Any) -> None:
    algebra.the_order_of_values_makes_no_difference(subject, values)


def test_one_batch_and_many_give_the_same(subject: Subject, values: Any) -> None:
    algebra.one_batch_and_many_give_the_same(subject, values)


def test_replaying_gives_the_same_bytes(subject: Subject, values: Any) -> None:
    algebra.replaying_gives_the_same_bytes(subject, values)


def test_asking_and_writing_change_nothing_that_comes_later(subject: Subject, values: Any) -> None:
    algebra.asking_and_writing_change_nothing_that_comes_later(subject, values)


def test_merging_commutes(subject: Subject, values: Any) -> None:
    algebra.merging_commutes(subject, values)


def test_any_tree_of_merges_gives_what_one_pass_gives(subject: Subject, values: Any) -> None:
    algebra.any_tree_of_merges_gives_what_one_pass_gives(subject, values)


def test_merging_leaves_the_other_as_it_is(subject: Subject, values: Any) -> None:
    algebra.merging_leaves_the_other_as_it_is(subject, values)


def test_idempotence_is_as_claimed(subject: Subject, values: Any) -> None:
    algebra.idempotence_is_as_claimed(subject, values)


def test_bytes_come_back_as_the_same_stack(subject: Subject, values: Any) -> None:
    algebra.bytes_come_back_as_the_same_stack(subject, values)


def test_groups_do_not_touch_each_other(subject: Subject, values: Any) -> None:
    algebra.groups_do_not_touch_each_other(subject, values)


def test_taken_groups_come_in_the_order_asked_for_and_are_copies(subject: Subject, values: Any) -> None:
    algebra.taken_groups_come_in_the_order_asked_for_and_are_copies(subject, values)


def test_reset_groups_are_as_new_and_the_others_stay(subject: Subject, values: Any) -> None:
    algebra.reset_groups_are_as_new_and_the_others_stay(subject, values)


def test_merging_places_groups_where_the_codes_say(subject: Subject, values: Any) -> None:
    algebra.merging_places_groups_where_the_codes_say(subject, values)


def test_bounds_bracket_their_own_estimate(subject: Subject, values: Any) -> None:
    algebra.bounds_bracket_their_own_estimate(subject, values)


@each_subject
def test_a_linear_state_adds_up_and_what_was_merged_can_be_taken_out(subject: Subject) -> None:
    contract.a_linear_state_adds_up_and_what_was_merged_can_be_taken_out(subject)


@each_subject
def test_an_empty_stack_answers_merges_and_travels(subject: Subject) -> None:
    contract.an_empty_stack_answers_merges_and_travels(subject)


@each_subject
def test_folding_is_as_claimed(subject: Subject) -> None:
    contract.folding_is_as_claimed(subject)


@each_subject
def test_any_truncation_and_any_flipped_bit_is_corrupt(subject: Subject) -> None:
    contract.any_truncation_and_any_flipped_bit_is_corrupt(subject)


@each_subject
def test_damage_under_a_valid_checksum_is_refused_or_harmless(subject: Subject) -> None:
    contract.damage_under_a_valid_checksum_is_refused_or_harmless(subject)


@each_subject
def test_a_newer_version_and_an_unknown_kind_are_unsupported(subject: Subject) -> None:
    contract.a_newer_version_and_an_unknown_kind_are_unsupported(subject)


@each_subject
def test_missing_arrays_and_parameters_are_corrupt(subject: Subject) -> None:
    contract.missing_arrays_and_parameters_are_corrupt(subject)


@each_subject
def test_a_question_it_cannot_answer_is_refused_with_those_it_can(subject: Subject) -> None:
    contract.a_question_it_cannot_answer_is_refused_with_those_it_can(subject)


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
