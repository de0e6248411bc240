"""Loads YAML of configurations and queries. Each key must be unique, and all faults raise the same class of error."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

MAX_NESTING = 64
"""The largest number of nested levels of lists and mappings. Beyond it, libyaml takes quadratic time and exhausts the
stack.
"""
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the wheels of PyYAML have libyaml


class _UniqueKeys(_Loader):  # type: ignore[misc, valid-type]  # chosen when imported
    """A loader that refuses duplicate keys. By default, a second entry under the same key silently replaces the
    first.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is no plain text; a template that was not filled in?", key.start_mark
                )
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
            seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def load_yaml(text: str, *, aliases: bool = True) -> object:
    """Loads plain YAML with unique keys, in time linear in the length of the text.

    Args:
        aliases: whether ``*name`` is allowed. With aliases, a small text can denote a huge value.

    Raises:
        yaml.YAMLError: the text is not such YAML, or is nested more than `MAX_NESTING` levels.
    """
    try:
        _check_events(text, aliases)
        return yaml.load(text, _UniqueKeys)  # nosec B506: a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as exc:
        mark, line = exc.problem_mark, ""
        if mark is not None and mark.line < len(text.splitlines()):
            line = text.splitlines()[mark.line]
        # YAML reads these as marks of its own: `path: *.log` is an alias.
        if isinstance(exc, yaml.scanner.ScannerError) and any(f" {sign}" in line for sign in "*&%@`!"):
            exc.problem = f"{exc.problem}; a text that begins with *, &, %, @, ! or ` needs quotes"
        raise
    except (ValueError, OverflowError) as exc:  # such as 2013-02-30, which looks like a date
        raise yaml.YAMLError(str(exc)) from exc
    except (LookupError, AttributeError) as exc:  # PyYAML raises these for `!!int ""` and `!!timestamp soon`
        raise yaml.YAMLError("a value that does not fit its tag") from exc


def place_of(text: str, field: str) -> tuple[int, int]:
    """Returns line and column, from 1 on, of the key at a path such as ``streams.flights.sources.0.file``.

    Returns those of the innermost section that is there if the text lacks the key. `load_yaml` accepts the text.
    """
    node, mark, rest = yaml.compose(text, _Loader), None, field
    while rest and isinstance(node, yaml.CollectionNode):
        entries = (
            [(key.value, key.start_mark, value) for key, value in node.value]
            if isinstance(node, yaml.MappingNode)
            else [(str(number), value.start_mark, value) for number, value in enumerate(node.value)]
        )
        found = [entry for entry in entries if rest == entry[0] or rest.startswith(f"{entry[0]}.")]
        if not found:
            break
        name, mark, node = max(found, key=lambda entry: len(entry[0]))
        rest = rest[len(name) + 1 :]
    return (1, 1) if mark is None else (mark.line + 1, mark.column + 1)


def _check_events(text: str, aliases: bool) -> None:
    """Reads the text as a stream of events, until a limit is exceeded. This needs no recursion."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_NESTING:
                raise yaml.YAMLError(f"it is nested too deeply, more than {MAX_NESTING} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent) and not aliases:
            raise yaml.YAMLError(f"it has an alias (*{event.anchor}); write the value out")
