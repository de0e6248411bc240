"""What kustomize renders is what Kubernetes accepts, and holds together."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.conftest import TARGETS, render

OLDEST_KUBERNETES = "1.30"
"""The oldest release that docs/how-to/deploy-kubernetes.md promises."""


@pytest.mark.slow
@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()])
def test_every_document_is_valid_without_unknown_fields(every_rendered: list[Any], version: str) -> None:
    # Overlays share most documents, and each validation reads a large schema.
    every_rendered = [*every_rendered, render("targets/sidecar")]
    documents = {json.dumps(d, sort_keys=True): d for rendered in every_rendered for d in rendered.documents}
    documents |= {
        f"{r.target}: executor": _executor(p) for r in every_rendered for p in r.pods if p["name"] == "executor"
    }
    assert len(documents) > 40
    for document in documents.values():
        if document["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # test_mixin looks at these: the schemas are the operator's
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as exc:
            pytest.fail(f"{document['kind']}/{document['metadata'].get('name')}: {exc.message} at {list(exc.path)}")


def _executor(pod: dict[str, Any]) -> dict[str, Any]:
    # Spark puts the image in; the schema asks for none, a cluster does.
    return {k: v for k, v in pod.items() if k in {"apiVersion", "kind", "metadata", "spec"}}


def test_the_validator_does_reject_an_unknown_field(dev: Any) -> None:
    broken = json.loads(json.dumps(dev.find("Service", "edgewater-api")))
    broken["spec"]["portz"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, OLDEST_KUBERNETES, strict=True)


def test_no_document_is_there_twice(rendered: Any) -> None:
    ids = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in rendered.documents]
    assert [i for i, count in Counter(ids).items() if count > 1] == []


def test_every_namespaced_document_says_its_namespace_and_the_namespace_is_rendered(rendered: Any) -> None:
    namespaces = {d["metadata"]["name"] for d in rendered.of("Namespace")}
    for d in rendered.documents:
        if d["kind"] not in ("Namespace", "PriorityClass"):
            assert d["metadata"].get("namespace") in namespaces, d["metadata"]


def test_selectors_match_the_labels_of_their_own_pods_only(rendered: Any) -> None:
    for workload in rendered.workloads:
        selector = workload["spec"]["selector"]["matchLabels"]
        chosen = [p["name"] for p in rendered.pods if selector.items() <= p["metadata"]["labels"].items()]
        assert chosen == [workload["metadata"]["name"]]


def test_every_service_selects_pods_that_have_its_ports(rendered: Any) -> None:
    for service in rendered.of("Service"):
        selector = service["spec"]["selector"]
        chosen = [p for p in rendered.pods if selector.items() <= p["metadata"]["labels"].items()]
        assert len(chosen) == 1, service["metadata"]["name"]
        names = {port["name"] for c in chosen[0]["spec"]["containers"] for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_every_disruption_budget_selects_a_workload_that_has_spare_pods_or_lets_one_go(rendered: Any) -> None:
    for budget in rendered.of("PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        chosen = [p["name"] for p in rendered.pods if selector.items() <= p["metadata"]["labels"].items()]
        assert chosen == [budget["metadata"]["name"]]
        assert budget["spec"]["maxUnavailable"] >= 1, "a budget of none would block every drain"


def test_parts_that_may_have_several_replicas_have_a_disruption_budget(rendered: Any) -> None:
    budgets = {d["metadata"]["name"] for d in rendered.of("PodDisruptionBudget")}
    several = {
        d["metadata"]["name"] for d in rendered.of("Deployment") if d["spec"]["strategy"].get("type") != "Recreate"
    }
    assert several <= budgets


def test_every_volume_is_mounted_and_every_mount_has_its_volume(rendered: Any) -> None:
    for pod in rendered.pods:
        spec = pod["spec"]
        claims = {t["metadata"]["name"] for w in rendered.of("StatefulSet") if w["metadata"]["name"] == pod["name"]
                  for t in w["spec"]["volumeClaimTemplates"]}  # fmt: skip
        volumes = {v["name"] for v in spec["volumes"]} | claims
        mounts = {m["name"] for c in [*spec["containers"], *spec.get("initContainers", [])] for m in c["volumeMounts"]}
        assert mounts == volumes, pod["name"]


def test_claims_and_service_accounts_that_pods_name_are_rendered(rendered: Any) -> None:
    for pod in rendered.pods:
        rendered.find("ServiceAccount", pod["spec"]["serviceAccountName"])
        for volume in pod["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume:
                rendered.find("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


def made_beforehand(rendered: Any) -> set[tuple[str, str]]:
    """The Secrets and ConfigMaps that pods cannot start without and that are not rendered."""
    wanted = set()
    for pod in rendered.pods:
        for volume in pod["spec"]["volumes"]:
            wanted |= {("Secret", volume["secret"]["secretName"])} if "secret" in volume else set()
            wanted |= {("ConfigMap", volume["configMap"]["name"])} if "configMap" in volume else set()
        for entry in [e for c in pod["spec"]["containers"] for e in c.get("env", [])]:
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None and not reference.get("optional"):
                wanted.add(("Secret", reference["name"]))
    return wanted - {(d["kind"], d["metadata"]["name"]) for d in rendered.documents}


def test_the_development_overlay_starts_without_anything_made_beforehand(dev: Any) -> None:
    assert made_beforehand(dev) == set()


@pytest.mark.slow
def test_what_has_to_be_made_beforehand_is_in_the_how_to(every_rendered: list[Any], root: Path) -> None:
    guide = (root / "docs" / "how-to" / "deploy-kubernetes.md").read_text()
    wanted = {name for rendered in every_rendered for _, name in made_beforehand(rendered)}
    assert wanted == {"edgewater-database", "edgewater-edges", "edgewater-gateway-tls", "edgewater-api",
                      "edgewater-edge-tokens", "edgewater-push-token", "edgewater-center-ca"}  # fmt: skip
    assert [name for name in sorted(wanted) if f"`{name}`" not in guide] == []


def test_the_secrets_of_the_development_overlay_have_the_keys_that_pods_read(dev: Any) -> None:
    for pod in dev.pods:
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                data = dev.find("Secret", volume["secret"]["secretName"])["data"]
                assert {item["key"] for item in volume["secret"].get("items", [])} <= set(data)
        for entry in [e for c in pod["spec"]["containers"] for e in c.get("env", [])]:
            reference = entry.get("valueFrom", {}).get("secretKeyRef", {"optional": True})
            if not reference.get("optional"):
                assert reference["key"] in dev.find("Secret", reference["name"])["data"]


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["edgewater-frame-log", "edgewater-deltas"])
def test_segments_can_be_mounted_by_many_pods_or_all_pods_run_on_one_node(
    every_rendered: list[Any], claim: str
) -> None:
    modes = {r.target: d["spec"]["accessModes"] for r in every_rendered
             for d in r.of("PersistentVolumeClaim") if d["metadata"]["name"] == claim}  # fmt: skip
    assert modes == {target: ["ReadWriteMany"] for target in ("base", "overlays/prod", "targets/center")} | {
        "overlays/dev": ["ReadWriteOnce"]
    }


def test_every_kustomization_in_the_tree_is_reached_by_a_target(root: Path) -> None:
    reached: set[Path] = set()
    pending = [root / "k8s" / t for t in TARGETS if not t.startswith("targets/")]
    pending += sorted((root / "tests" / "deploy" / "targets").iterdir())
    while pending:
        folder = pending.pop().resolve()
        reached.add(folder)
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        for entry in [*kustomization.get("resources", []), *kustomization.get("components", [])]:
            if (folder / entry).is_dir():
                pending.append(folder / entry)
    assert reached >= {f.parent for f in (root / "k8s").rglob("kustomization.yaml")}


def test_pods_behind_a_service_wait_before_they_stop_and_have_time_left_to_drain(rendered: Any) -> None:
    for workload in rendered.of("Deployment"):
        if workload["metadata"]["name"] in ("edgewater-gateway", "edgewater-api"):
            spec = workload["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            wait_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert 0 < wait_s <= spec["terminationGracePeriodSeconds"] - 20
