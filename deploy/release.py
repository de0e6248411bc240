"""Makes the commits of a release: ``make release VERSION=0.3.0``. It neither tags nor pushes.

The first commit has the version of the release everywhere, and its golden set. The second one begins the development of
the next minor release. `docs/how-to/release.md` has the steps before and after.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_VERSION = r"\d+\.\d+\.\d+(?:\.dev\d+)?"
PLACES = {
    "pyproject.toml": re.compile(rf'(?m)^(version = "){_VERSION}'),
    "deploy": (IMAGE := re.compile(rf"(edgewater-(?:edge|edge-sources|center):){_VERSION}")),
    "docs": IMAGE,
    "k8s": re.compile(rf"(edgewater-(?:edge|center):|newTag: ){_VERSION}"),
}
"""Files and folders that state the version, and how."""
MAX_LINES = 60
"""Lines of a release in the changelog: a user reads them to upgrade."""
DEVELOPING = "## Unreleased\n"


def files() -> Iterator[tuple[Path, re.Pattern[str]]]:
    """Yields the files that may state the version, and what the version follows there."""
    for place, pattern in PLACES.items():
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix in {"", ".center", ".edge", ".md", ".toml", ".yaml"}:
                yield file, pattern


def stated() -> dict[str, set[str]]:
    """Returns the versions in each file that states one."""
    found = {file: {m.group().removeprefix(m.group(1)) for m in p.finditer(file.read_text())} for file, p in files()}
    return {str(file.relative_to(ROOT)): versions for file, versions in found.items() if versions}


def set_version(version: str) -> None:
    """Writes a version to every file that states one."""
    for file, pattern in files():
        text = file.read_text()
        changed = pattern.sub(rf"\g<1>{version}", text)
        if changed != text:
            file.write_text(changed)


def section(version: str, changelog: str) -> str:
    """Returns the section of a release in the changelog; empty: there is none."""
    found = re.search(rf"(?ms)^## {re.escape(version)} – \d{{4}}-\d\d-\d\d\n.*?(?=^## |\Z)", changelog)
    return found.group().strip() if found else ""


def problem(version: str) -> str:
    """Returns why a release cannot be made; empty: it can."""
    developed = (ROOT / "pyproject.toml").read_text()
    if not RELEASE.fullmatch(version) or f'version = "{version}.dev0"' not in developed:
        return f"VERSION is {version!r}; expected the version of pyproject.toml without .dev0"
    lines = section(version, (ROOT / "CHANGELOG.md").read_text()).count("\n") + 1
    if not 1 < lines <= MAX_LINES:
        return f"CHANGELOG.md has {lines} lines in '## {version} – YYYY-MM-DD'; expected 2 to {MAX_LINES}"
    if _run("git", "status", "--porcelain"):
        return "the checkout has changes that are not committed"
    return ""


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _commit(subject: str) -> str:
    _run("git", "add", "--all")
    _run("git", "commit", "--quiet", "--message", subject)
    return _run("git", "rev-parse", "HEAD")


def main(version: str) -> None:
    if why := problem(version):
        raise SystemExit(f"make release: {why}")
    _run(sys.executable, "-m", "tests.golden.write")
    set_version(version)
    _run(sys.executable, "-m", "pytest", "-q", "tests/golden", "tests/deploy/test_release.py")
    released = _commit(f"Release {version}")
    major, minor = map(int, RELEASE.fullmatch(version).groups()[:2])  # type: ignore[union-attr]
    set_version(f"{major}.{minor + 1}.0.dev0")
    changelog = ROOT / "CHANGELOG.md"
    head, begin, rest = changelog.read_text().partition(f"## {version} – ")
    changelog.write_text(head + f"{DEVELOPING}\n" * (DEVELOPING not in head) + begin + rest)
    _commit(f"Development of {major}.{minor + 1}.0 begins")
    print(f"git tag --annotate v{version} --message 'Edgewater {version}' {released}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
