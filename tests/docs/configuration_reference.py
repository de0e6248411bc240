"""Writes `docs/reference/configuration.md`: every key of edges, centers and queries, from the models.

`python -m tests.docs.configuration_reference` renews the page; with `--check` it fails if the page is old.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from center.config import CenterConfig, RetentionSection
from center.sinks.base import KINDS as SINK_KINDS
from center.sinks.definitions import CommonOptions
from edge.config import EdgeConfig
from edge.source_kinds import GROUP, KINDS
from edgewater.base.quantities import format_duration
from edgewater.base.timestamps import rfc3339
from edgewater.runtime.configuration import Address, Duration, Instant, RemoteAddress, Size
from tests.docs.query_keys import QUERY_KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "configuration.md"
HEAD = """\
# Reference: every configuration key

This page is generated from the models that read the files. `python -m tests.docs.configuration_reference` renews it.
`make check` compares it with the code.

- A key in a heading is the path of a section. `NAME` is a name that you choose. `[]` is an entry of a list.
- A *duration* has a unit: `500ms`, `30s`, `5m`, `1h30m`, `1d`, `1w`.
- A *size* is in bytes or has a unit: `200`, `64KiB`, `1MB`.
- A *time* is ISO 8601, such as `2013-01-01T00:00:00Z`. Without a zone it is UTC.
- A *secret* in `edge.yaml`, and of a sink, is the text itself, `{env: NAME}` or `{file: PATH}`.
  In a path, `${NAME}` is an environment variable, and `$$` is a dollar sign.
- A secret from a file is read again when the file changes.
  While the file cannot be read or is empty, the previous secret counts.
- Another *secret* in `center.yaml` is the text itself. It may come from the environment instead, such as
  `EDGEWATER_CENTER__API__TOKEN`.
- The default `–` means that the key is unset. Unknown keys are refused, and the message names the nearest known key.

[Edges](edge.md), [the center](center.md) and [queries](query.md) explain what the keys do together.
"""
SIZES = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


class Key(NamedTuple):
    """A key of a file: name, what it accepts, default, description."""

    name: str
    accepts: str
    default: str
    text: str


def size_text(size: int) -> str:
    return next((f"{size >> bits}{unit}" for bits, unit in SIZES if size and size % (1 << bits) == 0), str(size))


UNITS: Mapping[int, tuple[str, Any]] = {
    id(get_args(alias)[1]): (name, formatted)
    for alias, name, formatted in (
        (Duration, "duration", format_duration),
        (Size, "size", size_text),
        (Instant, "time", rfc3339),
        (Address, "host:port", str),
        (RemoteAddress, "host:port", str),
    )
} | {id(RetentionSection.model_fields["answers_ms"].metadata[0]): ("duration, at least 1m", format_duration)}
"""Validator -> name of the type, and what writes a value of it."""
PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", SecretStr: "secret"}


def unit_of(hint: Any, field: FieldInfo) -> tuple[str, Any] | None:
    markers = [*field.metadata, *(m for part in (hint, *get_args(hint)) for m in getattr(part, "__metadata__", ()))]
    return next((UNITS[id(m)] for m in markers if id(m) in UNITS), None)


def type_text(hint: Any) -> str:
    """Returns what a key accepts, in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        known = [UNITS[id(m)][0] for m in arguments[1:] if id(m) in UNITS]
        return known[0] if known else type_text(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(part) for part in arguments if part is not type(None))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple):
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return f"mapping of name to {type_text(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "section"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return ", ".join(f"`{value}`" for value in hint)
    return PLAIN.get(hint, "any")


def bounds_text(field: FieldInfo, formatted: Any) -> str:
    words, of = [], "characters" if field.annotation is str else "entries"
    for bound in field.metadata:
        match bound:
            case Ge(least):
                words.append(f"at least {formatted(least)}")
            case Gt(above):
                words.append(f"above {formatted(above)}")
            case Le(most):
                words.append(f"at most {formatted(most)}")
            case Lt(below):
                words.append(f"below {formatted(below)}")
            case MinLen(least) if least > 1:
                words.append(f"at least {least} {of}")
            case MaxLen(most):
                words.append(f"at most {most} {of}")
    return "".join(f", {word}" for word in words)


def default_text(field: FieldInfo, formatted: Any) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value == "" or value is PydanticUndefined or isinstance(value, BaseModel):
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict | list | tuple):
        return ", ".join(f"`{each}`" for each in value) or "none"
    return f"`{formatted(value) if isinstance(value, int | str) else value}`"


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Returns the descriptions of a model's fields: below the field, or in the section Attributes of the docstring."""
    texts: dict[str, str] = {}
    for base in reversed([c for c in model.__mro__ if issubclass(c, BaseModel) and c is not BaseModel]):
        listed = re.split(r"\n\s*Attributes:\n", inspect.cleandoc(base.__doc__ or ""))
        for entry in re.split(r"\n(?=\w)", textwrap.dedent(listed[1]) if len(listed) > 1 else ""):
            names, _, text = " ".join(entry.split()).partition(": ")
            texts |= {name.strip(): text[:1].upper() + text[1:] for name in names.split(",") if text}
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(statement.target, ast.Name) and isinstance(below.value, ast.Constant)
                texts[statement.target.id] = " ".join(str(below.value.value).split())
    return texts


def sections_in(hint: Any, path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models that a key's value contains, with their paths."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield path, hint
    origin = get_origin(hint)
    inner = {dict: f"{path}.NAME", list: f"{path}[]", tuple: f"{path}[]"}.get(origin or type(None), path)
    for part in get_args(hint):
        yield from sections_in(part, inner)


def sections(
    model: type[BaseModel], path: str, shown: dict[type[BaseModel], str]
) -> Iterator[tuple[str, str, list[Key]]]:
    """The path, summary and keys of a model and of all models below it that are not in `shown` yet."""
    if shown.setdefault(model, path) != path:
        return
    hints, texts, keys, below = get_type_hints(model, include_extras=True), descriptions(model), [], []
    for name, field in model.model_fields.items():
        if field.exclude:  # no key of the file
            continue
        key = field.alias or name
        kind, formatted = unit_of(hints[name], field) or (type_text(hints[name]), str)
        inner = list(sections_in(hints[name], f"{path}.{key}".removeprefix(".")))
        same = "".join(f", as {shown[m]}" for at, m in inner if shown.setdefault(m, at) != at)
        accepts = kind + same + bounds_text(field, formatted)
        keys.append(Key(key, accepts, default_text(field, formatted), texts.get(name, "")))
        below += inner
    yield path, inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " "), keys
    for inner_path, inner in below:
        yield from sections(inner, inner_path, shown)


def files() -> dict[str, list[tuple[str, str, list[Key]]]]:
    """The sections of each file."""
    shown: dict[type[BaseModel], str] = {}
    edge = list(sections(EdgeConfig, "", shown))
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]:
        kind = KINDS.get(name)
        assert kind is not None, f"install the extra {name}, and edgewater again for its entry points"
        edge += sections(kind.config, f"streams.NAME.sources[].{name}", shown)
    center = list(sections(CenterConfig, "", {}))
    center += sections(CommonOptions, "sinks.NAME", {})
    for name in SINK_KINDS.names:
        sink = SINK_KINDS.get(name)
        assert sink is not None
        center += sections(sink.config, f"sinks.NAME, kind {name}", {})
    queries = [(path, text, [Key(*row) for row in rows]) for path, text, rows in QUERY_KEYS]
    return {"edge.yaml": edge, "center.yaml": center, "Query files": queries}


def _cell(text: str) -> str:
    """Returns the text as a cell of a table, in words of the file instead of words of Python."""
    words = {"|": "\\|", "``": "`", "; None: ": "; unset: ", "None: ": "Unset: ", " is None": " is unset"}
    for word, shown in words.items():
        text = text.replace(word, shown)
    return text


def render() -> str:
    parts = [HEAD]
    for file, parts_of_file in files().items():
        parts.append(f"## {file}\n")
        for path, summary, keys in parts_of_file:
            parts.append(f"### {file}: {path}\n" if path else "")
            parts.append(f"{summary}\n\n| key | accepts | default | description |\n|---|---|---|---|")
            cells = [[_cell(text) for text in key] for key in keys]
            parts.append("\n".join(f"| `{n}` | {a} | {d} | {t} |" for n, a, d, t in cells) + "\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(render())
    elif PAGE.read_text() != render():
        sys.exit("run: python -m tests.docs.configuration_reference")
