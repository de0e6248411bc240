"""The version stands in pyproject.toml, images and manifests; a release changes it everywhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pyspark
import pytest
import yaml


def program(root: Path, name: str) -> ModuleType:
    """A file of deploy/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, root / "deploy" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def release(root: Path) -> ModuleType:
    return program(root, "release")


@pytest.fixture(scope="module")
def sbom(root: Path) -> ModuleType:
    return program(root, "sbom")


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


@pytest.mark.slow
def test_the_sbom_of_the_center_has_the_jars_of_its_image_with_group_version_and_licence(sbom: ModuleType) -> None:
    jars = {jar["name"]: jar for jar in sbom.jars()}
    assert len(jars) > 200
    assert not [name for name in jars if name.startswith(("spark-connect_", "spark-mllib_", "rocksdbjni"))]
    for jar in jars.values():
        assert jar["group"] and re.match(r"\d", jar["version"]), jar
    licences = {name: next(iter(jar["licenses"][0]["license"].values())) for name, jar in jars.items()}
    assert {name for name, licence in licences.items() if licence == "NOASSERTION"} == {"vertx-uri-template"}
    assert (licences["zstd-jni"], licences["spark-core_2.13"], licences["jta"]) == (
        "BSD-2-Clause", "Apache-2.0", "CDDL-1.1",
    )  # fmt: skip
    assert jars["spark-core_2.13"]["purl"] == f"pkg:maven/org.apache.spark/spark-core_2.13@{pyspark.__version__}"


def test_each_package_of_an_sbom_has_a_licence_and_packages_of_other_platforms_are_left_out(sbom: ModuleType) -> None:
    document = {"components": [{"name": "numpy"}, {"name": "h11"}, {"name": "of-another-platform"}]}
    sbom.complete(document, spark=False)
    assert [c["name"] for c in document["components"]] == ["numpy", "h11"]
    assert "BSD-3-Clause" in document["components"][0]["licenses"][0]["expression"]
    assert document["components"][1]["licenses"] == [{"license": {"name": "MIT License"}}]


@pytest.fixture
def workflow(root: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((root / ".github/workflows/release.yml").read_text()))


def test_the_release_workflow_runs_for_tags_of_releases_and_uses_what_the_repository_has(
    workflow: dict[str, Any], root: Path
) -> None:
    triggers = workflow[True]  # YAML reads `on` as true
    assert triggers == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}
    text = (root / ".github/workflows/release.yml").read_text()
    targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M)
    assert {t for line in re.findall(r"\bmake ([a-z ]+)", text) for t in line.split()} <= set(targets)
    for file in re.findall(r"deploy/Containerfile\.[a-z]+", text):
        assert (root / file).is_file()
    for file in (root / ".github/workflows").iterdir():
        actions = re.findall(r"uses: *(.*)", file.read_text())
        assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+(\.\d+){2}", a) for a in actions), "by hash"


def test_the_release_workflow_builds_each_image_for_both_architectures_and_signs_its_digest(
    workflow: dict[str, Any],
) -> None:
    job = workflow["jobs"]["images"]
    images = {each["image"]: each for each in job["strategy"]["matrix"]["include"]}
    assert images.keys() == {"edge", "edge-sources", "center"}
    assert images["edge-sources"]["arguments"] == "LOCK=edge-sources.txt"
    steps = {step["name"]: step for step in job["steps"]}
    assert steps["Build and push"]["with"]["platforms"] == "linux/amd64,linux/arm64"
    assert "@${DIGEST}" in steps["Sign the digest, and attest the SBOM"]["run"]
    assert job["permissions"] == {"contents": "read", "packages": "write", "id-token": "write"}
