"""Counts of the code that may fall and never rise: whoever lowers one lowers the limit here, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("center", "edge", "edgewater", "sim")
MOST_SKIPPED_LAYOUTS, MOST_LINES, MOST_METHODS, MOST_PRIVATE = 50, 70, 40, 110
"""Places that the formatter leaves alone; lines of a function; methods of a class; private attributes of others that
tests read, without those that a test's own file assigns."""
PUBLIC = ("_asdict", "_fields", "_mapping", "_replace")
"""Names with an underscore that libraries document."""
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*folders: str) -> dict[Path, ast.Module]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name)
    return {path: ast.parse(path.read_text()) for path in paths}


def private(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yields the private attributes of objects that the file does not define."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    of_self = [node for node in attributes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")]
    own = {node.attr for node in of_self} | {node.name for node in ast.walk(tree) if isinstance(node, Function)}
    for node in attributes:
        is_private = node.attr.startswith("_") and not node.attr.startswith("__")
        if is_private and node.attr not in own and node.attr not in PUBLIC:
            yield node


def test_the_formatter_lays_out_all_but_a_few_places() -> None:
    assert sum(path.read_text().count("# fmt: skip") for path in sources(*PRODUCT)) <= MOST_SKIPPED_LAYOUTS


def test_functions_and_classes_are_small() -> None:
    for path, tree in sources(*PRODUCT).items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                assert node.end_lineno - node.lineno < MOST_LINES, f"{path}: {node.name}"
            elif isinstance(node, ast.ClassDef):
                assert sum(isinstance(each, Function) for each in node.body) <= MOST_METHODS, f"{path}: {node.name}"


def test_tests_read_few_private_attributes() -> None:
    read = [
        f"{path.name}:{node.lineno}: {node.attr}" for path, tree in sources("tests").items() for node in private(tree)
    ]
    assert len(read) <= MOST_PRIVATE, "\n".join(read)
