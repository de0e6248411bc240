"""The version stands in pyproject.toml, images and manifests; a release changes it everywhere."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def release(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", root / "deploy" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copied(release: ModuleType, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The release of a copy of the files that state the version."""
    for place in (*release.PLACES, "CHANGELOG.md"):
        copy = shutil.copytree if (root / place).is_dir() else shutil.copyfile
        copy(root / place, tmp_path / place)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    release.set_version("7.1.0.dev0")
    return release


def test_all_files_state_the_same_version(release: ModuleType) -> None:
    stated = release.stated()
    assert len(set().union(*stated.values())) == 1, stated
    assert {"pyproject.toml", "deploy/compose.yaml", "k8s/overlays/prod/kustomization.yaml"} <= stated.keys()


def test_a_version_is_set_in_all_files_and_nothing_else_changes(copied: ModuleType, root: Path) -> None:
    assert set().union(*copied.stated().values()) == {"7.1.0.dev0"}
    before = copied.stated.__globals__["PLACES"]["pyproject.toml"].search((root / "pyproject.toml").read_text()).group()
    copied.set_version(before.partition('"')[2])
    for file, _ in copied.files():
        assert file.read_text() == (root / file.relative_to(copied.ROOT)).read_text()


@pytest.mark.parametrize(
    ("version", "text", "expected"),
    [
        ("7.2.0", "## 7.2.0 – 2027-01-31\n\nNew.\n", "expected the version of pyproject.toml"),
        ("7.1", "## 7.1 – 2027-01-31\n\nNew.\n", "expected the version of pyproject.toml"),
        ("7.1.0", "## Unreleased\n\nNew.\n", "0 lines|1 lines"),
        ("7.1.0", "## 7.1.0 – 2027-01-31\n" + "- New.\n" * 60, "61 lines"),
        ("7.1.0", "## 7.1.0 – 2027-01-31\n\nNew.\n\n## 7.0.0 – 2027-01-01\n", "not committed"),
    ],
)
def test_a_release_that_cannot_be_made_says_why(copied: ModuleType, version: str, text: str, expected: str) -> None:
    (copied.ROOT / "CHANGELOG.md").write_text(f"# Changelog\n\n{text}")
    with pytest.raises(SystemExit) as refused:
        copied.main(version)
    assert any(part in str(refused.value) for part in expected.split("|"))
    assert set().union(*copied.stated().values()) == {"7.1.0.dev0"}
