"""Virtual environments with exactly what `pip install '.[extra]'` installs, without a download."""

from __future__ import annotations

import re
import sys
import tomllib
import venv
from functools import cache
from importlib.metadata import Distribution, distribution
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NAMESPACES = ("google", "opentelemetry")
"""Directories that several distributions share."""
OWN_PACKAGES = ("edgewater", "edge", "center", "sim")


def installed_extras(command: str) -> frozenset[str]:
    """Returns the extras of a line such as ``pip install '.[center,client]'``."""
    return frozenset(
        extra for found in re.findall(r"pip install '?\.\[([^]]+)\]", command) for extra in found.split(",")
    )


def closure(extras: frozenset[str]) -> dict[str, Distribution]:
    """Returns what pip installs for the extras besides Edgewater, from the environment of the tests, by canonical name.

    Raises:
        KeyError: the project has no such extra.
        PackageNotFoundError: the environment of the tests lacks a distribution.
    """
    found: dict[str, Distribution] = {}
    pending = [(Requirement(text), "") for text in PROJECT["dependencies"]]
    pending += [(Requirement(text), "") for extra in extras for text in EXTRAS[extra]]
    seen = set()
    while pending:
        requirement, parent_extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": parent_extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "edgewater":
            pending += [(Requirement(text), "") for extra in requirement.extras for text in EXTRAS[extra]]
            continue
        found[name] = found.get(name) or distribution(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                pending += [(Requirement(text), extra) for text in found[name].requires or ()]
    return found


@cache
def tops(dist_name: str) -> frozenset[str]:
    """The files and directories of a distribution beside the others; of the namespace `google`, its own packages."""
    record = distribution(dist_name).read_text("RECORD") or ""
    paths = [line.rpartition(",")[0].rpartition(",")[0].strip('"') for line in record.splitlines()]
    parts = [path.split("/") for path in paths if not path.startswith(("..", "/"))]
    return frozenset("/".join(p[:2] if p[0] in NAMESPACES else p[:1]) for p in parts) - {"__pycache__"}


def _link(dist: Distribution, packages: Path) -> None:
    for name in tops(dist.name):
        link, target = packages / name, Path(str(dist.locate_file(name)))
        if target.exists() and not link.is_symlink():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(target)


def install(directory: Path, extras: frozenset[str]) -> Path:
    """Makes a virtual environment that has Edgewater, its dependencies and the extras, and nothing else.

    Returns:
        The directory of its programs: `python` and `edgewater`.
    """
    venv.create(directory, symlinks=True)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "lib" / python / "site-packages"
    for dist in closure(extras).values():
        _link(dist, packages)
    for name in OWN_PACKAGES:
        (packages / name).symlink_to(ROOT / name)
    own = packages / f"edgewater-{PROJECT['version']}.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: edgewater\nVersion: {PROJECT['version']}\n")
    points = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    lines = [[f"[{group}]", *(f"{k} = {v}" for k, v in found.items())] for group, found in points.items()]
    (own / "entry_points.txt").write_text("\n".join(chain.from_iterable(lines)))
    program = directory / "bin" / "edgewater"
    program.write_text(f"#!{directory}/bin/python\nfrom edgewater.__main__ import main\nmain()\n")
    program.chmod(0o755)
    return directory / "bin"
