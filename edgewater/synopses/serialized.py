"""Synopses of any kind as bytes: reading one (`from_bytes`), merging many (`merge_bytes`).

A center merges the partials of its queries with `GroupedAggregate.merge_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from edgewater.base.errors import IncompatibleSynopses, UnsupportedVersion
from edgewater.synopses import plugins
from edgewater.synopses.encoding import codec
from edgewater.synopses.grouped import GroupedAggregate, numbered, require_readable
from edgewater.synopses.ordered import OrderedSynopsis
from edgewater.synopses.single import SingleSynopsis

AnySynopsis = GroupedAggregate | OrderedSynopsis | SingleSynopsis[Any]


@cache
def _built_in() -> dict[str, type[AnySynopsis]]:
    """Returns the kinds of this package. The facade imports all modules with kinds."""
    found: list[type[Any]] = [GroupedAggregate, SingleSynopsis, OrderedSynopsis]
    for each in found:  # it grows
        found += each.__subclasses__()
    return {each.kind: each for each in found if hasattr(each, "kind") and each.__module__.startswith("edgewater.")}


def from_bytes(data: bytes) -> AnySynopsis:
    """Reads a synopsis of any kind from the bytes that `to_bytes` returned.

    Raises:
        CorruptSynopsis: damaged or foreign bytes.
        UnsupportedVersion: a kind or a version that this release does not read.
    """
    message = codec.unseal(data)
    kind = message.kind
    found = _built_in().get(kind)
    if found is None:
        plugins.INSTALLED.load()
        found = plugins.INSTALLED.singles.get(kind)
    if found is None:
        known = ", ".join(sorted({**_built_in(), **plugins.INSTALLED.singles}))
        raise UnsupportedVersion(
            f"synopsis kind {kind!r} is not one of those read here: {known}; {plugins.INSTALLED.hint()}"
        )
    synopsis: AnySynopsis = found.from_message(message)
    return synopsis


def merge_bytes(partials: Sequence[bytes]) -> bytes:
    """Returns the union of serialised synopses: the bytes of `from_bytes` of each, `merge_many` and `to_bytes`.

    Args:
        partials: at least one; all of one kind, with parameters that merge.

    Raises:
        CorruptSynopsis, UnsupportedVersion, IncompatibleSynopses: the error's message names the index of the partial.

    >>> from edgewater.synopses import HyperLogLog, Distinct
    >>> edges = [HyperLogLog(), HyperLogLog()]
    >>> edges[0].update(["ann", "bob"])
    >>> edges[1].update(["bob", "eve"])
    >>> round(from_bytes(merge_bytes([edge.to_bytes() for edge in edges])).query(Distinct()).value)
    3
    """
    if not partials:
        raise ValueError("nothing to merge: a merge needs at least one partial")
    of = len(partials)
    first: Any = numbered(0, of, from_bytes, partials[0])
    if of == 1:
        return partials[0]
    if isinstance(first, GroupedAggregate):
        return GroupedAggregate.merge_bytes(partials)
    union = _merge_objects(first, [numbered(number, of, from_bytes, partials[number]) for number in range(1, of)])
    data: bytes = union.to_bytes()
    require_readable(getattr(union, "stack", union), codec.unseal(data))
    return data


def _merge_objects(first: Any, others: list[Any]) -> Any:
    try:
        return first.merge_many(others)
    except IncompatibleSynopses:
        for number, other in enumerate(others, 1):
            numbered(number, len(others) + 1, first.merge_many, [other])
        raise
