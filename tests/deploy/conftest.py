"""The manifests as `kubectl kustomize` renders them, read once per run."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import find

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("base", "overlays/dev", "overlays/prod", "overlays/edge-site", "targets/center", "targets/edges")
"""Those that begin with `targets` are of the tests: combinations of components. `render` reads others, too."""
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """All documents of one target, and what the tests ask of them."""

    target: str
    documents: tuple[Manifest, ...]

    def of(self, *kinds: str) -> list[Manifest]:
        return [d for d in self.documents if d["kind"] in kinds]

    def find(self, kind: str, name: str) -> Manifest:
        found = [d for d in self.of(kind) if d["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} documents {kind}/{name} in {self.target}"
        return found[0]

    @property
    def config_maps(self) -> dict[str, dict[str, str]]:
        """Data by name, the hash that kustomize puts at the end left out."""
        return {unhashed(d["metadata"]["name"]): d["data"] for d in self.of("ConfigMap")}

    @property
    def workloads(self) -> list[Manifest]:
        return self.of("Deployment", "DaemonSet", "StatefulSet")

    @property
    def pods(self) -> list[Manifest]:
        """Every pod as a template with name and namespace of its workload; also of CronJobs, and Spark's executors."""
        templates = [(w["metadata"], w["spec"]["template"]) for w in self.workloads]
        templates += [(w["metadata"], w["spec"]["jobTemplate"]["spec"]["template"]) for w in self.of("CronJob")]
        pods = [{"name": m["name"], "namespace": m["namespace"], **template} for m, template in templates]
        job = self.config_maps.get("edgewater-center")
        if job is not None:
            pods.append({"name": "executor", "namespace": "edgewater", **yaml.safe_load(job["executor-pod.yaml"])})
        return pods


def unhashed(name: str) -> str:
    """The name of a generated ConfigMap or Secret as its kustomization has it."""
    return re.sub(r"-[0-9a-z]{10}$", "", name)


def folder_of(target: str) -> Path:
    return (Path(__file__).parent if target.startswith("targets/") else ROOT / "k8s") / target


@cache
def render(target: str) -> Rendered:
    return render_folder(folder_of(target), target)


def render_folder(folder: Path, target: str) -> Rendered:
    kubectl = find("kubectl")
    assert kubectl is not None, "the test requests no fixture `kubectl`"
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return Rendered(target, tuple(yaml.load_all(done.stdout, yaml.CSafeLoader)))


@pytest.fixture(params=TARGETS)
def rendered(request: pytest.FixtureRequest, kubectl: str) -> Rendered:
    return render(request.param)


@pytest.fixture(scope="session")
def every_rendered(kubectl: str) -> list[Rendered]:
    return [render(target) for target in TARGETS]


@pytest.fixture(scope="session")
def dev(kubectl: str) -> Rendered:
    return render("overlays/dev")


@pytest.fixture(scope="session")
def prod(kubectl: str) -> Rendered:
    return render("overlays/prod")


@pytest.fixture(scope="session")
def center(kubectl: str) -> Rendered:
    """A center with all components."""
    return render("targets/center")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
