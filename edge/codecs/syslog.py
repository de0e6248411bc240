"""Decodes syslog messages of RFC 5424 and RFC 3164, one message per line, all messages of a block together.

A message of RFC 3164 may lack its priority, or its host if it has a tag. Cisco's devices put a sequence number before
the time, and write a year, fractions or a zone.

A time of RFC 3164 has neither year nor zone. The zone is the event time's (`EventTime.zone`). The year is chosen so
that the time is nearest to the arrival. A message of RFC 3164 may have a time in ISO 8601, because rsyslog sends such
messages.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.event_time import strptime
from edge.codecs.fields_codec import FieldsCodec, lines_of
from edge.codecs.schema import RecordSchema
from edgewater.synopses import BoolArray, IntArray

FIELDS = ("facility", "severity", "time", "arrival", "host", "app", "procid", "msgid", "message")
"""The fields of a message. A parameter of the structured data is an additional field ``sd.ID.PARAMETER``."""
FACILITIES = tuple(
    (
        "kern user mail daemon auth syslog lpr news uucp cron authpriv ftp ntp security console solaris-cron local0 "
        "local1 local2 local3 local4 local5 local6 local7"
    ).split()
)
SEVERITIES = ("emerg", "alert", "crit", "err", "warning", "notice", "info", "debug")
SD_FIELD = re.compile(r'sd\.([^=\]"\s]{1,32})\.([^=\]"\s.]{1,32})')
_VALUE = r'"(?:[^"\\]|\\.)*"'
_PRIORITY = r"<(?P<priority>\d|[1-9]\d|1[0-8]\d|19[01])>"
_NEW = (
    rf"(?s)^{_PRIORITY}1 (?P<time>\S+) (?P<host>\S+) (?P<app>\S+) (?P<procid>\S+) (?P<msgid>\S+) "
    rf'(?P<sd>-|(?:\[[^ =\]"]+(?: +[^ =\]"]+={_VALUE})* *\])+)(?: (?:\x{{FEFF}})?(?P<message>.*))?$'
)
_TIME = r"[A-Z][a-z][a-z] [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+"
_OLD = (  # devices leave out the priority, or the host
    rf"(?s)^(?:{_PRIORITY})?(?P<time>{_TIME}) "
    # A word that ends in a colon, or has a bracket, is the tag of a message without a host.
    r"(?P<host>[^\s\[\]]*[^\s\[\]:]) "
    r"(?:(?P<app>[^ :\[]+)(?:\[(?P<procid>[^\]]*)\])?: ?)?(?P<message>.*)$"
)
_TAGGED = rf"(?s)^(?:{_PRIORITY})?(?P<time>{_TIME}) (?P<app>[^ :\[]+)(?:\[(?P<procid>[^\]]*)\])?: ?(?P<message>.*)$"
_CISCO_TIME = r"(?:\d{4} )?[A-Z][a-z][a-z] [ \d]\d(?: \d{4})? \d\d:\d\d:\d\d(?:\.\d{1,6})?(?: UTC| GMT)?"
_CISCO = r"(?P<app>%[^\s:]+): ?(?P<message>.*)$"
_IOS = rf"(?s)^(?:{_PRIORITY})?(?:\d*: )?(?:(?P<host>[^\s:]+): )?[*.]?(?P<time>{_CISCO_TIME}): {_CISCO}"
_ASA = rf"(?s)^(?:{_PRIORITY})?(?P<time>{_CISCO_TIME}) (?P<host>[^\s:]+) ?: {_CISCO}"
_FORMS = (_NEW, _OLD, _TAGGED, _IOS, _ASA)  # no message has two forms
_PARTS = (
    r"^(?P<first>\d{4} )?(?P<day>[A-Z][a-z][a-z] [ \d]\d)(?P<year> \d{4})? (?P<clock>[\d:]+)(?P<fraction>\.\d+)?"
    r"(?P<zone> UTC| GMT)?$"
)
_NAMED = re.compile(r"\(\?P<(\w+)>")
_HALF_YEAR_S = 182 * 86_400  # derived: a time without a year is in the year that makes it nearest
"""A time that is nearer to the arrival than this is farther in every other year."""
_NIL = "-"
_IS_VALID = "\0valid"


@dataclass(frozen=True, slots=True)
class SyslogFormat:
    """Describes how messages become records.

    Attributes:
        schema: columns and event time. The event time is ISO 8601 text.
        fields: for each column of `schema.textual`, a field of `FIELDS`, or a field that `SD_FIELD` matches. Facility
            and severity are numbers in int64 columns, and names in string columns.
    """

    schema: RecordSchema
    fields: Mapping[str, str]

    def codec(self, arrival_ms: int) -> FieldsCodec:
        """Returns the codec of messages that arrive at `arrival_ms`."""

        def split(data: bytes, columns: Sequence[str]) -> tuple[pa.Array, BoolArray, dict[str, pa.Array]]:
            lines = lines_of(data)
            fields = _parse(lines, {_group_of(self.fields[name]) for name in columns})
            valid: BoolArray = fields.column(_IS_VALID).combine_chunks().to_numpy(zero_copy_only=False)
            return lines, valid, {name: self._text(name, fields, arrival_ms) for name in columns}

        return FieldsCodec(self.schema, split, "a syslog message, such as <13>1 2023-10-11T22:14:15Z host app - - -")

    def _text(self, column: str, fields: pa.Table, arrival_ms: int) -> pa.Array:
        field = self.fields[column]
        if field == "arrival":
            at = dt.datetime.fromtimestamp(arrival_ms / 1000, dt.UTC).isoformat()
            return pa.repeat(pa.scalar(at), fields.num_rows)
        text = fields.column(_group_of(field)).combine_chunks()
        text = pc.if_else(pc.equal(text, ""), None, text)  # a group that did not match
        if field in ("facility", "severity"):
            number = text.cast(pa.uint8())
            number = pc.shift_right(number, 3) if field == "facility" else pc.bit_wise_and(number, 7)
            names = FACILITIES if field == "facility" else SEVERITIES
            is_named = pa.types.is_string(self.schema.textual[column])
            return pc.take(pa.array(names), number) if is_named else number.cast(pa.string())
        if field == "time":
            return _with_year(text, arrival_ms, self.schema.time.zone)
        if (found := SD_FIELD.fullmatch(field)) is not None:
            return _parameter(text, *found.groups())
        return text if field == "message" else pc.if_else(pc.equal(text, _NIL), None, text)


def is_field(name: str) -> bool:
    """Returns whether a name is a field of a message."""
    return name in FIELDS or SD_FIELD.fullmatch(name) is not None


def _group_of(field: str) -> str:
    """Returns the name of the group, a part of a message, that contains a field."""
    if field in ("facility", "severity"):
        return "priority"
    return "sd" if field.startswith("sd.") else field


def _parse(lines: pa.Array, groups: set[str]) -> pa.Table:
    """Returns the texts of groups by line; null where a line lacks the part. `_IS_VALID` tells the valid lines."""
    kinds = np.where(pc.match_substring_regex(lines, r"^<\d{1,3}>1 "), 0, 1)
    table = _of_kinds(lines, kinds, groups)
    for rarer in range(2, len(_FORMS)):
        if (valid := table.column(_IS_VALID).to_numpy()).all():
            break
        table = _of_kinds(lines, kinds := np.where(valid, kinds, rarer), groups)
    return table


def _of_kinds(lines: pa.Array, kinds: IntArray, groups: set[str]) -> pa.Table:
    """Returns the texts of groups by line. The kind of a line is an index in `_FORMS`."""
    present = np.unique(kinds).tolist() or [0]
    if len(present) == 1:
        return _extract(lines, _FORMS[present[0]], groups)
    parts = [_extract(lines.filter(pa.array(kinds == n)), _FORMS[n], groups) for n in present]
    order = np.argsort(kinds, kind="stable")
    return pa.concat_tables(parts).combine_chunks().take(pa.array(np.argsort(order)))


def _extract(lines: pa.Array, pattern: str, groups: set[str]) -> pa.Table:
    """Extracts only the groups that are needed, because other groups take time."""
    needed = groups - {"arrival"}
    texts = pc.extract_regex(lines, _NAMED.sub(lambda m: m[0] if m[1] in needed else "(?:", pattern))
    columns = {name: pc.struct_field(texts, name) for name in _NAMED.findall(pattern) if name in needed}
    nothing = {name: pa.nulls(len(lines), pa.string()) for name in sorted(needed - set(columns))}
    return pa.table({_IS_VALID: texts.is_valid()} | {name: (columns | nothing)[name] for name in sorted(needed)})


def _with_year(texts: pa.Array, arrival_ms: int, zone: str) -> pa.Array:
    """Converts times to ISO 8601 texts; a time without a zone to a local time of `zone`."""
    is_old = pc.fill_null(pc.match_substring_regex(texts, r"^(?:\d{4} )?[A-Z]"), False)
    texts = pc.if_else(pc.equal(texts, _NIL), None, texts)
    if not pc.any(is_old).as_py():
        return texts
    old = texts.filter(is_old).dictionary_encode()
    fields = pc.extract_regex(old.dictionary, _PARTS)
    parts = {name: pc.struct_field(fields, name) for name in _NAMED.findall(_PARTS)}
    times = _nearest(
        parts, pc.local_timestamp(pa.scalar(arrival_ms, pa.timestamp("ms", zone))).cast(pa.timestamp("us"))
    )
    suffix = pc.if_else(pc.equal(parts["zone"], ""), "Z" if zone == "UTC" else "", "Z")
    fraction = pc.if_else(pc.equal(parts["fraction"], ""), ".000000", parts["fraction"])
    read = pc.binary_join_element_wise(times.cast(pa.timestamp("s")).cast(pa.string()), fraction, suffix, "")
    read = pc.coalesce(read, old.dictionary).take(old.indices)
    return read if len(read) == len(texts) else pc.replace_with_mask(texts, is_old, read)


def _nearest(parts: Mapping[str, pa.Array], arrival: pa.Scalar) -> pa.Array:
    """Returns the times nearest to the arrival, in their year if they state it; null where a text is no time."""
    stated = pc.utf8_trim_whitespace(pc.binary_join_element_wise(parts["first"], parts["year"], ""))
    this_year = arrival.as_py().year
    best = pa.nulls(len(stated), pa.timestamp("us"))
    for year in (this_year, this_year - 1, this_year + 1):
        years = pc.if_else(pc.equal(stated, ""), str(year), stated)
        times = strptime(pc.binary_join_element_wise(years, parts["day"], parts["clock"], " "), "%Y %b %d %H:%M:%S")
        is_nearer = pc.fill_null(pc.less(_distance(times, arrival), _distance(best, arrival)), True)
        best = pc.if_else(pc.and_(is_nearer, times.is_valid()), times, best)
        if pc.all(pc.fill_null(pc.less(_distance(best, arrival), _HALF_YEAR_S * 1_000_000), False)).as_py():
            break
    return best


def _distance(times: pa.Array, other: pa.Scalar) -> pa.Array:
    return pc.abs(pc.subtract(times, other).cast(pa.int64()))


def _parameter(data: pa.Array, element: str, name: str) -> pa.Array:
    """Returns the value of a parameter in structured data.

    A quote inside a value has a backslash, so the text of a value is never taken for a parameter.
    """
    pairs = rf' +[^ =\]"]+={_VALUE}'
    pattern = rf'\[{_literal(element)}(?:{pairs})*? +{_literal(name)}="(?P<value>(?:[^"\\]|\\.)*)"'
    values = pc.struct_field(pc.extract_regex(data, pattern), "value")
    if pc.any(pc.fill_null(pc.match_substring(values, "\\"), False)).as_py():
        values = pc.replace_substring_regex(values, r'\\(["\\\]])', r"\1")
    return values


def _literal(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
