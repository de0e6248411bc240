"""Packages of users that tests put on a path, as pip would install them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path


def write_package(path: Path, name: str, source: str, group: str, entries: Mapping[str, str]) -> None:
    """Writes a module of this name and the metadata of its distribution, with entry points of one group."""
    info = path / f"{name}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = "\n".join(f"{entry} = {value}" for entry, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
    (path / f"{name}.py").write_text(textwrap.dedent(source))
