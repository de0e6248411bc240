"""Writes k8s/components/monitoring/rules.yaml: the rules and alerts of deploy/mixin for the Prometheus operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "k8s" / "components" / "monitoring" / "rules.yaml"
HEAD = "# Written by deploy/monitoring.py from deploy/mixin.\n"


def render() -> str:
    """The PrometheusRule as YAML."""
    parts = [yaml.safe_load((ROOT / "deploy" / "mixin" / f"{name}.yml").read_text()) for name in ("rules", "alerts")]
    rule: dict[str, Any] = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "edgewater", "namespace": "edgewater"},
        "spec": {"groups": [group for part in parts for group in part["groups"]]},
    }
    return HEAD + yaml.safe_dump(rule, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    FILE.write_text(render())
