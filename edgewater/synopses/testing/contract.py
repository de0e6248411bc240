"""Laws for every stack, independent of data: bytes, damage, errors, sums, empty stacks."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from edgewater.base.errors import CorruptSynopsis, InvalidRequest, SynopsisError, UnsupportedVersion
from edgewater.synopses.base import Question
from edgewater.synopses.encoding import codec
from edgewater.synopses.registry import stack_from_message
from edgewater.synopses.testing.subject import GROUPS, Subject, merged, pick, refused, to_bytes
from edgewater.synopses.testing.zoo import SEED


def a_linear_state_adds_up(subject: Subject) -> None:
    sets = subject.zoo()
    values = sets[list(sets)[0 if subject.of == "bool" or len(sets) == 1 else 1]]
    left, right = subject.parts(values, 2)
    if not left.properties.linear:
        return
    messages = [stack.to_message() for stack in (left, right, merged(subject, [left, right]))]
    if any(array.shape[-1] != GROUPS for message in messages for array in message.arrays):
        return  # sparse: the arrays are no vectors of the state
    for a, b, ab in zip(*([codec.decode(array) for array in message.arrays] for message in messages), strict=True):
        np.testing.assert_allclose(ab - b, a, rtol=1e-12, atol=1e-9)


def an_empty_stack_answers_merges_and_round_trips(subject: Subject) -> None:
    for groups in (0, 1, 3):
        stack = subject.make()
        stack.grow(groups)
        stack.update(np.zeros(0, np.int64), pick(subject.few(), np.zeros(0, np.int64)))
        stack.merge(stack.take(np.arange(groups)), np.arange(groups))
        assert len(stack) == groups and stack.nbytes >= 0
        assert all(answer.shape == (3, groups) for answer in subject.answers(stack).values())
        assert to_bytes(subject.read(to_bytes(stack))) == to_bytes(stack)


def any_truncation_and_any_flipped_bit_is_corrupt(subject: Subject) -> None:
    data = to_bytes(subject.whole(subject.few()))
    for length in range(len(data)):
        with refused(CorruptSynopsis):
            subject.read(data[:length])
    for at in range(len(data)):
        with refused(CorruptSynopsis):
            subject.read(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])


def damage_under_a_valid_checksum_raises_only_synopsis_errors(subject: Subject) -> None:
    """Simulates a bug of the sender, not of the network: for any contents of a message, only a SynopsisError is
    raised.
    """
    rng = np.random.default_rng(SEED)
    message = subject.whole(subject.many()).to_message()
    for _ in range(subject.damages):
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
            subject.answers(subject.from_message(damaged))


def a_newer_version_and_an_unknown_kind_are_unsupported(subject: Subject) -> None:
    stack = subject.whole(subject.few())
    message = stack.to_message()
    message.version += 1
    with refused(UnsupportedVersion, message.kind, str(message.version)):
        subject.from_message(message)
    message.kind = "not_a_kind"
    with refused(UnsupportedVersion, "'not_a_kind' is not known", "hyperloglog", "may not be installed"):
        stack_from_message(message)


def missing_arrays_and_parameters_are_corrupt(subject: Subject) -> None:
    stack = subject.whole(subject.few())
    message = stack.to_message()
    del message.arrays[-1]
    with refused(CorruptSynopsis, "arrays"):
        subject.from_message(message)
    for parameters in ("{", "[]", '{"precision": "x", "accuracy": []}', '{"precision": 99, "accuracy": 7}'):
        message = stack.to_message()
        if message.parameters == "{}" and parameters.startswith('{"'):
            continue
        message.parameters = parameters
        with refused(CorruptSynopsis):
            subject.from_message(message)


def an_unsupported_question_is_refused_with_the_supported_ones(subject: Subject) -> None:
    class Unheard(Question):
        pass

    stack = subject.whole(subject.few())
    with refused(InvalidRequest, stack.questions[0].__name__):
        stack.query(Unheard())
    assert isinstance(stack.query(), type(stack.query(None)))


LAWS = (
    a_linear_state_adds_up,
    an_empty_stack_answers_merges_and_round_trips,
    any_truncation_and_any_flipped_bit_is_corrupt,
    damage_under_a_valid_checksum_raises_only_synopsis_errors,
    a_newer_version_and_an_unknown_kind_are_unsupported,
    missing_arrays_and_parameters_are_corrupt,
    an_unsupported_question_is_refused_with_the_supported_ones,
)
