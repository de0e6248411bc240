"""What each component adds, where a rendered and valid document could still be wrong."""

from __future__ import annotations

import json
import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import ROOT, Rendered, folder_of, render, render_folder
from tests.deploy.test_network_policies import DNS, Peer, allowed, pod

pytestmark = pytest.mark.usefixtures("kubectl")

NODE_LOCAL_DNS = Peer(address="169.254.20.10")
PLACEMENT = {
    "priorityClassName": "edgewater",
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "edgewater", "effect": "NoSchedule"}],
}


def executor(rendered: Rendered) -> dict[str, Any]:
    return dict(yaml.safe_load(rendered.config_maps["edgewater-center"]["executor-pod.yaml"]))


def test_autoscalers_own_the_number_of_replicas_of_gateways_and_api(center: Rendered) -> None:
    scaled = {}
    for scaler in center.of("HorizontalPodAutoscaler"):
        spec = scaler["spec"]
        workload = center.find(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
        assert "replicas" not in workload["spec"], "each apply would set it back"
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        (metric,) = spec["metrics"]
        assert metric["resource"]["target"]["averageValue"] == "600m" and container["resources"]["limits"]["cpu"] == "1"
        assert spec["minReplicas"] >= 2
        scaled[workload["metadata"]["name"]] = spec["maxReplicas"]
    assert scaled.keys() == {"edgewater-gateway", "edgewater-api"}
    # The quota leaves room for both at their largest, drivers, executors, sinks, the database and a backup.
    quota = int(center.find("ResourceQuota", "edgewater")["spec"]["hard"]["pods"])
    assert sum(scaled.values()) + 10 <= quota


def test_executors_have_the_priority_and_the_toleration_of_the_other_pods(center: Rendered) -> None:
    placed = deepcopy(executor(render("base")))
    placed["spec"] |= PLACEMENT
    assert executor(center) == placed, "components/placement/executor-pod.yaml is the base's, with both"
    for workload in center.of("Deployment"):
        spec = workload["spec"]["template"]["spec"]
        assert {key: spec[key] for key in PLACEMENT} == PLACEMENT
    assert center.find("PriorityClass", "edgewater")["value"] > 0


@pytest.mark.parametrize("target", ["targets/center", "targets/edges"])
def test_every_pod_and_executor_can_pull_from_a_private_registry(target: str) -> None:
    rendered = render(target)
    for each in rendered.pods:
        account = rendered.find("ServiceAccount", each["spec"]["serviceAccountName"])
        assert account["imagePullSecrets"] == [{"name": "edgewater-registry"}], each["name"]


@pytest.mark.parametrize("target", ["targets/center", "targets/edges"])
def test_pods_ask_the_name_server_of_their_node_or_of_the_cluster(target: str) -> None:
    rendered = render(target)
    for each in rendered.pods:
        for server in (NODE_LOCAL_DNS, DNS):
            assert allowed(rendered, pod(rendered, each["name"]), server, 53), each["name"]
            assert not allowed(rendered, pod(rendered, each["name"]), server, 443)


def test_pods_ask_the_name_servers_of_openshift(center: Rendered) -> None:
    labels = {"dns.operator.openshift.io/daemonset-dns": "default"}
    server = Peer(labels, "openshift-dns", {"kubernetes.io/metadata.name": "openshift-dns"})
    for each in center.pods:
        assert allowed(center, pod(center, each["name"]), server, 5353), each["name"]
        assert not allowed(center, pod(center, each["name"]), server, 443)


def test_a_backup_reaches_the_database_and_nobody_reaches_it(center: Rendered) -> None:
    backup, database = pod(center, "edgewater-backup"), pod(center, "edgewater-postgres")
    assert allowed(center, backup, database, 5432)
    assert not any(allowed(center, pod(center, p["name"]), backup, 7480) for p in center.pods)


def test_a_sidecar_of_a_labelled_application_reaches_the_gateway_and_its_application_does_not_need_to(
    center: Rendered,
) -> None:
    shop = render("targets/sidecar")
    agent = pod(shop, "shop")
    assert allowed(center, agent, pod(center, "edgewater-gateway"), 7400)
    unlabelled = Peer({"app": "shop"}, agent.namespace, agent.namespace_labels)
    assert not allowed(center, unlabelled, pod(center, "edgewater-gateway"), 7400)


LAST = ("placement", "pull-secret")
"""Components that change what other components add, and say so."""


@pytest.mark.parametrize("target", ["targets/center", "targets/edges", "targets/sidecar"])
def test_components_may_be_named_in_any_order(target: str, tmp_path: Path) -> None:
    shutil.copytree(folder_of(target), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "kustomization.yaml"
    document = yaml.safe_load(file.read_text())
    for kind in ("resources", "components"):
        paths = [
            path if path.endswith(".yaml") else _from(tmp_path, folder_of(target) / path) for path in document[kind]
        ]
        paths.reverse()
        document[kind] = sorted(paths, key=lambda path: Path(path).name in LAST)
    assert len(document["components"]) > 1
    file.write_text(yaml.safe_dump(document))
    assert by_identity(render_folder(tmp_path, target)) == by_identity(render(target))


def _from(directory: Path, path: Path) -> str:
    return os.path.relpath(path.resolve(), directory.resolve())


def by_identity(rendered: Rendered) -> dict[tuple[str, str], Any]:
    """The documents; lists of named elements, and the peers and ports of policies, have no order."""
    return {(d["kind"], d["metadata"]["name"]): _unordered(d) for d in rendered.documents}


def _unordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unordered(member) for key, member in value.items()}
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return sorted(json.dumps(_unordered(each), sort_keys=True) for each in value)
    return value


@pytest.mark.parametrize(
    ("target", "containers"), [("targets/edges", "containers"), ("targets/sidecar", "initContainers")]
)
def test_edges_of_each_form_have_the_authority_of_the_gateway(target: str, containers: str) -> None:
    (workload,) = render(target).of("StatefulSet")
    spec = workload["spec"]["template"]["spec"]
    (mount,) = [m for c in spec[containers] for m in c["volumeMounts"] if m["name"] == "center-ca"]
    assert mount["mountPath"] == "/etc/edgewater-tls"
    assert {"name": "center-ca", "configMap": {"name": "edgewater-center-ca"}} in spec["volumes"]


def test_a_sidecar_has_the_configuration_of_its_overlay() -> None:
    shop = render("targets/sidecar")
    (workload,) = shop.of("StatefulSet")
    (made,) = [
        v["configMap"]["name"]
        for v in workload["spec"]["template"]["spec"]["volumes"]
        if v["name"] == "edgewater-config"
    ]
    assert shop.find("ConfigMap", made)["data"]["edge.yaml"] == (folder_of("targets/sidecar") / "edge.yaml").read_text()


def test_an_edge_with_a_volume_has_no_part_that_runs_as_root(tmp_path: Path) -> None:
    components = [ROOT / "k8s/components" / name for name in ("edge-host-state", "edge-statefulset")]
    document = {
        "resources": [_from(tmp_path, ROOT / "k8s/base/edge")],
        "components": [_from(tmp_path, c) for c in components],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(document))
    spec = render_folder(tmp_path, "edges").find("StatefulSet", "edgewater-edge")["spec"]["template"]["spec"]
    assert not spec.get("initContainers") and all("hostPath" not in volume for volume in spec["volumes"])


def test_no_policy_has_an_empty_list(every_rendered: list[Rendered]) -> None:
    """An API server stores none. So each apply would change the policy."""
    for rendered in every_rendered:
        for policy in rendered.of("NetworkPolicy"):
            assert [] not in policy["spec"].values(), (rendered.target, policy["metadata"]["name"])


def test_edges_with_a_volume_have_a_stable_name_and_take_pushes_from_any_node() -> None:
    edges = render("targets/edges")
    spec = edges.find("StatefulSet", "edgewater-edge")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (name,) = [e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"] if e["name"] == "EDGE"]
    assert name == "metadata.name"
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    service = edges.find("Service", spec["serviceName"])["spec"]
    assert service.get("internalTrafficPolicy", "Cluster") == "Cluster"
