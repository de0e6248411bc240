"""A place in a file, as the journal stores it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edge.records import Position, Rejection
from edgewater.errors import StorageError


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The first `row` good records of the `block` units at `offset` of a file have been read.

    Units are bytes of decompressed text, or rows of a Parquet file. Between blocks `row` and
    `block` are 0.

    Attributes:
        inode: tells the file from another of the same name, also after it has been renamed.
        head: (n, CRC32C of the file's first n bytes): inodes are given away again.
        arrival_ms: when the block at or before this position was read; judges its event times.
        header: column names, for CSV.
        ended: the file has nothing more, whatever a look at it says (a damaged file).
        note: a statement about the file as a whole that was made between the last position and this.
        others: where the other files stand that are followed at the same time.
    """

    file: str
    inode: int
    head: tuple[int, int] = (0, 0)
    offset: int = 0
    block: int = 0
    row: int = 0
    arrival_ms: int = 0
    header: tuple[str, ...] | None = None
    ended: bool = False
    note: Rejection | None = None
    others: tuple[FilePosition, ...] = ()

    def behind_block(self, length: int, arrival_ms: int) -> FilePosition:
        """The position behind the block of `length` units at `offset`."""
        return replace(self, offset=self.offset + length, block=0, row=0, arrival_ms=arrival_ms, note=None)

    def to_json(self) -> Position:
        """Without what has its default: it is written with every chunk."""
        result: Position = {
            "file": self.file,
            "inode": self.inode,
            "head": list(self.head),
            "offset": self.offset,
            "arrival": self.arrival_ms,
        }
        if self.row:
            result |= {"row": self.row, "block": self.block}
        if self.header is not None:
            result["header"] = list(self.header)
        if self.ended:
            result["ended"] = True
        if self.note is not None:
            result["note"] = self.note.to_json()
        if self.others:
            result["others"] = [other.to_json() for other in self.others]
        return result

    @classmethod
    def from_json(cls, given: Position) -> FilePosition:
        """Raises StorageError for a position that another version or source made."""
        try:
            return cls._read(given)
        except (KeyError, TypeError, ValueError) as exc:
            raise StorageError(f"not a position in a file: {given!r}") from exc

    @classmethod
    def _read(cls, given: dict[str, Any]) -> FilePosition:
        head, header, note = given["head"], given.get("header"), given.get("note")
        return cls(
            file=str(given["file"]),
            inode=int(given["inode"]),
            head=(int(head[0]), int(head[1])),
            offset=int(given["offset"]),
            block=int(given.get("block", 0)),
            row=int(given.get("row", 0)),
            arrival_ms=int(given["arrival"]),
            header=tuple(header) if header is not None else None,
            ended=bool(given.get("ended", False)),
            note=Rejection(**note) if note is not None else None,
            others=tuple(cls._read(other) for other in given.get("others", ())),
        )
