"""Builds each image once per run. `make test-images` runs these tests, and nothing else does."""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.images import bases
from tests.images.engine import Engine, missing

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("EDGEWATER_IMAGES", ROOT / "build" / "images"))
"""Images and layers stay here, so that a second run builds only what has changed."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def engine() -> Engine:
    reason = missing()
    if reason is not None and os.environ.get("CI"):
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)
    engine = Engine(HOME)
    engine.prepare()
    return engine


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """The image that both Containerfiles start from."""
    names = {
        name
        for part in ("edge", "center")
        for name in re.findall(r"^ARG BASE=(\S+)", (ROOT / f"deploy/Containerfile.{part}").read_text(), re.M)
    }
    (name,) = names
    bases.python(engine, name)
    return str(name)


Build = Callable[[str, str], str]


@pytest.fixture(scope="session")
def build(engine: Engine, base: str) -> Build:
    """Builds `edge`, `edge-sources` or `center` from the Containerfile as it is; returns the name of the image."""
    built: dict[str, str] = {}

    def make(part: str, *arguments: str) -> str:
        if part not in built:
            tag = f"localhost/edgewater-{part}:{VERSION}"
            began = time.monotonic()
            engine.build(ROOT, ROOT / "deploy" / f"Containerfile.{part.partition('-')[0]}", tag, *arguments)
            took_s, size, below = time.monotonic() - began, engine.size(tag), engine.size(base)
            print(f"{part}: {took_s:.0f} s, {size / 1e6:.0f} MB, {below / 1e6:.0f} MB of it in the base")
            built[part] = tag
        return built[part]

    return make


@pytest.fixture(scope="session")
def edge_image(build: Build) -> str:
    return build("edge")


@pytest.fixture(scope="session")
def center_image(build: Build) -> str:
    return build("center")
