"""YAML as people write it in a configuration or a query: each key once, and one error for all that is wrong."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
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
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> object:
    """Plain YAML with unique keys. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _UniqueKeys)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as exc:  # 2013-02-30 is written as a date, and is none
        raise yaml.YAMLError(str(exc)) from exc
    except (LookupError, AttributeError) as exc:  # what PyYAML makes of `!!int ""` and `!!timestamp soon`
        raise yaml.YAMLError("a value that does not fit its tag") from exc
