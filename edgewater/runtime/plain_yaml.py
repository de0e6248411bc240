"""YAML as people write it in a configuration or a query: each key once, and one error for all that is wrong."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

MAX_NESTING = 64
"""Levels of lists and mappings. Beyond it libyaml takes quadratic time, and exhausts the stack of the process."""
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the wheels of PyYAML have libyaml


class _UniqueKeys(_Loader):  # type: ignore[misc, valid-type]  # chosen when imported
    """A second entry under the same key would silently replace the first."""

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
    """Plain YAML with unique keys, in time that is linear in the text.

    Args:
        aliases: whether ``*name`` is allowed, by which a small text can denote a huge value.

    Raises:
        yaml.YAMLError: it is none, or nested more than `MAX_NESTING` levels.
    """
    try:
        _check_events(text, aliases)
        return yaml.load(text, _UniqueKeys)  # nosec B506: a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, OverflowError) as exc:  # 2013-02-30 is written as a date, and is none
        raise yaml.YAMLError(str(exc)) from exc
    except (LookupError, AttributeError) as exc:  # what PyYAML makes of `!!int ""` and `!!timestamp soon`
        raise yaml.YAMLError("a value that does not fit its tag") from exc


def _check_events(text: str, aliases: bool) -> None:
    """Reads the text as a stream of events, which needs no recursion, until a limit is passed."""
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
