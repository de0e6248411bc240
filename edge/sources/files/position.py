"""A position in a file, as the journal stores it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from edge.codecs.decompression import NO_BYTES, Digest
from edge.records import Position, Rejection
from edgewater.base.errors import StorageError

FileId = tuple[int, int]
"""The device and the inode of a file. Inodes of two file systems may be equal."""
Span = tuple[int, int]
"""Event times from the first one to before the second one, in ms."""


def united(*spans: Span | None) -> Span | None:
    """Returns the span that covers all these spans; None if there are none."""
    known = [span for span in spans if span is not None]
    return (min(begin for begin, _ in known), max(end for _, end in known)) if known else None


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The position after the first `row` valid records of the `block` units at `offset` of a file.

    A unit is a byte of decompressed text, or a row of a Parquet file. Between two blocks, `row` and `block` are 0.

    Attributes:
        inode: identifies the file on its device, also after it has been renamed.
        head: (n, CRC32C of the file's first n bytes). It distinguishes files after an inode was reused.
        tail: (n, CRC32C of the n decompressed bytes before `offset`). It tells whether a file still has the bytes that
            were read, and which files are copies. (0, 0) if unknown.
        size: the size on disk of an ended file, in bytes; 0 if unknown.
        device: the file's device; 0 if unknown, as in a position of release 0.3.0.
        digest: the digest of all decompressed bytes before `offset`; None if unknown.
        span: the event times of all records of a followed file so far; None if there are none.
        again: the event times of records of earlier content of the file. New records with such times may repeat them.
        alike: the file begins like another file up to this offset.
        left_out: whether the records before `alike` are not counted.
        like: this other file, while it may have further bytes of this file; then None.
        arrival_ms: wall time when the block at or before this position was read. Event times are validated against it.
        header: column names, for CSV.
        ended: whether reading of the file has ended for good, also if it is damaged.
        note: a rejection of the whole file that was reported between the previous position and this one.
        others: the positions of the other files that are followed at the same time.
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
    tail: tuple[int, int] = (0, 0)
    size: int = 0
    device: int = 0
    digest: Digest | None = NO_BYTES
    span: Span | None = None
    again: Span | None = None
    alike: int = 0
    left_out: bool = False
    like: FileId | None = None

    @property
    def identity(self) -> FileId:
        return self.device, self.inode

    def is_at(self, identity: FileId | None) -> bool:
        """Returns whether a file with this identity is the position's file."""
        return identity is not None and identity[1] == self.inode and self.device in (0, identity[0])

    def moved(self, path: str, identity: FileId) -> FilePosition:
        """Returns the same position in another file with equal content, or in the same file after it was renamed."""
        return replace(self, file=path, device=identity[0], inode=identity[1], note=None)

    def after_block(
        self, length: int, arrival_ms: int, tail: tuple[int, int] = (0, 0), digest: Digest | None = None
    ) -> FilePosition:
        """Returns the position after the block of `length` units at `offset`."""
        offset = self.offset + length
        return replace(self, offset=offset, block=0, row=0, arrival_ms=arrival_ms, note=None, tail=tail, digest=digest)

    def to_state(self) -> Position:
        """Returns the position as JSON. Default values are left out, because each chunk contains its positions."""
        result: Position = {"file": self.file, "inode": self.inode, "offset": self.offset, "arrival": self.arrival_ms}
        result["head"] = list(self.head)
        for name, absent in _ABSENT.items():
            value = getattr(self, name)
            if value != absent:
                result[name] = list(value) if isinstance(value, tuple) else value
        if self.offset and self.digest is not None:
            result["digest"] = list(self.digest)
        if self.note is not None:
            result["note"] = self.note.to_json()
        if self.others:
            result["others"] = [other.to_state() for other in self.others]
        return result

    @classmethod
    def from_state(cls, document: Position) -> FilePosition:
        """Returns the position from its JSON.

        Raises:
            StorageError: the document is not a result of `to_state`.
        """
        try:
            return cls._read(document)
        except (LookupError, TypeError, ValueError) as exc:
            raise StorageError(f"not a position in a file: {document!r}") from exc

    @classmethod
    def _read(cls, document: dict[str, Any]) -> FilePosition:
        offset, note = int(document["offset"]), document.get("note")
        stated = {name: _stated(name, document[name]) for name in _ABSENT if name in document}
        return cls(
            file=str(document["file"]),
            inode=int(document["inode"]),
            head=_pair(document["head"]),
            offset=offset,
            arrival_ms=int(document["arrival"]),
            note=Rejection(**note) if note is not None else None,
            others=tuple(cls._read(other) for other in document.get("others", ())),
            digest=(_pair(document["digest"]) if "digest" in document else None) if offset else NO_BYTES,
            **stated,
        )


_ABSENT: dict[str, Any] = {
    each.name: each.default
    for each in fields(FilePosition)
    if each.name not in ("file", "inode", "head", "offset", "arrival_ms", "note", "others", "digest")
}
"""The fields that are stored as they are unless they have these defaults."""


def _stated(name: str, value: Any) -> Any:
    """Returns the value of a field from its JSON. Raises LookupError, TypeError, ValueError."""
    absent = _ABSENT[name]
    if isinstance(absent, int):
        return type(absent)(value)
    if value is absent is None:
        return None
    return tuple(value) if name == "header" else _pair(value)


def _pair(value: list[int]) -> tuple[int, int]:
    return int(value[0]), int(value[1])
