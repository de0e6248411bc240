"""`deploy/mixin`: dashboards, recording rules and alerts fit the metrics that the code exports, and promtool agrees."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.center.api.conftest import T0, desk
from tests.center.api.test_prometheus import API, fill
from tests.deploy.conftest import Rendered, render
from tests.docs import metrics_reference

__all__ = ["desk"]
ROOT = Path(__file__).resolve().parents[2]
MIXIN = ROOT / "deploy" / "mixin"
_METRIC = re.compile(r"\bedgewater_[a-z0-9_]+")
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load((MIXIN / name).read_text()) for name in ("rules.yml", "alerts.yml")]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def panels(name: str) -> list[dict[str, Any]]:
    return list(json.loads((MIXIN / "dashboards" / f"{name}.json").read_text())["panels"])


def expressions() -> list[str]:
    return [r["expr"] for r in rules()] + [t["expr"] for p in panels("system") for t in p["targets"]]


def test_the_reference_lists_every_metric_that_the_code_exports() -> None:
    assert metrics_reference.PAGE.read_text() == metrics_reference.render(), (
        "python -m tests.docs.metrics_reference renews the page"
    )


def test_every_metric_of_the_mixin_is_exported_with_the_labels_that_it_uses() -> None:
    known = {
        m.name: {*m.labels, "instance", "job", "le"}
        for metrics in metrics_reference.exported().values()
        for m in metrics
    }
    recorded = {r["record"] for r in rules() if "record" in r}
    for expression in expressions():
        used = {_SUFFIX.sub("", m) for m in _METRIC.findall(re.sub(r'"[^"]*"', "", expression))}
        assert used <= set(known), expression
        assert set(re.findall(r"\bedgewater:[a-z0-9_:]+", expression)) <= recorded
        labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r"[, ]+", group)}
        for metric in used:
            assert labels <= known[metric], expression
    patterns = re.findall(r'__name__=~"([^"]+)"', " ".join(expressions()))
    assert all(any(re.fullmatch(p, name) for name in known) for p in patterns)


def test_every_alert_has_a_severity_a_summary_and_a_page_that_says_what_to_do() -> None:
    page = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
    headings = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    alerts = [r for r in rules() if "alert" in r]
    assert [r["alert"] for r in alerts] == headings
    for rule in alerts:
        assert re.fullmatch(r"Edgewater[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
        assert rule["annotations"]["runbook_url"].endswith(f"/how-to/alerts#{rule['alert'].lower()}")
    tested = [t["name"].split()[0] for t in yaml.safe_load((MIXIN / "tests.yml").read_text())["tests"]]
    assert {f"Edgewater{name}" for name in tested} == set(headings)


def run_promtool(program: str, *arguments: str, cwd: Path = MIXIN) -> None:
    done = subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_promtool_accepts_the_rules_and_each_alert_fires_and_is_quiet(promtool: str) -> None:
    run_promtool(promtool, "check", "rules", "rules.yml", "alerts.yml")
    run_promtool(promtool, "test", "rules", "tests.yml")


def test_promtool_accepts_every_expression_of_the_dashboard(tmp_path: Path, promtool: str) -> None:
    each = [{"record": f"panel:{i}", "expr": e} for i, e in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": each}]}))
    run_promtool(promtool, "check", "rules", "panels.yml", cwd=tmp_path)


@pytest.mark.slow
def test_the_center_answers_every_expression_of_the_dashboard_of_answers(desk) -> None:
    fill(desk)
    app = desk.app()
    values = {"${query}": "flights", "${measure}": "n", "${column}": "carrier", "$group": "UA"}
    for panel in panels("answers"):
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(name, value)
            reply = desk.get(f"{API}/query", app=app, params={"query": expression, "time": T0 / 1000 + 3 * 3600})
            assert len(reply.json()["data"]["result"]) == 1, expression
    overrides = panels("answers")[0]["fieldConfig"]["overrides"]
    fills = {o["matcher"]["options"]: {p["id"]: p["value"] for p in o["properties"]} for o in overrides}
    assert fills["upper"]["custom.fillBelowTo"] == "lower"  # Grafana draws a band from the upper series down


def test_the_rules_of_the_monitoring_component_are_those_of_the_mixin(center: Rendered) -> None:
    rule = center.find("PrometheusRule", "edgewater")
    assert [r for group in rule["spec"]["groups"] for r in group["rules"]] == rules(), "make reference renews the file"


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize(
    ("target", "pods"), [("targets/center", ["gateway", "job", "api", "sink"]), ("targets/edges", ["edge"])]
)
def test_each_pod_that_has_metrics_is_scraped_once_at_the_port_that_its_network_policy_opens(
    target: str, pods: list[str]
) -> None:
    rendered = render(target)
    scraped = []
    for monitor in rendered.of("PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (pod,) = [p for p in rendered.pods if wanted <= p["metadata"]["labels"].items()]
        assert pod["namespace"] == monitor["metadata"]["namespace"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in [p["name"] for c in pod["spec"]["containers"] for p in c["ports"]]
        policy = rendered.find("NetworkPolicy", pod["name"])["spec"]["ingress"]
        monitoring = {"namespaceSelector": {"matchLabels": {"edgewater.io/monitoring": "true"}}}
        (rule,) = [rule for rule in policy if monitoring in rule["from"]]
        assert [p["port"] for p in rule["ports"]] == [endpoint["port"]]
        scraped.append(pod["name"].removeprefix("edgewater-"))
    assert sorted(scraped) == sorted(pods)
