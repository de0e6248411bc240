"""What synopses of items share: one type of items, and hashes of batches and of the item asked for.

A stack takes the type of its items from the measure's argument or from the first batch, and keeps to
it: 1, 1.0 and "1" hash differently, so a question or a batch of another type would get a silent 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, InvalidRecord, InvalidRequest
from edgewater.streams import COLUMN_TYPES, type_name
from edgewater.synopses.base import FloatArray
from edgewater.synopses.encoding import codec
from edgewater.synopses.exact.aggregates import ArrayStack
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray, finalised, hash_values

ITEM_TYPES = ("string", "int64", "float64", "bool")
CHUNK = 1 << 14  # values hashed at a time, so that a chunk's temporaries stay in the L2 cache
_BY_KIND = {"b": "bool", "i": "int64", "u": "int64", "f": "float64"}


class ItemStack(ArrayStack):
    """A stack whose values are items: things that are equal or not.

    Attributes:
        seed: of the hash; only stacks of equal seeds merge.
        item_type: one of `ITEM_TYPES`, or None while nothing has said it.
    """

    def __init__(self, groups: int = 0, *, seed: int = DEFAULT_SEED, item_type: str | None = None) -> None:
        if item_type is not None and item_type not in ITEM_TYPES:
            raise InvalidRequest("item_type", item_type, f"one of {', '.join(ITEM_TYPES)}")
        super().__init__(groups)
        self.seed = seed
        self.item_type = item_type

    @property
    def _header_parameters(self) -> dict[str, Any]:
        return {**self.parameters, "items": self.item_type}

    def _learn(self, values: Any) -> None:
        """Holds a batch to the type of the items. Raises InvalidRecord for another one."""
        if not len(values):
            return
        given = type_name(values.type) if isinstance(values, pa.Array) else _BY_KIND.get(values.dtype.kind)
        if given not in ITEM_TYPES or (self.item_type is not None and given != self.item_type):
            accepted = self.item_type or " or ".join(ITEM_TYPES)
            raise InvalidRecord("values", given, f"items of type {accepted}", f"{self.kind} holds one type of items")
        self.item_type = given

    def _hash(self, values: Any) -> WordArray:
        return hash_values(values, self.seed)

    def _word(self, item: Any) -> WordArray | None:
        """The hash of the item asked for, shape (1,); None while there are no items. Raises InvalidRequest."""
        if self.item_type is None:
            return None
        return self._hash(pa.array([item_of(item, self.item_type)], COLUMN_TYPES[self.item_type]))

    def _require_mergeable(self, other: ItemStack) -> None:
        """Raises IncompatibleSynopses, and takes over the type of items if it is not known here."""
        mine, theirs = ({**stack.parameters, "seed": stack.seed} for stack in (self, other))
        codec.require_equal(self.kind, mine, theirs)
        if None not in (self.item_type, other.item_type):
            codec.require_equal(f"{self.kind} of items", self.item_type, other.item_type)
        self.item_type = self.item_type or other.item_type

    def _paired(self, other: Any) -> Any:
        """The stack of a question's `other`: a single synopsis, or a stack of as many groups. Raises."""
        stack = getattr(other, "_stack", other)
        codec.require_equal("synopses", self.kind, getattr(stack, "kind", type(other).__name__))
        if len(stack) not in (1, len(self)):
            raise InvalidRequest("other", f"{len(stack)} groups", f"1 group or {len(self)}")
        mine, theirs = ({**s.parameters, "seed": s.seed} for s in (self, stack))
        codec.require_equal(self.kind, mine, theirs)
        if None not in (self.item_type, stack.item_type):
            codec.require_equal(f"{self.kind} of items", self.item_type, stack.item_type)
        return stack


def read_item_type(parameters: dict[str, Any], kind: str) -> str | None:
    """The type of items in a message's parameters. Raises CorruptSynopsis."""
    item_type = parameters.get("items")
    if item_type is not None and item_type not in ITEM_TYPES:
        raise CorruptSynopsis(f"{kind}: {item_type!r} is no type of items")
    return item_type


def item_of(item: Any, item_type: str) -> Any:
    """The item in the type of the items: 3 for 3.0 among integers. Raises InvalidRequest."""
    if isinstance(item, np.generic):
        item = item.item()
    number = isinstance(item, int | float) and not isinstance(item, bool)
    if item_type == "string" and isinstance(item, str):
        return item
    if item_type == "bool" and isinstance(item, bool):
        return item
    if item_type == "float64" and number and (isinstance(item, float) or abs(item) <= 1 << 53):
        return float(item)
    # Bounds first: they hold of neither infinity nor NaN, nor of a whole number too large to be a float.
    if item_type == "int64" and number and -(1 << 63) <= item < 1 << 63 and item == int(item):
        return int(item)
    raise InvalidRequest("item", item, f"an item of type {item_type}, as the values are")


def confidence_of(wrong: FloatArray) -> float:
    """The confidence of the groups that say yes, each wrong with such a probability; 1, if there are none.

    A yes is never certain, however full the filter, so it stays below 1.
    """
    return 1.0 - max(float(wrong.max()), 2.0**-53) if len(wrong) else 1.0


def row_hashes(words: WordArray, row: int) -> WordArray:
    """The hashes of one row of a sketch: mixed anew per row.

    Rows made as ``a + j·b`` of two hashes (Kirsch and Mitzenmacher) are cheaper, but two items that share
    a and b modulo the width collide in all rows at once, and then no number of rows helps.
    """
    return finalised(words, row + 1)


def check_whole(name: str, value: object, low: int, high: int) -> int:
    """Raises InvalidRequest unless `value` is a whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, value, f"a whole number from {low} to {high}")
    return value


def check_share(name: str, value: object) -> float:
    """Raises InvalidRequest unless `value` is a number between 0 and 1, ends excluded."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InvalidRequest(name, value, "a number between 0 and 1, such as 0.01")
    return float(value)


def check_width(value: object, low: int, high: int) -> int:
    """Raises InvalidRequest unless `value` is a power of two in [low, high]."""
    width = check_whole("width", value, low, high)
    if width & (width - 1):
        raise InvalidRequest("width", value, f"a power of two from {low} to {high}")
    return width
