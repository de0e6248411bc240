"""Text lines whose fields are extracted by a pattern or by keys: access logs, and the formats `regex` and `logfmt`.

All lines of a block are split together, column by column. A line without the expected form is rejected as malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.event_time import cast_or_null, readable_spans, time_accepted
from edge.codecs.lenient import lenient_parse
from edge.codecs.line_decoder import Undecodable
from edge.codecs.logfmt import logfmt_fields
from edge.codecs.schema import RecordSchema
from edge.records import RejectionReason, Rejections, truncate_example
from edgewater.model import arithmetic
from edgewater.model.streams import type_name
from edgewater.synopses import BoolArray

ACCESS_TIME = "%d/%b/%Y:%H:%M:%S %z"
"""The pattern of times in an access log, such as 10/Oct/2000:13:55:36 -0700."""
_QUOTED = r'(?:[^"\\]|\\.)*'
_ADDRESS = r'[^\s,"]+'
_CLIENT = rf"(?P<remote_addr>{_ADDRESS})"
# A request that is none of HTTP, such as - or binary data, has the second form. Its fields are then null.
_COMMON = (
    r" (?P<ident>\S+) (?P<remote_user>\S+) \[(?P<time>[^\]]+)\] "
    r'"(?:(?P<method>[A-Z][A-Z0-9_-]*) (?P<path>(?:[^ ?"\\]|\\.)*)(?:\?(?P<query>(?:[^ "\\]|\\.)*))?'
    rf'(?: (?P<protocol>[A-Z]+/[0-9.]+))?|{_QUOTED})" (?P<status>\d{{3}}|-) (?P<bytes>\d+|-)'
)
_COMBINED = rf'{_COMMON} "(?P<referer>{_QUOTED})" "(?P<user_agent>{_QUOTED})"(?: (?:"{_QUOTED}"|[^\s"\[\]]+))*'
ACCESS_LOGS = {
    "common": _CLIENT + _COMMON,
    "combined": _CLIENT + _COMBINED,
    "vhost_combined": rf"(?P<vhost>[^\s,\"]+):(?P<port>\d+) {_CLIENT}{_COMBINED}",
    "forwarded_combined": rf"(?P<addresses>{_CLIENT}(?:, ?{_ADDRESS})*){_COMBINED}",
}
"""The patterns of lines in access logs of nginx and Apache, by format. Fields after the user agent are skipped."""
ACCESS_NULLS = ("-",)
_EXAMPLES = {"string": "JFK in UTF-8", "int64": "42", "float64": "4.2", "bool": "true or false"}
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


def access_log(format_: str, columns: Sequence[str]) -> LinePattern:
    """Returns the pattern of an access log with groups for these columns only, because other groups take time."""
    pattern = _GROUP.sub(lambda group: group[0] if group[1] in columns else "(?:", ACCESS_LOGS[format_])
    return LinePattern(pattern, ACCESS_NULLS)


def access_fields(format_: str) -> list[str]:
    """Returns the fields of an access log."""
    return LinePattern(ACCESS_LOGS[format_]).groups


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
) -> pa.Table:
    """Converts texts to the columns `schema.textual`, and rejects the records with a text that is no value of its type.

    Args:
        texts: the texts of each column; bytes if they may not be UTF-8.
        valid: a mask of the records that are not rejected yet. Only these are in the result.
        line: returns a record as it was sent, for messages.
    """
    columns = {}
    keep, wrong = valid.copy(), np.zeros(len(valid), np.bool_)
    for name, declared in schema.textual.items():
        text = texts[name]
        columns[name] = _values(text, declared, name in schema.lenient)
        bad = _mask(pc.and_(text.is_valid(), columns[name].is_null())) & keep
        if bad.any():
            first = int(np.argmax(bad))
            got = f"{name}: got {truncate_example(text[first].as_py())[:40]!r}"
            is_time = name in schema.time.columns
            reason = RejectionReason.TIME_UNPARSEABLE if is_time else RejectionReason.WRONG_TYPE
            kind = type_name(declared)
            accepted = time_accepted(schema.time) if is_time else f"{kind} such as {_EXAMPLES[kind]}"
            rejections.add(reason, line(first), f"{got}; expected {accepted}", int(bad.sum()))
            wrong |= bad & (not is_time)
            keep &= ~bad
    table = pa.table(columns)
    if wrong.any() and schema.has_time:
        times = [table.column(name).combine_chunks().filter(pa.array(wrong)) for name in schema.time.columns]
        rejections.add_times(RejectionReason.WRONG_TYPE, *readable_spans(times, schema.time))
    return table if keep.all() else table.filter(pa.array(keep))


def _values(texts: pa.Array, declared: pa.DataType, is_lenient: bool) -> pa.Array:
    """Returns texts as values of a type; null for a text that is no value of the type."""
    texts = texts if pa.types.is_string(texts.type) else cast_or_null(texts, pa.string())
    if pa.types.is_string(declared):
        return texts
    return lenient_parse(texts, declared) if is_lenient else arithmetic.parse(texts, declared)


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
