"""Laws for every stack and every data set: the claims of `Properties`, and the independence of groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgewater.synopses.testing.subject import GROUPS, Subject, add, codes_for, filled, merged, pick, to_bytes
from edgewater.synopses.testing.zoo import SEED


def the_order_of_values_makes_no_difference(subject: Subject, values: Any) -> None:
    codes = codes_for(values, GROUPS)
    order = np.random.default_rng(SEED).permutation(len(values))
    shuffled = filled(subject, codes[order], pick(values, order), GROUPS)
    subject.assert_same(subject.whole(values), shuffled, values)


def one_batch_equals_many_batches(subject: Subject, values: Any) -> None:
    codes, many = codes_for(values, GROUPS), subject.empty()
    for at in np.array_split(np.arange(len(values)), 7):
        add(many, codes[at], pick(values, at))
    subject.assert_same(subject.whole(values), many, values)


def replaying_gives_the_same_bytes(subject: Subject, values: Any) -> None:
    """An edge recovers from a crash in this way: it adds the same batches to a new stack."""
    codes = codes_for(values, GROUPS)
    once, again = subject.empty(), subject.empty()
    if not once.properties.reproducible:
        return
    for stack in (once, again):
        for at in np.array_split(np.arange(len(values)), 3):
            add(stack, codes[at], pick(values, at))
    assert to_bytes(once) == to_bytes(again)


def queries_and_serialisation_do_not_change_later_states(subject: Subject, values: Any) -> None:
    """An edge continues after a checkpoint, or restarts from it, and must build the same bytes."""
    codes, batches = codes_for(values, GROUPS), np.array_split(np.arange(len(values)), 7)
    plain, looked_at, read_back = subject.empty(), subject.empty(), subject.empty()
    if not plain.properties.reproducible:
        return
    for at in batches:
        subject.answers(looked_at)
        looked_at.take(np.arange(GROUPS))
        data = to_bytes(looked_at)
        assert to_bytes(looked_at) == data, "two serialisations differ"
        read_back = subject.read(to_bytes(read_back))
        for stack in (plain, looked_at, read_back):
            add(stack, codes[at], pick(values, at))
        assert to_bytes(looked_at) == to_bytes(plain) == to_bytes(read_back)
    for stack in (plain, looked_at, read_back):
        stack.reset(np.array([2]))
        stack.merge(subject.whole(values), np.arange(GROUPS))
    assert to_bytes(looked_at) == to_bytes(plain) == to_bytes(read_back)


def merging_commutes(subject: Subject, values: Any) -> None:
    left, right = subject.parts(values, 2)
    assert left.properties.commutative == (subject.equal != "bounds"), "`commutative` contradicts Subject.equal"
    subject.assert_same(merged(subject, [left, right]), merged(subject, [right, left]), values)


def any_tree_of_merges_equals_one_pass(subject: Subject, values: Any) -> None:
    rng = np.random.default_rng(SEED + 2)
    nodes = subject.parts(values, 6)
    row = merged(subject, nodes)
    while len(nodes) > 1:
        left, right = (nodes.pop(int(rng.integers(len(nodes)))) for _ in range(2))
        nodes.append(merged(subject, [left, right]))
    subject.assert_same(row, nodes[0], values)
    subject.assert_same(subject.whole(values), nodes[0], values)


def merging_does_not_change_the_other_stack(subject: Subject, values: Any) -> None:
    left, right = subject.parts(values, 2)
    before = to_bytes(right)
    left.merge(right, np.arange(GROUPS))
    left.update(codes_for(values, GROUPS), values)
    assert to_bytes(right) == before


def idempotence_is_as_stated(subject: Subject, values: Any) -> None:
    once = subject.whole(values)
    twice = merged(subject, [once, once])
    if once.properties.idempotent:
        subject.assert_same(twice, once, values)
    elif to_bytes(once) != to_bytes(subject.empty()):
        assert to_bytes(twice) != to_bytes(once), "it is idempotent, but `idempotent` is False"


def a_stack_round_trips_as_bytes(subject: Subject, values: Any) -> None:
    stack = subject.whole(values)
    data = to_bytes(stack)
    again = subject.read(data)
    assert type(again) is type(stack)
    assert to_bytes(again) == data
    for name, answer in subject.answers(stack).items():
        np.testing.assert_array_equal(answer, subject.answers(again)[name], err_msg=name)
    # A stack read from bytes accepts updates and merges.
    again.grow(GROUPS + 3)
    again.update(codes_for(values, GROUPS + 3), values)
    again.merge(stack, np.arange(GROUPS))
    assert len(again) == GROUPS + 3


def groups_are_independent(subject: Subject, values: Any) -> None:
    codes, stack = codes_for(values, GROUPS), subject.whole(values)
    for group in range(GROUPS):
        at = np.flatnonzero(codes == group)
        alone = filled(subject, np.zeros(len(at), np.int64), pick(values, at), 1) if len(at) else subject.make()
        alone.grow(1)
        subject.assert_same(stack.take(np.array([group])), alone, values)


def take_returns_copies_in_the_requested_order(subject: Subject, values: Any) -> None:
    stack = subject.whole(values)
    taken = stack.take(np.array([3, 0, 4]))
    before = to_bytes(stack)
    assert len(taken) == 3
    for name, answer in subject.answers(taken).items():
        np.testing.assert_array_equal(answer, subject.answers(stack)[name][:, [3, 0, 4]], err_msg=name)
    taken.update(np.zeros(len(values), np.int64), values)
    taken.reset(np.array([1]))
    assert to_bytes(stack) == before


def reset_empties_only_the_chosen_groups(subject: Subject, values: Any) -> None:
    stack, codes = subject.whole(values), codes_for(values, GROUPS)
    stack.reset(np.array([1, 3]))
    at = np.flatnonzero(~np.isin(codes, [1, 3]))
    expected = subject.empty()
    if len(at):
        add(expected, codes[at], pick(values, at))
    subject.assert_same(stack, expected, values)
    add(stack, codes, values)
    alone = stack.take(np.array([1]))
    subject.assert_same(alone, subject.whole(values).take(np.array([1])), values)


def merging_places_groups_at_their_codes(subject: Subject, values: Any) -> None:
    stack = subject.whole(values)
    wider = subject.make()
    wider.grow(9)
    where = np.array([8, 2, 5, 0, 7])
    wider.merge(stack, where)
    subject.assert_same(wider.take(where), stack, values)
    untouched = subject.empty().take(np.arange(4))
    subject.assert_same(wider.take(np.array([1, 3, 4, 6])), untouched)


def bounds_contain_the_estimate(subject: Subject, values: Any) -> None:
    for name, (value, lower, upper) in subject.answers(subject.whole(values)).items():
        present = ~np.isnan(value)
        assert (lower[present] <= value[present]).all() and (value[present] <= upper[present]).all(), name


LAWS = (
    the_order_of_values_makes_no_difference,
    one_batch_equals_many_batches,
    replaying_gives_the_same_bytes,
    queries_and_serialisation_do_not_change_later_states,
    merging_commutes,
    any_tree_of_merges_equals_one_pass,
    merging_does_not_change_the_other_stack,
    idempotence_is_as_stated,
    a_stack_round_trips_as_bytes,
    groups_are_independent,
    take_returns_copies_in_the_requested_order,
    reset_empties_only_the_chosen_groups,
    merging_places_groups_at_their_codes,
    bounds_contain_the_estimate,
)
