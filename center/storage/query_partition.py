"""The division of queries among the drivers that lead at the same time."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class QueryPartition:
    """The queries of one driver: those of which the CRC-32 of the name, modulo `of`, is `number`.

    Attributes:
        number: from 0.
        of: number of partitions; each query is in exactly one.
    """

    number: int = 0
    of: int = 1

    def __contains__(self, key: str) -> bool:
        """Whether a query belongs to it, given its key ``name@version``. All versions of a query are in one partition,
        since a deletion has to precede the next registration."""
        return self.of == 1 or zlib.crc32(key.rpartition("@")[0].encode()) % self.of == self.number

    def __str__(self) -> str:
        return f"{self.number + 1} of {self.of}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Reads what `str` returns; None for anything else."""
        number, _, of = text.partition(" of ")
        return cls(int(number) - 1, int(of)) if number.isdecimal() and of.isdecimal() else None

    def name(self, thing: str) -> str:
        """Returns the name of this partition's own thing, such as its lease; the plain name if there is one
        partition."""
        return thing if self.of == 1 else f"{thing} {self}"

    @classmethod
    def all(cls, of: int) -> tuple[Self, ...]:
        return tuple(cls(number, of) for number in range(of))


ALL_QUERIES = QueryPartition()
