"""Writes `docs/reference/constants.md`: the numeric constants of the code. `python -m tests.docs.constants_reference`.

A constant is a number that somebody chose, so each says why it has its value. The script reads the kind from the
expression, the name, or a mark in the comment or the docstring of the constant, such as ``measured: bench.sources``.
`MOST_WITHOUT` constants have none of them. The number may fall, and it may not rise.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "constants.md"
FOLDERS = ("edgewater", "edge", "center", "sim")
MOST_WITHOUT = 162
KINDS = {
    "measured": "a bench shows that other values are worse; the mark names its command",
    "limit": "it bounds memory, time or input; the mark or the docstring says of what",
    "derived": "it follows from other constants, or from the mathematics that the mark names",
    "format": "a protocol, a file format, an arithmetic or a unit has this number",
    "default": "a user can change it; the reference of the configuration or of queries describes it",
}
_MARK = re.compile(rf"\b({'|'.join(KINDS)}): ((?:[^.;]|\.(?=\w))+)")
_LIMIT = re.compile(r"_?(MAX|MIN|MOST|LEAST)_|.*_(MAX|MIN)$")
_UNITS = re.compile(r"_?(DAY|HOUR|MINUTE|SECOND|WEEK|YEAR)\w*_(MS|S|US|NS)$")
HEAD = """\
# Reference: numeric constants

A number in the code that no user sets is a decision. Each has one of five kinds, which its comment or its docstring
states where the name does not:

{kinds}

This page is `python -m tests.docs.constants_reference`; `make check` compares it with the code. {without} constants
have no kind yet. The check fails if that number rises. `python -m bench.constants MODULE:NAME` measures in virtual time
what half and double the value of a constant of the edge cost.
"""


class Constant(NamedTuple):
    module: str
    name: str
    value: str
    kind: str
    why: str


def _numeric(value: ast.expr) -> bool:
    """Whether an expression consists of numbers and of names."""
    allowed = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Tuple, ast.Load, ast.Name)
    nodes = list(ast.walk(value))
    numbers = [n for n in nodes if isinstance(n, ast.Constant)]
    return (
        bool(numbers)
        and all(isinstance(n, allowed) for n in nodes)
        and all(type(n.value) in (int, float) for n in numbers)
    )


def _kind(name: str, value: ast.expr, text: str) -> tuple[str, str]:
    if marked := _MARK.search(text):
        return marked[1], marked[2].strip().rstrip(")")
    if named := [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]:
        return "derived", ", ".join(dict.fromkeys(named))
    first = text.partition(". ")[0].strip().rstrip(".")
    if name.lstrip("_").startswith("DEFAULT_"):
        return "default", first
    if _UNITS.match(name):
        return "format", "a unit of time"
    return ("limit", first) if first and _LIMIT.match(name) else ("", first)


def constants() -> Iterator[Constant]:
    """Yields the constants of all modules, sorted by module, in their order there."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name):
        source = path.read_text()
        lines, body = source.splitlines(), ast.parse(source).body
        for node, after in zip(body, [*body[1:], None], strict=False):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or not _numeric(node.value):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            comment = lines[(node.end_lineno or 0) - 1].partition("# ")[2]
            if not comment and lines[node.lineno - 2].startswith("# "):
                comment = lines[node.lineno - 2].removeprefix("# ")
            doc = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            text = " ".join(f"{comment} {doc}".split())
            names = [ast.unparse(each) for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
            values = node.value.elts if isinstance(node.value, ast.Tuple) and len(names) > 1 else [node.value]
            for name, value in zip(names, values, strict=True):
                module = str(path.relative_to(ROOT)).removesuffix(".py")
                yield Constant(module, name, ast.unparse(value), *_kind(name, value, text))


def render(found: list[Constant]) -> str:
    kinds = "\n".join(f"- **{kind}**: {meaning}." for kind, meaning in KINDS.items())
    parts = [HEAD.format(kinds=kinds, without=sum(not c.kind for c in found))]
    package = ""
    for c in found:
        if (here := c.module.rsplit("/", 1)[0]) != package:
            parts.append(f"\n## `{here}`\n\n| module | constant | value | kind | why |\n|---|---|---|---|---|")
            package = here
        why = c.why.replace("|", "\\|").replace("``", "`")
        parts.append(f"| {c.module.rsplit('/', 1)[1]} | `{c.name}` | `{c.value}` | {c.kind} | {why} |")
    return "\n".join(parts) + "\n"


def main(arguments: list[str]) -> str | None:
    """Writes the page, compares it, or lists the constants without a kind. Returns what is wrong."""
    found = list(constants())
    without = [c for c in found if not c.kind]
    if "--list" in arguments:
        for c in without:
            print(f"{c.module}.py: {c.name} = {c.value}")
        print(dict(Counter(c.module.split("/")[0] for c in without)), len(without), "of", len(found))
    elif "--check" not in arguments:
        PAGE.write_text(render(found))
    elif PAGE.read_text() != render(found):
        return "run: python -m tests.docs.constants_reference"
    return f"{len(without)} constants without a kind; at most {MOST_WITHOUT}" if len(without) > MOST_WITHOUT else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
