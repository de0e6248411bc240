"""Who may talk to whom, judged as a cluster would: both ends must allow it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Peer:
    """An end of a connection: a pod of the manifests, a pod elsewhere in the cluster, or an address."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = ""
    namespace_labels: dict[str, str] = field(default_factory=dict)
    address: str = "10.1.2.3"
    ports: dict[str, int] = field(default_factory=dict)


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In", "teach this test the operator"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def names(entry: dict[str, Any], peer: Peer, own_namespace: str) -> bool:
    if "ipBlock" in entry:
        inside = ipaddress.ip_address(peer.address) in ipaddress.ip_network(entry["ipBlock"]["cidr"])
        return inside and not peer.labels
    if "namespaceSelector" in entry:
        if not peer.labels or not matches(entry["namespaceSelector"], peer.namespace_labels):
            return False
    elif peer.namespace != own_namespace:
        return False
    return matches(entry.get("podSelector", {}), peer.labels)


def allowed(rendered: Any, source: Peer, target: Peer, port: int) -> bool:
    return _side(rendered, "Egress", source, target, port) and _side(rendered, "Ingress", target, source, port)


def _side(rendered: Any, direction: str, own: Peer, other: Peer, port: int) -> bool:
    if own.namespace not in {n["metadata"]["name"] for n in rendered.of("Namespace")}:
        return True  # not ours to restrict
    policies = [
        p
        for p in rendered.of("NetworkPolicy")
        if p["metadata"]["namespace"] == own.namespace
        and direction in p["spec"]["policyTypes"]
        and matches(p["spec"]["podSelector"], own.labels)
    ]
    listener = own if direction == "Ingress" else other
    key, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    for rule in [r for p in policies for r in p["spec"].get(key, [])]:
        open_ports = [listener.ports.get(p["port"], p["port"]) for p in rule["ports"]]
        if port in open_ports and (peers not in rule or any(names(e, other, own.namespace) for e in rule[peers])):
            return True
    return not policies


def pod(rendered: Any, name: str) -> Peer:
    found = next(p for p in rendered.pods if p["name"] == name)
    namespace = rendered.find("Namespace", found["namespace"])["metadata"]
    labels = {"kubernetes.io/metadata.name": found["namespace"], **namespace["labels"]}
    ports = {p["name"]: p["containerPort"] for c in found["spec"]["containers"] for p in c.get("ports", [])}
    return Peer(found["metadata"]["labels"], found["namespace"], labels, ports=ports)


def elsewhere(**namespace_labels: str) -> Peer:
    labels = {f"edgewater.io/{k.replace('_', '-')}": v for k, v in namespace_labels.items()}
    return Peer({"app": "other"}, "elsewhere", {"kubernetes.io/metadata.name": "elsewhere", **labels})


DNS = Peer({"k8s-app": "kube-dns"}, "kube-system", {"kubernetes.io/metadata.name": "kube-system"})
OPEN = [
    ("edgewater-edge", "edgewater-gateway", 7400),
    ("executor", "edgewater-job", 7078),
    ("executor", "edgewater-job", 7079),
    ("edgewater-job", "executor", 7079),
    ("executor", "executor", 7079),
    ("edgewater-gateway", "edgewater-postgres", 5432),
    ("edgewater-job", "edgewater-postgres", 5432),
    ("edgewater-api", "edgewater-postgres", 5432),
    ("edgewater-sink", "edgewater-postgres", 5432),
]


def test_every_pod_is_covered_by_a_default_deny_in_both_directions(rendered: Any) -> None:
    for workload in rendered.pods:
        denies = [
            p["spec"]
            for p in rendered.of("NetworkPolicy")
            if p["metadata"]["namespace"] == workload["namespace"] and p["spec"]["podSelector"] == {}
        ]
        assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in denies


def test_every_workload_is_selected_by_a_policy_of_its_own_name(rendered: Any) -> None:
    policies = {p["metadata"]["name"]: p["spec"]["podSelector"] for p in rendered.of("NetworkPolicy")}
    for workload in rendered.pods:
        name = "edgewater-executor" if workload["name"] == "executor" else workload["name"]
        assert matches(policies[name], workload["metadata"]["labels"])


def test_every_policy_selects_a_pod(rendered: Any) -> None:
    for policy in rendered.of("NetworkPolicy"):
        assert any(
            matches(policy["spec"]["podSelector"], p["metadata"]["labels"])
            for p in rendered.pods
            if p["namespace"] == policy["metadata"]["namespace"]
        ), policy["metadata"]["name"]


@pytest.mark.slow
def test_in_one_cluster_exactly_the_ways_that_are_needed_are_open(dev: Any) -> None:
    names_of_pods = [p["name"] for p in dev.pods]
    ports = sorted({port for p in names_of_pods for port in pod(dev, p).ports.values()} | {7079})
    found = [
        (a, b, port)
        for a in names_of_pods
        for b in names_of_pods
        for port in ports
        if allowed(dev, pod(dev, a), pod(dev, b), port)
    ]
    assert sorted(found) == sorted(OPEN)


def test_every_pod_resolves_names(dev: Any) -> None:
    for name in [p["name"] for p in dev.pods]:
        assert allowed(dev, pod(dev, name), DNS, 53), name
        assert not allowed(dev, pod(dev, name), DNS, 8080)


@pytest.mark.parametrize(
    ("label", "target", "port"),
    [
        ("api_clients", "edgewater-api", 7480),
        ("monitoring", "edgewater-api", 7403),
        ("monitoring", "edgewater-gateway", 7401),
        ("monitoring", "edgewater-job", 7402),
        ("monitoring", "edgewater-edge", 7411),
        ("sources", "edgewater-edge", 7410),
    ],
)
def test_a_namespace_comes_in_by_its_label_only(dev: Any, label: str, target: str, port: int) -> None:
    assert allowed(dev, elsewhere(**{label: "true"}), pod(dev, target), port)
    assert not allowed(dev, elsewhere(), pod(dev, target), port)


def test_only_the_job_reaches_the_api_server(dev: Any) -> None:
    server = Peer(address="10.96.0.1")
    reaching = [p["name"] for p in dev.pods if allowed(dev, pod(dev, p["name"]), server, 6443)]
    assert reaching == ["edgewater-job"]


def test_in_production_edges_come_from_named_sites_and_the_database_is_one_address(prod: Any) -> None:
    gateway = pod(prod, "edgewater-gateway")
    assert allowed(prod, Peer(address="203.0.113.9"), gateway, 7400)
    assert not allowed(prod, Peer(address="198.51.100.9"), gateway, 7400)
    for part in ("edgewater-gateway", "edgewater-job", "edgewater-api"):
        assert allowed(prod, pod(prod, part), Peer(address="192.0.2.10"), 5432)
        assert not allowed(prod, pod(prod, part), Peer(address="192.0.2.11"), 5432)
    assert not allowed(prod, pod(prod, "executor"), Peer(address="192.0.2.10"), 5432)
