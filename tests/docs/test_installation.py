"""What the documents say about installing: where Edgewater comes from, and that what a page runs is installed by it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from edgewater.__main__ import LISTED, main
from tests.installations import EXTRAS, NAMESPACES, OWN_PACKAGES, ROOT, closure, installed_extras, tops

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy" / "README.md"]
INSTALLING = [page for page in PAGES if installed_extras(page.read_text()) and page.parent.name != "reference"]
TEXTS = (
    "*.md",
    "*.py",
    "*.toml",
    "*.yaml",
    "*.yml",
    "*.service",
    "Makefile",
    "deploy",
    "k8s",
    "examples",
    "requirements",
)
OF_EXTRA = {
    "edgewater": "", "edgewater/client": "client", "edgewater/runtime/terminal.py": "client",
    "edgewater/runtime/http_exchange.py": "client",
    "edge": "", "edge/watch.py": "client", "edge/sources/kafka": "kafka", "edge/sources/mqtt": "mqtt",
    "edge/sources/otlp": "otlp", "edge/sources/grpc_receiving.py": "otlp", "edge/sources/remote_write": "remote-write",
    "center": "center", "center/sinks": "center,postgres,delta,iceberg,kafka,remote-write",
    "center/storage/database.py": "center,postgres", "center/api/sql": "center,sql",
    "sim": "sim", "sim/demo": "demo",
}  # fmt: skip
"""The extras whose packages a file may import; the longest beginning counts."""


def test_no_text_installs_edgewater_from_pypi_where_anybody_may_register_the_name() -> None:
    found = subprocess.run(
        ["git", "grep", "-nE", r"(pip|uv) .*\bedgewater(\[|'|\"|$| )|\"edgewater\[", "--", *TEXTS, ":!CHANGELOG.md"],
        cwd=ROOT, capture_output=True, text=True,
    ).stdout  # fmt: skip
    # A self-reference of an extra is not looked up; an example says where its Edgewater comes from.
    own = ("pyproject.toml:", "examples/", "tests/docs/test_installation.py:")
    assert [line for line in found.splitlines() if not line.startswith(own)] == []


def test_every_example_package_says_that_edgewater_is_not_on_pypi() -> None:
    for project in (ROOT / "examples").glob("*/pyproject.toml"):
        assert re.search(r"# .*PyPI.*\ndependencies = \[\"edgewater", project.read_text()), project


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_extra_of_a_page_exists_and_the_page_says_where_it_is_installed_from(page: Path) -> None:
    text = page.read_text()
    assert installed_extras(text) <= EXTRAS.keys()
    for line in text.splitlines():
        assert not installed_extras(line) or "clone" in line, line


def _commands(text: str) -> set[tuple[str, ...]]:
    """Returns the commands of `edgewater` in the blocks of a page: without options and arguments."""
    found = set()
    for line in re.findall(
        r"\bedgewater ((?:[a-z-]+ ?)+)", "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL))
    ):
        command: click.Command | None = main
        path = []
        for word in line.split():
            command = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
            if command is None:
                break
            path.append(word)
            if len(path) == 1:  # The listing has stand-ins without sub-commands.
                command = main.resolve_command(click.Context(main), [word])[1]
        if path:
            found.add(tuple(path))
    return found


def test_the_commands_of_a_page_are_found() -> None:
    assert _commands("```console\n$ edgewater query add q.yaml\n$ edgewater top\n```") == {("query", "add"), ("top",)}


@pytest.mark.parametrize("page", INSTALLING, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_installs_has_what_its_commands_and_programs_import(page: Path) -> None:
    text = page.read_text()
    needed = {name for path in _commands(text) if path[0] in LISTED for name in LISTED[path[0]].packages}
    if "from edgewater.client import" in text:
        needed |= {*LISTED["query"].packages}
    assert needed <= _modules(",".join(installed_extras(text)))


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {
        ".".join(name.split(".")[: 2 if name.startswith(NAMESPACES) else 1])
        for name in found
        if name.split(".")[0] not in sys.stdlib_module_names | {*OWN_PACKAGES}
    }


def _modules(extras: str) -> set[str]:
    dists = closure(frozenset(filter(None, extras.split(","))))
    return {re.sub(r"(\.[\w-]+)?\.(py|so)$", "", top).replace("/", ".") for name in dists for top in tops(name)}


def test_every_package_that_a_file_imports_comes_with_the_extra_of_the_file() -> None:
    provided = {extras: _modules(extras) for extras in {*OF_EXTRA.values()}}
    missing = set()
    for package in OWN_PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            name = str(file.relative_to(ROOT))
            extras = OF_EXTRA[max((home for home in OF_EXTRA if name.startswith(home)), key=len)]
            missing |= {(name, module) for module in _imports(file) - provided[extras]}
    assert missing == {("edgewater/client/answers.py", "pandas"), ("edgewater/client/answers.py", "polars")}
