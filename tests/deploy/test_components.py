"""What each component adds, where a rendered and valid document could still be wrong."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import Rendered, render
from tests.deploy.test_network_policies import DNS, Peer, allowed, pod

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
@pytest.mark.usefixtures("kubectl")
def test_every_pod_and_executor_can_pull_from_a_private_registry(target: str) -> None:
    rendered = render(target)
    for each in rendered.pods:
        account = rendered.find("ServiceAccount", each["spec"]["serviceAccountName"])
        assert account["imagePullSecrets"] == [{"name": "edgewater-registry"}], each["name"]


@pytest.mark.parametrize("target", ["targets/center", "targets/edges"])
@pytest.mark.usefixtures("kubectl")
def test_pods_ask_the_name_server_of_their_node_or_of_the_cluster(target: str) -> None:
    rendered = render(target)
    for each in rendered.pods:
        for server in (NODE_LOCAL_DNS, DNS):
            assert allowed(rendered, pod(rendered, each["name"]), server, 53), each["name"]
            assert not allowed(rendered, pod(rendered, each["name"]), server, 443)


def test_a_backup_reaches_the_database_and_nobody_reaches_it(center: Rendered) -> None:
    backup, database = pod(center, "edgewater-backup"), pod(center, "edgewater-postgres")
    assert allowed(center, backup, database, 5432)
    assert not any(allowed(center, pod(center, p["name"]), backup, 7480) for p in center.pods)


@pytest.mark.usefixtures("kubectl")
def test_a_sidecar_of_a_labelled_application_reaches_the_gateway_and_its_application_does_not_need_to(
    center: Rendered,
) -> None:
    shop = render("targets/sidecar")
    agent = pod(shop, "shop")
    assert allowed(center, agent, pod(center, "edgewater-gateway"), 7400)
    unlabelled = Peer({"app": "shop"}, agent.namespace, agent.namespace_labels)
    assert not allowed(center, unlabelled, pod(center, "edgewater-gateway"), 7400)


@pytest.mark.usefixtures("kubectl")
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
