"""Text lines whose fields are extracted by a pattern or by keys: access logs, and the formats `regex` and `logfmt`.

All lines of a block are split together, column by column. A line without the expected form is rejected as malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.event_time import cast_or_null, mask_of, reject, time_accepted
from edge.codecs.lenient import lenient_parse, without_words
from edge.codecs.line_decoder import Undecodable
from edge.codecs.logfmt import logfmt_fields
from edge.codecs.schema import RecordSchema
from edge.records import RejectionReason, Rejections, truncate_example
from edgewater.base.streams import type_name
from edgewater.synopses import BoolArray

_EXAMPLES = {"string": "JFK in UTF-8", "int64": "42", "float64": "4.2", "bool": "true or false"}
_GROUP = re.compile(r"\(\?P?<([A-Za-z_]\w*)>")


@dataclass(frozen=True, slots=True)
class LinePattern:
    """A regular expression in RE2's syntax that has to match a whole line. Each named group is a column.

    Attributes:
        nulls: texts that mean null in every column. An empty text and a group without a match are always null.
        never: a regular expression that no part of a line may match; empty: there is none.
    """

    pattern: str
    nulls: tuple[str, ...] = ()
    never: str = ""

    @property
    def groups(self) -> list[str]:
        return _GROUP.findall(self.pattern)

    @property
    def fault(self) -> str | None:
        """The reason why RE2 refuses the pattern, or why its groups cannot be columns; None if the pattern is valid."""
        try:
            fields = self.fields(pa.array([""], pa.string()))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
            return str(exc)
        names = [field.name for field in fields.type]
        if not names:
            return "it has no named group"
        repeated = sorted({name for name in names if names.count(name) > 1})
        return f"the group {repeated[0]} is there twice" if repeated else None

    def of(self, columns: Sequence[str]) -> LinePattern:
        """Returns the pattern with groups for some columns only, because other groups take time."""
        plain = _GROUP.sub(lambda group: group[0] if group[1] in columns else "(?:", self.pattern)
        return replace(self, pattern=plain)

    def fields(self, lines: pa.Array) -> pa.Array:
        """Returns a struct of texts for each line; null for a line that does not match."""
        named = _GROUP.sub(r"(?P<\1>", self.pattern)
        return pc.extract_regex(lines, f"^(?:{named})$")


class FieldsCodec:
    """A `LineCodec` for lines whose fields are texts.

    Args:
        split: takes the bytes of lines, and the columns. Returns the lines, a mask of the lines with the expected form,
            and the texts of each column.
        form: the expected form, for messages.
        nulls: texts that mean null, besides an empty text.
    """

    def __init__(
        self,
        schema: RecordSchema,
        split: Callable[[bytes, Sequence[str]], tuple[pa.Array, BoolArray, Mapping[str, pa.Array]]],
        form: str,
        nulls: Sequence[str] = (),
    ) -> None:
        self.schema = schema
        self._textual = schema.textual
        self._split, self._form = split, form
        self._nulls = pa.array(["", *nulls], pa.string())

    def parse(self, data: bytes, rejections: Rejections) -> pa.Table:
        if not data.strip():
            return pa.schema(list(self._textual.items())).empty_table()
        try:
            data.isascii() or data.decode()
        except UnicodeDecodeError as exc:
            raise Undecodable(f"not UTF-8 at byte {exc.start}") from exc
        lines, valid, texts = self._split(data, list(self._textual))
        if not valid.all():
            example = lines[int(np.argmin(valid))].as_py()
            rejections.add(RejectionReason.MALFORMED, example, f"expected {self._form}", int((~valid).sum()))
        texts = {name: pc.if_else(pc.is_in(text, self._nulls), None, text) for name, text in texts.items()}
        return typed_table(self.schema, texts, valid, lambda row: str(lines[row]), rejections)

    def reject_invalid(self, lines: list[bytes], rejections: Rejections) -> list[bytes]:
        good = []
        for line in lines:
            try:
                line.decode()
            except UnicodeDecodeError as exc:
                rejections.add(RejectionReason.MALFORMED, line, f"not UTF-8 at byte {exc.start}")
            else:
                good.append(line)
        return good


def typed_table(
    schema: RecordSchema,
    texts: Mapping[str, pa.Array],
    valid: BoolArray,
    line: Callable[[int], str],
    rejections: Rejections,
    may_hide: BoolArray | None = None,
) -> pa.Table:
    """Converts texts to the columns `schema.textual`, and rejects the records with a text that is no value of its type.

    Args:
        texts: the texts of each column; bytes if they may not be UTF-8.
        valid: a mask of the records that are not rejected yet. Only these are in the result.
        line: returns a record as it was sent, for messages.
        may_hide: a mask of the records in which a quote may hide other records. What is stated about such a record, if
            it is rejected, has neither its time nor its device. None: there are none.
    """
    may_hide = np.zeros(len(valid), np.bool_) if may_hide is None else may_hide
    texts = {name: without_words(text, schema.nulls.get(name, ())) for name, text in texts.items()}
    columns = {name: _values(texts[name], name, schema) for name in schema.textual}
    table, keep = pa.table(columns), valid.copy()
    for name, declared in schema.textual.items():
        bad = mask_of(pc.and_(texts[name].is_valid(), columns[name].is_null())) & keep
        if bad.any():
            is_time = name in schema.time.columns
            reason = RejectionReason.TIME_UNPARSEABLE if is_time else RejectionReason.WRONG_TYPE
            kind = type_name(declared)
            accepted = time_accepted(schema.time) if is_time else f"{kind} such as {_EXAMPLES[kind]}"

            def describe(row: int, name: str = name, accepted: str = accepted) -> tuple[str, str]:
                got = truncate_example(texts[name][row].as_py())[:40]
                return line(row), f"{name}: got {got!r}; expected {accepted}"

            reject(reason, bad & ~may_hide, table, schema, describe, rejections)
            if (hiding := bad & may_hide).any():
                rejections.add(reason, *describe(int(np.argmax(hiding))), int(hiding.sum()))
            keep &= ~bad
    return table if keep.all() else table.filter(pa.array(keep))


def _values(texts: pa.Array, name: str, schema: RecordSchema) -> pa.Array:
    """Returns the texts of a column as values of its type; null for a text that is no value of the type."""
    declared = schema.textual[name]
    texts = texts if pa.types.is_string(texts.type) else cast_or_null(texts, pa.string())
    if pa.types.is_string(declared):
        return texts
    return lenient_parse(texts, name, schema)


def pattern_codec(schema: RecordSchema, pattern: LinePattern, form: str) -> FieldsCodec:
    """Returns the codec of lines that match a pattern.

    Args:
        form: the expected form, for messages.
    """

    def split(data: bytes, columns: Sequence[str]) -> tuple[pa.Array, BoolArray, dict[str, pa.Array]]:
        lines = lines_of(data)
        fields = pattern.of(columns).fields(lines)
        valid = mask_of(fields.is_valid())
        if pattern.never:
            valid = valid & ~mask_of(pc.match_substring_regex(lines, pattern.never))
        return lines, valid, {name: fields.field(name) for name in columns}

    return FieldsCodec(schema, split, form, pattern.nulls)


def logfmt_codec(schema: RecordSchema) -> FieldsCodec:
    """Returns the codec of lines such as ``level=info msg="a text" took_ms=12``."""

    def split(data: bytes, columns: Sequence[str]) -> tuple[pa.Array, BoolArray, dict[str, pa.Array]]:
        lines = lines_of(data)
        valid, texts = logfmt_fields(lines, columns)
        return lines, valid, texts

    return FieldsCodec(schema, split, "key=value pairs, each key once, with closed quotes")


def lines_of(data: bytes) -> pa.Array:
    """Returns the lines of UTF-8 text without their line ends. Leaves out blank lines."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    if not len(ends) or ends[-1] < len(data):
        ends = np.append(ends, len(data))
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    texts = pa.Array.from_buffers(pa.string(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    lines = pc.ascii_rtrim(texts, "\r\n")
    begins = np.frombuffer(data, np.uint8)[offsets[:-1]]
    if (begins > ord(" ")).all():
        return lines
    return lines.filter(pc.greater(pc.binary_length(pc.ascii_trim(lines, " \t\r\v\f")), 0))
