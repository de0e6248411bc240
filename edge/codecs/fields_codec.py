"""Text lines whose fields are extracted by a pattern or by keys: the formats `regex`, `combined` and `logfmt`.

All lines of a block are split together, column by column. A line without the expected form is rejected as malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.event_time import cast_or_null, readable_times, time_accepted
from edge.codecs.line_decoder import Undecodable
from edge.codecs.logfmt import logfmt_fields
from edge.codecs.schema import RecordSchema
from edge.records import RejectionReason, Rejections
from edgewater.model.streams import type_name
from edgewater.synopses import BoolArray

COMBINED_TIME = "%d/%b/%Y:%H:%M:%S %z"
"""The pattern of times in an access log, such as 10/Oct/2000:13:55:36 -0700."""
_QUOTED = r'(?:[^"\\]|\\.)*'
COMBINED_PATTERN = (
    r"(?P<remote_addr>\S+) (?P<ident>\S+) (?P<remote_user>.*?) \[(?P<time>[^\]]+)\] "
    rf'"(?:(?P<method>[A-Z]+) (?P<path>[^ ?"]*)(?:\?(?P<query>[^ "]*))?(?: (?P<protocol>[^ "]+))?|{_QUOTED})" '
    rf'(?P<status>\d{{3}}|-) (?P<bytes>\d+|-)(?: "(?P<referer>{_QUOTED})" "(?P<user_agent>{_QUOTED})")?.*'
)
"""The pattern of lines in the common or combined log format of nginx and Apache. Fields after the user agent are
skipped.
"""
COMBINED_FIELDS = (
    "remote_addr", "ident", "remote_user", "time", "method", "path", "query", "protocol", "status", "bytes", "referer",
    "user_agent",
)  # fmt: skip
COMBINED_NULLS = ("-",)
_TRUE, _FALSE = ["1", "true", "True", "TRUE"], ["0", "false", "False", "FALSE"]
_INTEGER = r"^-?[0-9]{1,19}$"
_NUMBER = r"^-?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[iI][nN][fF]|[nN][aA][nN])$"
_EXAMPLES = {"int64": "42", "float64": "4.2", "bool": "true or false"}
_GROUP = re.compile(r"\(\?P?<([A-Za-z_]\w*)>")


@dataclass(frozen=True, slots=True)
class LinePattern:
    """A regular expression in RE2's syntax that has to match a whole line. Each named group is a column.

    Attributes:
        nulls: texts that mean null in every column. An empty text and a group without a match are always null.
    """

    pattern: str
    nulls: tuple[str, ...] = ()

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

    def fields(self, lines: pa.Array) -> pa.Array:
        """Returns a struct of texts for each line; null for a line that does not match."""
        named = _GROUP.sub(r"(?P<\1>", self.pattern)
        return pc.extract_regex(lines, f"^(?:{named})$")


def combined(columns: Sequence[str]) -> LinePattern:
    """Returns the pattern of access logs with groups for these columns only, because other groups take time."""
    pattern = _GROUP.sub(lambda group: group[0] if group[1] in columns else "(?:", COMBINED_PATTERN)
    return LinePattern(pattern, COMBINED_NULLS)


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
        columns = {}
        keep, wrong = valid.copy(), np.zeros(len(valid), np.bool_)
        for name, declared in self._textual.items():
            text = pc.if_else(pc.is_in(texts[name], self._nulls), None, texts[name])
            columns[name] = self._typed(text, declared)
            bad = _mask(pc.and_(text.is_valid(), columns[name].is_null())) & keep
            if bad.any():
                self._reject(name, declared, text, lines, bad, rejections)
                wrong |= bad & (name not in self.schema.time.columns)
                keep &= ~bad
        table = pa.table(columns)
        if wrong.any() and self.schema.has_time:
            times = [table.column(name).combine_chunks().filter(pa.array(wrong)) for name in self.schema.time.columns]
            rejections.add_times(RejectionReason.WRONG_TYPE, readable_times(times, self.schema.time.unit))
        return table if keep.all() else table.filter(pa.array(keep))

    def _typed(self, texts: pa.Array, declared: pa.DataType) -> pa.Array:
        """Converts texts to a type; null for a text that is no value of the type."""
        if pa.types.is_string(declared):
            return texts
        if pa.types.is_boolean(declared):
            false = pc.if_else(pc.is_in(texts, pa.array(_FALSE)), pa.scalar(False), pa.scalar(None, pa.bool_()))
            return pc.if_else(pc.is_in(texts, pa.array(_TRUE)), pa.scalar(True), false)
        try:
            return texts.cast(declared)
        except pa.ArrowInvalid:
            shape = _INTEGER if pa.types.is_integer(declared) else _NUMBER
            trimmed = pc.replace_substring_regex(pc.ascii_trim_whitespace(texts), r"^\+", "")
            return cast_or_null(pc.if_else(pc.match_substring_regex(trimmed, shape), trimmed, None), declared)

    def _reject(
        self, name: str, declared: pa.DataType, text: pa.Array, lines: pa.Array, bad: BoolArray, rejections: Rejections
    ) -> None:
        first = int(np.argmax(bad))
        got = f"{name}: got {text[first].as_py()[:40]!r}"
        if name in self.schema.time.columns:
            reason, accepted = RejectionReason.TIME_UNPARSEABLE, time_accepted(self.schema.time.unit)
        else:
            kind = type_name(declared)
            reason, accepted = RejectionReason.WRONG_TYPE, f"{kind} such as {_EXAMPLES[kind]}"
        rejections.add(reason, lines[first].as_py(), f"{got}; expected {accepted}", int(bad.sum()))

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


def pattern_codec(schema: RecordSchema, pattern: LinePattern, form: str) -> FieldsCodec:
    """Returns the codec of lines that match a pattern.

    Args:
        form: the expected form, for messages.
    """

    def split(data: bytes, columns: Sequence[str]) -> tuple[pa.Array, BoolArray, dict[str, pa.Array]]:
        lines = lines_of(data)
        fields = pattern.fields(lines)
        valid = _mask(fields.is_valid())
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


def _mask(array: pa.Array) -> BoolArray:
    mask: BoolArray = array.to_numpy(zero_copy_only=False)
    return mask
