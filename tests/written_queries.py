"""Collects the queries that the documents, examples, demonstrations and measurements contain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from edgewater.base.errors import InvalidQuery
from edgewater.model.query import QuerySpec

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "sim", "bench", "deploy", "k8s", "README.md", "ARCHITECTURE.md", "tests", "center/api")
_FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_HERE_DOCUMENT = re.compile(r"<<'?(\w+)'?[^\n]*\n(.*?)^ *\1$", re.DOTALL | re.MULTILINE)


@cache
def written_queries() -> dict[str, QuerySpec]:
    """Returns all queries that are valid, each once, by the file that contains it and a number."""
    specs: dict[str, tuple[str, QuerySpec]] = {}
    for folder in FOLDERS:
        top = ROOT / folder
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix in (".md", ".yaml", ".py", ".json"):
                for mapping in _mappings(path):
                    try:
                        spec = QuerySpec.from_mapping(mapping)
                    except InvalidQuery:
                        continue
                    specs.setdefault(str(spec.to_mapping()), (str(path.relative_to(ROOT)), spec))
    return {f"{where}#{number}": spec for number, (where, spec) in enumerate(specs.values())}


def _mappings(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text()
    if "measures" not in text:
        return
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "measures:" in node.value:
                yield from _of_yaml(node.value)
            elif isinstance(node, ast.Dict):
                yield from _queries(_literal(node))
    elif path.suffix == ".md":
        for block in _FENCE.findall(text):
            for part in [text for _, text in _HERE_DOCUMENT.findall(block)] or [block]:
                yield from _of_yaml(part)
    else:
        yield from _of_yaml(text)


def _literal(node: ast.Dict) -> dict[str, Any]:
    """Returns a mapping of Python without the keys whose values are names or calls."""
    result = {}
    for key, value in zip(node.keys, node.values, strict=True):
        try:
            result[ast.literal_eval(key)] = ast.literal_eval(value)  # type: ignore[arg-type]  # None raises, too
        except (ValueError, TypeError, SyntaxError):
            continue
    return result


def _of_yaml(text: str) -> Iterator[dict[str, Any]]:
    try:
        for document in yaml.load_all(text, yaml.CSafeLoader):
            yield from _queries(document)
    except (yaml.YAMLError, ValueError, TypeError):
        return


def _queries(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "measures" in value and "from" in value:
            yield value
        for item in value.values():
            yield from _queries(item)
    elif isinstance(value, list):
        for item in value:
            yield from _queries(item)
    elif isinstance(value, str) and "measures:" in value:
        yield from _of_yaml(value)
