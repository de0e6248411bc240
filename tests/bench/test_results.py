"""`python -m bench.results` puts figures of `bench/out` into the pages, and keeps all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.results import PAGE, PAPER_TABLES, PAPERS, TABLES, assemble

EDGE = {"core_percent": 1.48, "us_per_record": 14.6, "records_s": 1014, "rss_mib": 106.0}
FLOOD = {"partials_s": 7576.4, "mb_s": 27.25, "cpu_us_per_partial_of_the_center": 225.0}
DOCUMENTS: dict[str, Any] = {
    "first_light.json": {
        "edge": {"columnar_records_s": 3.4e6, "ndjson_bytes": 5}, "memory": {"idle_mib": 80.0, "resident_mib": 127.0},
    },
    "scale.json": {
        "rows": {
            "edge": {"at rest": EDGE},
            "rates": {
                "small": FLOOD, "small_of_32_edges": FLOOD, "large": FLOOD, "large_of_8_edges": FLOOD,
                "queries": {"queries": 500, "close_cpu_s": 0.52},
            },
            "sessions": {"sessions": 11_000, "active": 1_000, "ack_ms_p99": 306.0},
            "takeover": {"driver killed": {"next_answer_s": 0.31, "windows": 83, "wrong_or_incomplete": 0}},
            "executors": {"rows": {"1 executors": {"partials_s": 10_189.0}}},
            "drivers": {"ratio": None, "not_measured": "no PostgreSQL"},
        }
    },
    "budgets.json": [
        {"trace": "few", "aggregate": "sum", "bandwidth": "low", "kind": "error", "budget": budget, "label": label,
         "staleness_p95": figure}
        for budget, label, figure in ((0, "optimal", 1.0), (0, "gain", 1.4), (0.1, "optimal", 1.0), (0.1, "gain", 2))
    ],
    "least-bytes.json": [
        {"error": 0.01, "staleness": 1.0, "bytes": 100, "raw_bytes": 6_100, "entries": 9, "best_entries": 9,
         "late_windows": 0},
    ],
    "synopses.json": {"throughput": [{"synopsis": "hll", "cores": 1, "ours_m_per_s": 82.0, "ratio": 13.4}]},
    "sources-cost.json": [{"source": "lines, csv", "records_per_cpu_s": 4e6, "bytes_per_record": 144.0}],
}  # fmt: skip


RATES = {"2": {"slicing": {"1": 1.5e6, "100": 6e5}}}
CLASSES = {"benchmark": "ysb", "delays": "uniform", "costs": "mixed", "queries": 60, "nodes": 1, "cap_bytes": 16e6}
TIMES = {"latency_ms_mean": 3.0, "latency_ms_p99": 14.8}
PAPER_DOCUMENTS: dict[str, Any] = {
    "budgets-papers.json": [
        {"aggregate": "sum", "bandwidth": "low", "kind": kind, "budget": 0.03, "label": label, "staleness_p95": 0.5,
         "error_p95": 0.0}
        for kind in ("error", "staleness") for label in ("optimal", "gain")
    ],
    "early_answers.json": {"baselines": [
        {"algorithm": "edgewater", "values": "ysb", "delays": "EG", "rate": 5_000.0, "latencies_ms": [0.0, 0.0, 330.0],
         "latency_ms_mean": 110.0, "sampling_rate": 0.27, "coverage": 0.95},
    ]},
    "scheduling.json": [
        *({"part": part, "policy": "klink", **CLASSES, **TIMES} for part in ("load", "nodes", "memory")),
        {"part": "overhead", "policy": "klink", "queries": 60, "overhead": 0.0025},
        {"part": "accuracy", "delays": "zipf", "confidence": 0.95, "empirical": 0.949, "normal, predictive": 0.897,
         "normal, as printed": 0.069, "linear regression": 0.916},
    ],
    "condor.json": {
        "windows": RATES, "sources": RATES, "disorder": RATES, "skew": {"2": {"global, zipf": 2.7e6}},
        "accuracy": {"2": {"(i) count-min": {"centralised": 0.001, "distributed": 0.001, "size ratio": 1.0}}},
        "evaluation": {"1": {"latest": 121_000.0}, "2": {"latest": 223_000.0}},
        "cost": {"1": {"kll, spark": 1e6, "kll, one thread": 2e6}, "2": {"kll, spark": 3e6, "kll, one thread": 2e6}},
    },
}  # fmt: skip


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for name, document in DOCUMENTS.items():
        (tmp_path / name).write_text(json.dumps(document))
    return tmp_path


def test_every_table_of_the_page_is_renewed(out: Path) -> None:
    page, kept = assemble(PAGE.read_text(), out)
    assert kept == {}
    assert {table.file for table in TABLES.values()} == DOCUMENTS.keys()
    for row in (
        "| at rest | 1.48 | 14.6 | 106 |",
        "| one of 500 queries that close at once | – | – | 1,040 |",
        "| budgets that meet the goal | 1 of 2 |",
        "| 1.0% | both | 100 | 1/61 | 1.00 | 0 |",
        "| 7,576 | 27.2 |",
    ):
        assert row in page


def test_every_table_of_the_papers_is_renewed(tmp_path: Path) -> None:
    for name, document in PAPER_DOCUMENTS.items():
        (tmp_path / name).write_text(json.dumps(document))
    page, kept = assemble(PAPERS.read_text(), tmp_path, PAPER_TABLES)
    assert kept == {}
    for row in (
        "| sum | low | 0.03 | 0.5 | 0.5 | – |",
        "| ysb | EG | 5000 | 0, 110 |",
        "| ysb | 60 | 0.003, 0.015 |",
        "| zipf | 95% | 94.9% | 6.9% | 89.7% | 91.6% |",
        "| slicing | 1.50 | 0.60 |",
        "| kll | 2.00 | 1.00 | 3.00 |",
    ):
        assert row in page


def test_a_table_without_a_measurement_keeps_its_figures(out: Path) -> None:
    (out / "scale.json").write_text(json.dumps({"rows": {"edge": DOCUMENTS["scale.json"]["rows"]["edge"]}}))
    (out / "least-bytes.json").unlink()
    page, kept = assemble(PAGE.read_text(), out)
    assert {"center", "sessions", "takeover", "several", "least-bytes"} == kept.keys()
    for name in kept:
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        assert page.split(begin)[1].split(end)[0] == PAGE.read_text().split(begin)[1].split(end)[0]


def test_a_page_that_has_been_renewed_can_be_renewed_again(out: Path) -> None:
    once, _ = assemble(PAGE.read_text(), out)
    assert assemble(once, out)[0] == once
