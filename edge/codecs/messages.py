"""Decodes messages of a broker, one record each. Some columns, such as a key, are not in the bodies of the messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import pyarrow as pa

from edge.codecs.csv_records import is_one_record
from edge.codecs.event_time import extract_event_times
from edge.codecs.formats import TextFormat
from edge.codecs.schema import RecordSchema
from edge.records import Decoded, Rejection, Rejections
from edgewater.model import arithmetic

log = logging.getLogger(__name__)

LOCATE_EVERY_MS = 60_000  # limit: the CPU to name the messages of rejected records


class MessageDecoder:
    """Decodes the bodies of messages in a text format.

    Args:
        text: the format. Its schema has all columns.
        more: the columns that are not in the bodies, possibly with the event time. A text is cast to the type of its
            column; null if the cast fails.
        where: name of the input, for messages.

    Raises:
        InvalidRecord: the format's header lacks a column.
    """

    def __init__(self, text: TextFormat, more: Sequence[str], where: str) -> None:
        self._schema, self._more, self._where = text.schema, tuple(more), where
        self._located_ms = -LOCATE_EVERY_MS
        types = {name: kind for name, kind in text.schema.textual.items() if name not in self._more}
        body = ColumnsSchema.of(text.schema, types)
        self._delimiter = text.dialect.delimiter if text.format == "csv" else None
        self._lines = replace(text, schema=body).decoder(text.header, where)

    def decode(
        self,
        bodies: Sequence[bytes | None],
        more: Mapping[str, Sequence[object] | pa.Array],
        arrival_ms: int,
        where: Callable[[int], str] | None = None,
        rejected: Sequence[Rejection] = (),
    ) -> Decoded:
        """Decodes messages to one batch.

        Args:
            bodies: the body of each message. An empty body, or None, deletes something and is no record.
            more: by column, one value per message; None for null. Values have the column's type, or are texts.
            arrival_ms: the time against which event times are validated.
            where: returns the place of a message in its topic. If given, the first rejected message is logged with its
                place, at most once per `LOCATE_EVERY_MS`. The rejection then states the place, too.
            rejected: earlier rejections, which the result includes.
        """
        rejections = Rejections(rejected)
        types = self._schema.textual
        records = [n for n, body in enumerate(bodies) if body]
        texts = [bodies[n] or b"" for n in records]
        arrays = {name: _typed(more[name], types[name]) for name in self._more}
        if len(records) < len(bodies):
            arrays = {name: array.take(pa.array(records, pa.int64())) for name, array in arrays.items()}
        tables = self._tables(texts, 0, arrays, rejections)
        table = pa.concat_tables(tables) if tables else pa.schema(list(types.items())).empty_table()
        decoded = extract_event_times(table, self._schema, arrival_ms, rejections)
        if where is None or not decoded.rejected or 0 <= arrival_ms - self._located_ms < LOCATE_EVERY_MS:
            return decoded
        self._located_ms = arrival_ms
        number, reason = self._first_rejected(bodies, more, arrival_ms)
        place = f"{self._where}, {where(number)}"
        log.warning("%s: the message is rejected: %s", place, reason)
        located = (
            replace(each, message=f"{place}: {each.message}") if each.reason == reason else each
            for each in decoded.rejected
        )
        return replace(decoded, rejected=tuple(located))

    def _first_rejected(
        self, bodies: Sequence[bytes | None], more: Mapping[str, Sequence[object] | pa.Array], arrival_ms: int
    ) -> tuple[int, str]:
        """Returns the index of the first rejected message, and the reason. At least one message must be rejected.

        Decodes the messages about twice.
        """
        begin, end = 0, len(bodies)
        while True:
            middle = begin + max(1, (end - begin) // 2)
            part = {name: values[begin:middle] for name, values in more.items()}
            rejected = self.decode(bodies[begin:middle], part, arrival_ms).rejected
            if rejected and middle - begin == 1:
                return begin, rejected[0].reason
            begin, end = (begin, middle) if rejected else (middle, end)
            assert begin < end, "no message is rejected"

    def _tables(
        self, bodies: Sequence[bytes], begin: int, more: Mapping[str, pa.Array], rejections: Rejections
    ) -> list[pa.Table]:
        """Returns the tables of the valid messages.

        A block with rejected messages is halved, so that the other columns are joined with the right messages.
        """
        here = Rejections()
        lines = joined(bodies, self._delimiter)
        table = self._lines.parse(lines, here)
        # A quote of CSV that is not closed in its body would hide the next bodies.
        is_separate = not self._more and not (self._delimiter and b'"' in lines)
        if table.num_rows == len(bodies) or is_separate or len(bodies) <= 1:
            only = ""
            if (by := self._schema.rejects_by) in self._more and len(bodies) == 1:
                only = self._schema.only(more[by][begin].as_py())
            rejections.extend(replace(each, only=only or each.only) for each in here.as_tuple())
            for name in self._more:
                table = table.append_column(name, more[name].slice(begin, table.num_rows))
            return [table]
        middle = len(bodies) // 2
        return [
            *self._tables(bodies[:middle], begin, more, rejections),
            *self._tables(bodies[middle:], begin + middle, more, rejections),
        ]


def _typed(values: Sequence[object] | pa.Array, declared: pa.DataType) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return arithmetic.cast(array, declared) if pa.types.is_string(array.type) else array.cast(declared)


class ColumnsSchema(RecordSchema):
    """The columns of a part of each record, such as its body. The event time need not be among them."""

    @classmethod
    def of(cls, schema: RecordSchema, columns: Mapping[str, pa.DataType]) -> ColumnsSchema:
        """Returns the schema of some columns of records."""
        same = {each.name: getattr(schema, each.name) for each in fields(schema)}
        return cls(**{**same, "columns": columns})

    @property
    def textual(self) -> dict[str, pa.DataType]:
        return dict(self.columns)


def joined(bodies: Sequence[bytes], delimiter: str | None = None) -> bytes:
    """Returns the bodies as lines, without the NUL that ends a string of C.

    A line feed inside a body becomes a space, because no text format but CSV has line feeds in values. A blank body
    becomes a line that is rejected, because blank lines would be skipped without a count.

    Args:
        delimiter: the delimiter of CSV, in which a line feed in quotes stays; None for other formats.
    """
    joined = b"\n".join(bodies)
    is_plain = b"\0" not in joined and joined.count(b"\n") == len(bodies) - 1
    if not is_plain or any(not body or body.isspace() for body in bodies):
        joined = b"\n".join([_one_line(body.rstrip(b"\0\r\n"), delimiter) or b"?" for body in bodies])
    return joined


def _one_line(body: bytes, delimiter: str | None) -> bytes:
    return body if delimiter and is_one_record(body, delimiter) else body.replace(b"\n", b" ").strip(b" ")
