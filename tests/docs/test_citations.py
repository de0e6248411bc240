"""Documents, docstrings and comments cite files and modules that exist."""

from __future__ import annotations

import pkgutil
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edgewater", "edge", "center", "sim")
FOLDERS = (*PACKAGES, "tests", "bench", "docs", "deploy", "k8s", "proto", "examples")
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/]")
_MODULE = re.compile(rf"``?((?:{'|'.join(PACKAGES)})(?:\.\w+)+)``?")
_NOT_PATHS = ("bench/out", "deploy/edgewater-")
"""What a command makes, and names of Kubernetes objects."""
_NOT_MODULES = re.compile(r".*\.(?:yaml|md|lock)|edgewater\.(?:commands|functions|sources|sinks|answers|v1.*)")
"""Names of files, entry-point groups, OpenAPI extensions and protobuf packages."""


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
