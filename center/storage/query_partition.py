"""Divides the queries among the drivers that lead at the same time."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class QueryPartition:
    """The queries of one driver. A query is in the partition if the CRC-32 of its name, modulo `of`, is `number`.

    Attributes:
        number: number of the partition, from 0.
        of: number of partitions. Each query is in exactly one partition.
    """

    number: int = 0
    of: int = 1

    def __contains__(self, key: str) -> bool:
        """Returns whether a query is in the partition.

        All versions of a query are in one partition, because a deletion must come before the next registration.

        Args:
            key: the query's key, ``name@version``.
        """
        return self.of == 1 or zlib.crc32(key.rpartition("@")[0].encode()) % self.of == self.number

    def __str__(self) -> str:
        return f"{self.number + 1} of {self.of}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Returns the partition from the result of `str`, or None for any other text."""
        number, _, of = text.partition(" of ")
        return cls(int(number) - 1, int(of)) if number.isdecimal() and of.isdecimal() else None

    def name(self, thing: str) -> str:
        """Returns the name of an object that each partition has, such as its lease. With one partition, this is the
        plain name.
        """
        return thing if self.of == 1 else f"{thing} {self}"

    @property
    def directory(self) -> str:
        """The name of the partition's directory of segments."""
        return f"{self.number + 1}-of-{self.of}"

    @classmethod
    def all(cls, of: int) -> tuple[Self, ...]:
        return tuple(cls(number, of) for number in range(of))


ALL_QUERIES = QueryPartition()
