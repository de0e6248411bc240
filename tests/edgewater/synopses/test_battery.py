"""What every registered stack must hold, by generated tests. The claims are those of its `properties`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from battery import (
    BOUNDED_STATE,
    SEED,
    Subject,
    add,
    answers,
    assert_same,
    codes_for,
    filled,
    merged,
    pick,
    read,
    scale_of,
    subjects,
    to_bytes,
    zoo,
)

from edgewater.errors import (
    CorruptSynopsis,
    IncompatibleSynopses,
    InvalidRequest,
    SynopsisError,
    UnsupportedVersion,
)
from edgewater.synopses import Question, codec
from edgewater.synopses.base import Stack
from edgewater.synopses.registry import function_named, stack_from_message

pytestmark = pytest.mark.slow  # thousands of cases: `make quick` leaves them to `make test`

GROUPS = 5
SUBJECTS = subjects()
CASES = [pytest.param(s, v, id=f"{s.name}-{n}") for s in SUBJECTS for n, v in zoo(s.type).items()]
each_subject = pytest.mark.parametrize("subject", [pytest.param(s, id=s.name) for s in SUBJECTS])
each_case = pytest.mark.parametrize(("subject", "values"), CASES)


def parts_of(subject: Subject, values: Any, parts: int) -> list[Stack]:
    codes = codes_for(values, GROUPS)
    cut = np.random.default_rng(SEED + 1).integers(0, parts, len(values))
    return [
        filled(subject, codes[cut == k], pick(values, np.flatnonzero(cut == k)), GROUPS) if (cut == k).any()
        else filled_empty(subject)
        for k in range(parts)
    ]  # fmt: skip


def filled_empty(subject: Subject) -> Stack:
    stack = subject.make()
    stack.grow(GROUPS)
    return stack


def whole_of(subject: Subject, values: Any) -> Stack:
    return filled(subject, codes_for(values, GROUPS), values, GROUPS)


@each_case
def test_the_order_of_values_makes_no_difference(subject: Subject, values: Any) -> None:
    codes = codes_for(values, GROUPS)
    order = np.random.default_rng(SEED).permutation(len(values))
    shuffled = filled(subject, codes[order], pick(values, order), GROUPS)
    assert_same(whole_of(subject, values), shuffled, scale_of(values))


@each_case
def test_one_batch_and_many_give_the_same(subject: Subject, values: Any) -> None:
    codes, many = codes_for(values, GROUPS), filled_empty(subject)
    for at in np.array_split(np.arange(len(values)), 7):
        add(many, codes[at], pick(values, at))
    assert_same(whole_of(subject, values), many, scale_of(values))


@each_case
def test_merging_commutes(subject: Subject, values: Any) -> None:
    left, right = parts_of(subject, values, 2)
    assert left.properties.commutative == (left.kind not in BOUNDED_STATE)
    assert_same(merged(subject, [left, right], GROUPS), merged(subject, [right, left], GROUPS), scale_of(values))


@each_case
def test_any_tree_of_merges_gives_what_one_pass_gives(subject: Subject, values: Any) -> None:
    rng = np.random.default_rng(SEED + 2)
    nodes = parts_of(subject, values, 6)
    row = merged(subject, nodes, GROUPS)
    while len(nodes) > 1:
        left, right = (nodes.pop(int(rng.integers(len(nodes)))) for _ in range(2))
        nodes.append(merged(subject, [left, right], GROUPS))
    assert_same(row, nodes[0], scale_of(values))
    assert_same(whole_of(subject, values), nodes[0], scale_of(values))


@each_case
def test_merging_leaves_the_other_as_it_is(subject: Subject, values: Any) -> None:
    left, right = parts_of(subject, values, 2)
    before = to_bytes(right)
    left.merge(right, np.arange(GROUPS))
    left.update(codes_for(values, GROUPS), values)
    assert to_bytes(right) == before


@each_case
def test_idempotence_is_as_claimed(subject: Subject, values: Any) -> None:
    once = whole_of(subject, values)
    twice = merged(subject, [once, once], GROUPS)
    if once.properties.idempotent:
        assert to_bytes(twice) == to_bytes(once)
    else:
        assert to_bytes(twice) != to_bytes(once)


@each_subject
def test_a_linear_state_adds_up_and_what_was_merged_can_be_taken_out(subject: Subject) -> None:
    values = zoo(subject.type)["one" if subject.type == "bool" else list(zoo(subject.type))[1]]
    left, right = parts_of(subject, values, 2)
    properties = left.properties
    assert properties.invertible or not properties.linear, "a linear state is invertible by subtraction"
    if not properties.linear:
        return
    both = merged(subject, [left, right], GROUPS)
    invert = getattr(both, "invert", None)
    if invert is not None:
        invert(right, np.arange(GROUPS))
        assert to_bytes(both) == to_bytes(left)
        both.decrement(codes_for(values, GROUPS)[:0], pick(values, np.zeros(0, np.int64)))  # type: ignore[attr-defined]
        whole = whole_of(subject, values)
        whole.decrement(codes_for(values, GROUPS), values)  # type: ignore[attr-defined]
        assert to_bytes(whole) == to_bytes(filled_empty(subject))
        return
    for a, b, ab in zip(*([codec.decode(x) for x in s.to_message().arrays] for s in (left, right, both)), strict=True):
        np.testing.assert_allclose(ab - b, a, rtol=1e-12, atol=1e-9)


@each_case
def test_bytes_come_back_as_the_same_stack(subject: Subject, values: Any) -> None:
    stack = whole_of(subject, values)
    data = to_bytes(stack)
    again = read(data)
    assert type(again) is type(stack)
    assert to_bytes(again) == data
    for name, given in answers(stack).items():
        np.testing.assert_array_equal(given, answers(again)[name], err_msg=name)
    # What was read can be worked with.
    again.grow(GROUPS + 3)
    again.update(codes_for(values, GROUPS + 3), values)
    again.merge(stack, np.arange(GROUPS))
    assert len(again) == GROUPS + 3


@each_case
def test_groups_do_not_touch_each_other(subject: Subject, values: Any) -> None:
    codes, stack = codes_for(values, GROUPS), whole_of(subject, values)
    for group in range(GROUPS):
        at = np.flatnonzero(codes == group)
        alone = filled(subject, np.zeros(len(at), np.int64), pick(values, at), 1) if len(at) else subject.make()
        alone.grow(1)
        assert_same(stack.take(np.array([group])), alone, scale_of(values))


@each_case
def test_taken_groups_come_in_the_order_asked_for_and_are_copies(subject: Subject, values: Any) -> None:
    stack = whole_of(subject, values)
    taken = stack.take(np.array([3, 0, 4]))
    before = to_bytes(stack)
    assert len(taken) == 3
    for name, given in answers(taken).items():
        np.testing.assert_array_equal(given, answers(stack)[name][:, [3, 0, 4]], err_msg=name)
    taken.update(np.zeros(len(values), np.int64), values)
    taken.reset(np.array([1]))
    assert to_bytes(stack) == before


@each_case
def test_reset_groups_are_as_new_and_the_others_stay(subject: Subject, values: Any) -> None:
    stack, codes = whole_of(subject, values), codes_for(values, GROUPS)
    stack.reset(np.array([1, 3]))
    at = np.flatnonzero(~np.isin(codes, [1, 3]))
    expected = filled_empty(subject)
    if len(at):
        add(expected, codes[at], pick(values, at))
    assert_same(stack, expected, scale_of(values))
    add(stack, codes, values)
    alone = stack.take(np.array([1]))
    assert_same(alone, whole_of(subject, values).take(np.array([1])), scale_of(values))


@each_case
def test_merging_places_groups_where_the_codes_say(subject: Subject, values: Any) -> None:
    stack = whole_of(subject, values)
    wider = subject.make()
    wider.grow(9)
    where = np.array([8, 2, 5, 0, 7])
    wider.merge(stack, where)
    assert_same(wider.take(where), stack, scale_of(values))
    untouched = filled_empty(subject).take(np.arange(4))
    assert_same(wider.take(np.array([1, 3, 4, 6])), untouched)


@each_subject
def test_an_empty_stack_answers_merges_and_travels(subject: Subject) -> None:
    for groups in (0, 1, 3):
        stack = subject.make()
        stack.grow(groups)
        stack.update(np.zeros(0, np.int64), pick(zoo(subject.type)["one"], np.zeros(0, np.int64)))
        stack.merge(stack.take(np.arange(groups)), np.arange(groups))
        assert len(stack) == groups and stack.nbytes >= 0
        assert all(given.shape == (3, groups) for given in answers(stack).values())
        assert to_bytes(read(to_bytes(stack))) == to_bytes(stack)


@each_case
def test_bounds_bracket_their_own_estimate(subject: Subject, values: Any) -> None:
    for name, (value, lower, upper) in answers(whole_of(subject, values)).items():
        present = ~np.isnan(value)
        assert (lower[present] <= value[present]).all() and (value[present] <= upper[present]).all(), name


@each_subject
def test_folding_is_as_claimed(subject: Subject) -> None:
    values = list(zoo(subject.type).values())[-1]
    stack = whole_of(subject, values)
    fold = getattr(stack, "fold", None)
    assert (fold is not None) == stack.properties.foldable
    if fold is None or getattr(stack, "bits", 99) == 4:
        return
    before = to_bytes(stack)
    folded = fold(1)
    assert to_bytes(stack) == before
    assert len(to_bytes(folded)) <= len(before)
    assert to_bytes(fold(0)) == before
    # Folding first or merging first is the same, and either side may be the folded one.
    left, right = parts_of(subject, values, 2)
    expected = merged(subject, [left, right], GROUPS).fold(1)  # type: ignore[attr-defined]
    for pair in ([left.fold(1), right], [left, right.fold(1)], [right.fold(1), left.fold(1)]):  # type: ignore[attr-defined]
        assert_same(merged(subject, pair, GROUPS), expected, scale_of(values))


@each_subject
def test_any_truncation_and_any_flipped_bit_is_corrupt(subject: Subject) -> None:
    data = to_bytes(whole_of(subject, zoo(subject.type)["one"]))
    for length in range(len(data)):
        with pytest.raises(CorruptSynopsis):
            read(data[:length])
    for at in range(len(data)):
        with pytest.raises(CorruptSynopsis):
            read(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])


@each_subject
def test_damage_under_a_valid_checksum_is_refused_or_harmless(subject: Subject) -> None:
    """A sender's bug, not a line's: whatever stands in the message, only errors of our tree come out."""
    rng = np.random.default_rng(SEED)
    message = whole_of(subject, list(zoo(subject.type).values())[-1]).to_message()
    for _ in range(200):
        damaged = type(message)()
        damaged.CopyFrom(message)
        array = damaged.arrays[int(rng.integers(len(damaged.arrays)))]
        data = bytearray(array.data)
        if data and rng.random() < 0.8:
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
            array.data = bytes(data)
        elif rng.random() < 0.5:
            array.type = str(rng.choice(["<f8", "|u1", "<i8", "|b1", "<u8", "|S9"]))
        else:
            array.shape[:] = [int(rng.integers(5))]
        with np.errstate(all="ignore"), suppress(SynopsisError):
            answers(stack_from_message(damaged))


@each_subject
def test_a_newer_version_and_an_unknown_kind_are_unsupported(subject: Subject) -> None:
    message = whole_of(subject, zoo(subject.type)["one"]).to_message()
    message.version += 1
    with pytest.raises(UnsupportedVersion, match=f"{message.kind} bytes of version {message.version}"):
        stack_from_message(message)
    message.kind = "not_a_kind"
    with pytest.raises(UnsupportedVersion, match=r"'not_a_kind' is not known.*hyperloglog"):
        stack_from_message(message)


@each_subject
def test_missing_arrays_and_parameters_are_corrupt(subject: Subject) -> None:
    stack = whole_of(subject, zoo(subject.type)["one"])
    message = stack.to_message()
    del message.arrays[-1]
    with pytest.raises(CorruptSynopsis, match="arrays"):
        stack_from_message(message)
    for parameters in ("{", "[]", '{"precision": "x", "accuracy": []}', '{"precision": 99, "accuracy": 7}'):
        message = stack.to_message()
        if message.parameters == "{}" and parameters.startswith('{"'):
            continue
        message.parameters = parameters
        with pytest.raises(CorruptSynopsis):
            stack_from_message(message)


@each_subject
def test_a_question_it_cannot_answer_is_refused_with_those_it_can(subject: Subject) -> None:
    class Unheard(Question):
        pass

    stack = whole_of(subject, zoo(subject.type)["one"])
    with pytest.raises(InvalidRequest, match=stack.questions[0].__name__):
        stack.query(Unheard())
    assert isinstance(stack.query(), type(stack.query(None)))


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
