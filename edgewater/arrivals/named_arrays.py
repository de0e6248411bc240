"""Arrays whose axes have names: the state of an estimator, with one layout for shapes, changes and snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from edgewater.base.errors import CorruptSynopsis
from edgewater.synopses.encoding.state import State

Layout = Mapping[str, tuple[tuple[str, ...], Any, float]]


class NamedArrays:
    """Base class of estimators whose state is a fixed set of arrays.

    Args:
        sizes: length of each axis.

    Attributes:
        LAYOUT: by attribute: the names of the array's axes, its type, and the value of an entry without history.
    """

    LAYOUT: ClassVar[Layout]

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        for name, (axes, dtype, fill) in self.LAYOUT.items():
            setattr(self, name, np.full([sizes[axis] for axis in axes], fill, dtype))

    def take(self, axis: str, rows: Sequence[int | None]) -> None:
        """Replaces the entries along an axis by the entries `rows`. None adds an entry without history."""
        to = [i for i, row in enumerate(rows) if row is not None]
        since = [row for row in rows if row is not None]
        self.sizes = {**self.sizes, axis: len(rows)}
        for name, (axes, dtype, fill) in self.LAYOUT.items():
            if axis in axes:
                old, at = getattr(self, name), axes.index(axis)
                new = np.full([self.sizes[each] for each in axes], fill, dtype)
                np.moveaxis(new, at, 0)[to] = np.moveaxis(old, at, 0)[since]
                setattr(self, name, new)

    def join(self, members: Iterable[Self], *axes: str, shared: bool = False) -> None:
        """Sets the arrays to the arrays of all members, along the first of `axes` that an array has.

        Args:
            shared: whether the arrays of the members become views of the joined arrays.
        """
        members = list(members)
        for name, (own, *_) in self.LAYOUT.items():
            at = own.index(next(axis for axis in axes if axis in own))
            whole = np.concatenate([getattr(member, name) for member in members], axis=at)
            setattr(self, name, whole)
            for member, part in zip(members, np.split(whole, len(members), axis=at) if shared else (), strict=False):
                setattr(member, name, part)

    def to_state(self) -> State:
        """Returns the state with copies of the arrays."""
        return State(None, {name: getattr(self, name).copy() for name in self.LAYOUT})

    def restore(self, state: State) -> None:
        """Sets the arrays to copies of the arrays of a state.

        Raises:
            CorruptSynopsis: an array is missing, or its shape or type differs from the layout.
        """
        for name in self.LAYOUT:
            own, array = getattr(self, name), state.arrays.get(name)
            if array is None or array.shape != own.shape or array.dtype != own.dtype:
                raise CorruptSynopsis(
                    f"{type(self).__name__} state: {name} is {None if array is None else (array.shape, array.dtype)}, "
                    f"expected {(own.shape, own.dtype)}"
                )
            setattr(self, name, array.copy())
