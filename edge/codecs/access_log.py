"""Access logs of nginx and Apache: the formats that have a name, and formats that a line of the server declares."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from edge.codecs.fields_codec import LinePattern

ACCESS_TIME = "%d/%b/%Y:%H:%M:%S %z"
"""The pattern of times in an access log, such as 10/Oct/2000:13:55:36 -0700."""
ACCESS_NULLS = ("-",)
_QUOTED = r'(?:[^"\\]|\\.)*'
_ADDRESS = r'[^\s,"]+'
_TARGET = r'(?P<path>(?:[^ ?"\\]|\\.)*)(?:\?(?P<query>(?:[^ "\\]|\\.)*))?'
_MEMBERS = {
    # A request that is none of HTTP, such as - or binary data, has the second form. Its fields are then null.
    "request": rf"(?:(?P<method>[A-Z][A-Z0-9_-]*) {_TARGET}(?: (?P<protocol>[A-Z]+/[0-9.]+))?|{_QUOTED})",
    "request_uri": _TARGET,
    "query": r'\??(?P<query>[^ "]*)',
    "remote_addr": rf"(?P<remote_addr>{_ADDRESS})",
    "vhost": rf"(?P<vhost>{_ADDRESS})",
    "status": r"(?P<status>\d{3}|-)",
    "bytes": r"(?P<bytes>\d+|-)",
}
"""Fields with a form of their own. The form of any other field follows from the character after it."""
_NAMES: dict[str, str] = dict(
    pair.split(":")
    for pair in (
        "time_local:time time_iso8601:time msec:time body_bytes_sent:bytes http_referer:referer "
        "http_user_agent:user_agent request_method:method server_protocol:protocol uri:path args:query "
        "query_string:query h:remote_addr a:remote_addr A:local_addr l:ident u:remote_user t:time r:request "
        "m:method U:path q:query H:protocol s:status b:bytes B:bytes O:bytes_sent I:bytes_received D:duration_us "
        "T:duration_s v:vhost V:vhost p:port P:pid X:connection k:keepalive L:log_id f:file R:handler "
        "S:bytes_transferred"
    ).split()
)
"""The columns of variables of nginx and of directives of Apache. Other variables are columns of their own names."""
_TIME_UNITS = dict.fromkeys(("time_local", "t"), ACCESS_TIME) | {"time_iso8601": "iso8601", "msec": "s"}
_TIME_UNITS |= {"{sec}t": "s", "{msec}t": "ms", "{usec}t": "us"}
_TIME = r"\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}"
_OF_NAMES = {"t": r"[^\]]+", "time_local": _TIME, "time_iso8601": r"[0-9T:+-]+Z?"}
"""The forms of fields of these names. In brackets a time may have any form, and is rejected for itself."""
_SERVER = re.compile(
    r"remote_(?:addr|port)|realip_remote_\w+|time_\w+|msec|status|(?:body_)?bytes_sent|scheme|host|hostname|pid|pipe"
    r"|request_(?:time|length|id|method|uri|completion)|upstream_(?!http_|cookie_|trailer_)\w+|server_\w+|args"
    r"|query_string|https|http[23]|connection\w*|ssl_(?:protocol|cipher|session_reused)|gzip_ratio|vhost|port|ident"
    r"|[haAltmHsbBOIDTvVpPXkLfRSq]|\{[^}]*\}[aptT]"
)
"""The fields that clients do not decide, or that a server accepts only without spaces."""
_GROUP = re.compile(r"\(\?P<(\w+)>")
_ESCAPE, _ESCAPES = re.compile(r"\\([tnr\\\"'])"), {"t": "\t", "n": "\n", "r": "\r"}
_NGINX = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_APACHE = re.compile(r"%[<>!\d,]*(\{[^}]+\})?(\^t[io]|[a-zA-Z%])")
_COMMON = '$remote_addr $ident $remote_user [$time_local] "$request" $status $body_bytes_sent'
_COMBINED = f'{_COMMON} "$http_referer" "$http_user_agent"'
_MORE = rf'(?: (?:"{_QUOTED}"|[^\s"\[\]]+))*'


@dataclass(frozen=True, slots=True)
class LogFormat:
    """A declared format of lines.

    Attributes:
        pattern: the regular expression of a line.
        time_unit: the unit of its column `time`; None if it has no time.
    """

    pattern: str
    time_unit: str | None


def log_format(declared: str) -> LogFormat:
    """Returns the format that a directive ``log_format`` of nginx or ``LogFormat`` of Apache declares, or a template.

    A field that clients decide, such as a header, is a text without the characters that separate fields, unless it is
    alone in quotes. Otherwise a client could write the fields that follow it.

    Raises:
        ValueError: it is no such directive, or a part of it is not supported.
    """
    template = _template(declared)
    fields = list(_fields(template))
    if not fields:
        raise ValueError("it has no field such as $status or %>s")
    quotes = [template.count('"', 0, begin) for begin, _, _ in fields]
    alone = [each % 2 == 1 and quotes.count(each) == 1 for each in quotes]
    separators = {template[end : end + 1] for (_, end, _), quoted in zip(fields, alone, strict=True) if not quoted}
    is_free = [not quoted and not _SERVER.fullmatch(name) for (*_, name), quoted in zip(fields, alone, strict=True)]
    pattern, taken, unit, at = "", set[str](), None, 0
    for number, (begin, end, name) in enumerate(fields):
        following, column = template[end : end + 1], _column(name)
        if number + 1 < len(fields) and fields[number + 1][0] == end and name != "q":
            if _column(fields[number + 1][2]) not in ("path", "request_uri", "query"):
                raise ValueError(f"nothing separates {template[begin:end]} from the next field")
            following = "/"
        if column == "request" and not alone[number]:
            raise ValueError(f"{template[begin:end]} has spaces, and is not alone in quotes")
        if alone[number]:
            value = _QUOTED
        elif is_free[number] and not following and is_free.count(True) == 1:
            value = ".*"
        else:
            value = _value(name, following, "".join(separators) if is_free[number] or not following else "")
        value = _OF_NAMES["t"] if column == "time" and following == "]" else _OF_NAMES.get(name, value)
        if column == "time" and unit is None:
            unit = _TIME_UNITS[name]
        form = _MEMBERS.get(column, f"(?P<{column}>{value})")
        if taken & set(_GROUP.findall(form)):
            column = re.sub(r"\W", "_", name)
            form = f"(?:{value})" if column in taken else f"(?P<{column}>{value})"
        taken.update(_GROUP.findall(form))
        pattern += re.escape(template[at:begin]) + (rf"\[{form}\]" if name == "t" else form)
        at = end
    return LogFormat(pattern + re.escape(template[at:]), unit)


def _template(declared: str) -> str:
    try:
        words = shlex.split(declared.strip().rstrip(";"))
    except ValueError as exc:
        words = [] if re.match(r"\s*log_?format\s", declared, re.IGNORECASE) else [declared]
        if not words:
            raise ValueError(f"its quotes are not closed: {exc}") from None
    template = declared
    if words[0] == "log_format":
        if "escape=json" in words:
            raise ValueError("it writes JSON; use format: ndjson")
        if "escape=none" in words:
            raise ValueError("with escape=none a client can write quotes, and so other fields; use escape=default")
        template = "".join(word for word in words[2:] if not word.startswith("escape="))
    elif words[0] == "LogFormat" and len(words) > 1:
        template = words[1]
    return _ESCAPE.sub(lambda escape: _ESCAPES.get(escape[1], escape[1]), template)


def _fields(template: str) -> Iterator[tuple[int, int, str]]:
    """Yields begin, end and name of each field. The name of a directive of Apache has its argument, if it has one."""
    if _NGINX.search(template):
        for match in _NGINX.finditer(template):
            yield match.start(), match.end(), match[1] or match[2]
        return
    for match in _APACHE.finditer(template):
        if match[2] == "%":
            raise ValueError("%% is not supported")
        yield match.start(), match.end(), (match[1] or "") + match[2]


def _column(name: str) -> str:
    argument, brace, letter = name[1:].partition("}") if name[:1] == "{" else (name, "", "")
    if not brace:
        if len(name) < 3 and name not in _NAMES:
            raise ValueError(f"%{name} is not supported")
        return _NAMES.get(name, name)
    if letter == "t":
        if name not in _TIME_UNITS:
            raise ValueError(f"%{name} is not supported; expected %t, %{{sec}}t, %{{msec}}t or %{{usec}}t")
        return "time"
    if letter == "T":
        return f"duration_{argument}"
    plain = re.sub(r"\W", "_", argument.lower())
    return "referer" if plain == "referer" else _NAMES[letter] if letter in "ap" else plain


def _value(name: str, following: str, separators: str) -> str:
    """Returns the form of a field that is not alone in quotes, and ends before a character.

    Args:
        separators: characters that the field may not have either.
    """
    if name.startswith("upstream_") and _SERVER.fullmatch(name):  # nginx lists the values of each server that it tried
        return r"[^ ,]+(?:(?:,| :) [^ ,]+)*"
    white = "" if separators and " " not in separators + following else r"\s"
    return rf"[^\"{white}{re.escape(following + separators)}]*"


_FORMS = {
    "common": log_format(_COMMON).pattern,
    "combined": log_format(_COMBINED).pattern + _MORE,
    "vhost_combined": log_format(f"$vhost:$port {_COMBINED}").pattern + _MORE,
    "forwarded_combined": (
        rf"(?P<addresses>{_MEMBERS['remote_addr']}(?:, ?{_ADDRESS})*)"
        + log_format(_COMBINED).pattern.removeprefix(_MEMBERS["remote_addr"])
        + _MORE
    ),
}
_FORGED = r'" \d{3} (?:\d+|-) (?:".*)?" \d{3} (?:\d+|-) "'
"""Two statuses, each after a quote. A server that does not escape quotes has let a client write the first one."""
ACCESS_LOGS = {name: LinePattern(form, ACCESS_NULLS, _FORGED) for name, form in _FORMS.items()}
"""The patterns of lines in access logs of nginx and Apache, by format. Fields after the user agent are skipped."""
