"""The base of stacks of items. Items are values that are compared only for equality; a stack has one item type.

A stack takes the item type from the measure's argument or from the first batch, and accepts no other type. 1, 1.0 and
"1" have different hashes, so a question about an item of another type would silently answer 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from edgewater.base.errors import CorruptSynopsis, InvalidRecord, InvalidRequest
from edgewater.base.streams import COLUMN_TYPES, type_name
from edgewater.synopses.array_stack import ArrayStack
from edgewater.synopses.base import ITEM_TYPES, FloatArray
from edgewater.synopses.encoding import codec
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray, finalised, hash_values
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

CHUNK = 1 << 14  # values hashed at a time, so that temporaries stay in the L2 cache; measured: bench.synopses
_BY_KIND = {"b": "bool", "i": "int64", "u": "int64", "f": "float64"}


class ItemStack(ArrayStack):
    """A stack whose values are items.

    Attributes:
        seed: seed of the hash; only stacks of equal seeds merge.
        item_type: one of `ITEM_TYPES`, or None before it is known.
    """

    carried: ClassVar[tuple[str, ...]] = ("seed", "item_type")
    types: ClassVar[tuple[str, ...]] = ITEM_TYPES

    def __init__(self, groups: int = 0, *, seed: int = DEFAULT_SEED, item_type: str | None = None) -> None:
        if item_type is not None and item_type not in ITEM_TYPES:
            raise InvalidRequest("item_type", item_type, f"one of {', '.join(ITEM_TYPES)}")
        super().__init__(groups)
        self.seed = seed
        self.item_type = item_type

    @property
    def _header_parameters(self) -> dict[str, Any]:
        return {**self.parameters, "items": self.item_type}

    @classmethod
    def _arguments(cls, message: SynopsisMessage, parameters: Mapping[str, Any]) -> dict[str, Any]:
        item_type = parameters.get("items")
        if item_type is not None and item_type not in ITEM_TYPES:
            raise CorruptSynopsis(f"{cls.kind}: {item_type!r} is not a type of items")
        return super()._arguments(message, parameters) | {"item_type": item_type}

    def _check_item_type(self, values: Any) -> None:
        """Adopts the type of a first batch. Raises InvalidRecord for a batch of another type."""
        if not len(values):
            return
        name = type_name(values.type) if isinstance(values, pa.Array) else _BY_KIND.get(values.dtype.kind)
        if name not in ITEM_TYPES or (self.item_type is not None and name != self.item_type):
            accepted = self.item_type or " or ".join(ITEM_TYPES)
            raise InvalidRecord("values", name, f"items of type {accepted}", f"{self.kind} holds one type of items")
        self.item_type = name

    def _hash(self, values: Any) -> WordArray:
        return hash_values(values, self.seed)

    def _hash_item(self, item: Any) -> WordArray | None:
        """Returns the hash of a question's item, shape (1,); None if the stack has no items. Raises InvalidRequest."""
        if self.item_type is None:
            return None
        return self._hash(pa.array([coerce_item(item, self.item_type)], COLUMN_TYPES[self.item_type]))

    def _require_mergeable(self, other: ItemStack) -> None:
        """Raises IncompatibleSynopses if the stacks do not merge.

        Adopts the item type of `other` if this stack has none.
        """
        self._require_same_items(other)
        self.item_type = self.item_type or other.item_type

    def _require_same_items(self, other: ItemStack) -> None:
        self._require_equal_parameters(other)
        if None not in (self.item_type, other.item_type):
            codec.require_equal(f"{self.kind} of items", self.item_type, other.item_type)

    def _other_stack(self, other: Any) -> Any:
        """Returns the stack of a question's `other`, a single synopsis or a stack of as many groups.

        Raises:
            IncompatibleSynopses: another kind, parameters, seed or item type.
            InvalidRequest: another number of groups.
        """
        stack = getattr(other, "stack", other)
        codec.require_equal("synopses", self.kind, getattr(stack, "kind", type(other).__name__))
        if len(stack) not in (1, len(self)):
            raise InvalidRequest("other", f"{len(stack)} groups", f"1 group or {len(self)}")
        self._require_same_items(stack)
        return stack


def coerce_item(item: Any, item_type: str) -> Any:
    """Converts an item to the item type, such as 3.0 to 3 among integers. Raises InvalidRequest."""
    if isinstance(item, np.generic):
        item = item.item()
    number = isinstance(item, int | float) and not isinstance(item, bool)
    if item_type == "string" and isinstance(item, str):
        return item
    if item_type == "bool" and isinstance(item, bool):
        return item
    if item_type == "float64" and number and (isinstance(item, float) or abs(item) <= 1 << 53):
        return float(item)
    # Bounds first: they exclude infinity, NaN, and whole numbers that are too large for a float.
    if item_type == "int64" and number and -(1 << 63) <= item < 1 << 63 and item == int(item):
        return int(item)
    raise InvalidRequest("item", item, f"an item of type {item_type}, as the values are")


def membership_confidence(false_positives: FloatArray) -> float:
    """Returns the confidence of the groups that answer yes, from their false positive rates; 1 without such groups.

    A yes is never certain, however empty the filter, so the confidence stays below 1.
    """
    return 1.0 - max(float(false_positives.max()), 2.0**-53) if len(false_positives) else 1.0


def row_hashes(words: WordArray, row: int) -> WordArray:
    """Returns the hashes for one row of a sketch, mixed again per row.

    Rows computed as ``a + j·b`` from two hashes (Kirsch and Mitzenmacher) are cheaper, but two items with equal a and b
    modulo the width collide in all rows at once, which no number of rows corrects.
    """
    return finalised(words, row + 1)
