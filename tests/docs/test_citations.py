"""Documents, docstrings and comments cite files and modules that exist."""

from __future__ import annotations

import pkgutil
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import click

from edgewater.__main__ import GROUP

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edgewater", "edge", "center", "sim")
FOLDERS = (*PACKAGES, "tests", "bench", "docs", "deploy", "k8s", "proto", "examples")
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/]")
_MODULE = re.compile(rf"``?((?:{'|'.join(PACKAGES)})(?:\.\w+)+)``?")
_NOT_PATHS = ("bench/out", "deploy/edgewater-")
"""What a command makes, and names of Kubernetes objects."""
_NOT_MODULES = re.compile(
    r".*\.(?:yaml|md|lock)|edgewater\.(?:commands|functions|sources|sinks|answers|center|sink|v1.*)"
)
"""Names of files, entry-point groups, OpenAPI extensions, properties of tables and protobuf packages."""

_COMMAND = re.compile(r"(?:^\s*(?:\$ )?|[`>])edgewater ([^`<|;&#\n]*)", re.M)
"""A command line at the beginning of a line, or of a text between backticks or tags."""


def _documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if "_pb2" not in name]


def _prose(path: Path) -> str:
    """The text between backticks, which is where names are cited."""
    return "\n".join(re.findall(r"`+[^`\n]+`+", path.read_text()))


def _exists(dotted: str) -> bool:
    """Whether a dotted name is a module or an attribute of one."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def _missing(path: Path) -> list[str]:
    prose = _prose(path)
    cited = {m for m in _PATH.findall(prose) if not m.startswith(_NOT_PATHS)}
    missing = sorted(c for c in cited if not (ROOT / c).exists() and not (path.parent / c).exists())
    modules = {m for m in _MODULE.findall(prose) if not _NOT_MODULES.fullmatch(m)}
    return missing + sorted(m for m in modules if not _exists(m))


def test_links_between_the_documents_beside_the_site_exist() -> None:
    """`make docs` checks the links of the pages in `docs/`."""
    pages = [path for path in _documents() if path.suffix == ".md" and (ROOT / "docs") not in path.parents]
    links = [(path, link) for path in pages for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text())]
    assert links
    assert [f"{path.relative_to(ROOT)}: {link}" for path, link in links if not (path.parent / link).exists()] == []


def test_cited_files_and_modules_exist() -> None:
    documents = [path for path in _documents() if path.name != "CHANGELOG.md"]
    missing = {str(path.relative_to(ROOT)): _missing(path) for path in documents}
    assert not {path: names for path, names in missing.items() if names}


def _unknown(line: str) -> Iterator[str]:
    """Yields the words and options of a command line that no command has."""
    command: click.Command = click.Group("edgewater", {p.name: p.load() for p in entry_points(group=GROUP)})
    for word in line.split():
        is_group = isinstance(command, click.Group)
        if is_group and word in command.commands:
            command = command.commands[word]
        elif is_group and type(command) is not click.Group:
            return  # the group has a default command
        elif word.startswith("--"):
            options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
            if word.partition("=")[0].rstrip(".,:)") not in {"--help", *options}:
                yield word
        elif is_group and re.fullmatch(r"[a-z-]+", word):
            yield word
            return


def test_cited_commands_and_their_options_exist() -> None:
    pages = [path for path in _documents() if path.suffix == ".md" and path.name not in ("CHANGELOG.md", "cli.md")]
    lines = [(path, line) for path in pages for line in _COMMAND.findall(path.read_text().replace("\\\n", " "))]
    unknown = [(path.name, line, words) for path, line in lines if (words := list(_unknown(line)))]
    assert len(lines) > 100 and unknown == []
