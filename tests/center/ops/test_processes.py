"""Components that start while their database cannot be reached."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from center.catalog import Catalog
from center.config import CenterConfig, SparkSection
from center.ops.processes import opened
from center.ops.startup import Startup
from edgewater.base.errors import StorageError


def test_a_database_that_cannot_be_reached_is_tried_again(tmp_path: Path) -> None:
    unreachable = tmp_path / "away"
    unreachable.mkdir()  # SQLite: unable to open database file
    urls = iter([f"sqlite:///{unreachable}", f"sqlite:///{unreachable}", f"sqlite:///{tmp_path}/catalog.db"])
    catalog = opened(lambda: Catalog(next(urls)))
    assert catalog.queries.all() == []
    catalog.close()


def test_a_stop_ends_the_attempts(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StorageError):
        opened(lambda: Catalog(f"sqlite:///{tmp_path}"), stop)


def test_a_database_that_is_not_one_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").write_text("not a database, but long enough to have a header of SQLite's size" * 50)
    attempts = []

    def open_catalog() -> Catalog:
        attempts.append(1)
        return Catalog(f"sqlite:///{tmp_path}/catalog.db")

    with pytest.raises(StorageError):
        opened(open_catalog)
    assert len(attempts) == 1


def test_a_center_runs_its_drivers_and_a_standby_with_metrics_at_the_ports_after_the_first(tmp_path: Path) -> None:
    spark = {"standby": True, "drivers": 2, "metrics": "127.0.0.1:7402"}
    config = CenterConfig.from_mapping({"data_dir": str(tmp_path), "spark": spark})
    commands = {c.name: list(c.argv()) for c in Startup(config, ["--log-level", "info"], as_json=False).commands()}
    assert commands.keys() == {"gateway", "job", "api", "sink", "job-2", "standby"}
    assert commands["job-2"] == [*commands["job"], "--set", "spark.metrics=127.0.0.1:7403"]
    assert commands["standby"] == [*commands["job"], "--set", "spark.metrics=127.0.0.1:7404"]
    alone = Startup(config.model_copy(update={"spark": SparkSection()}), [], as_json=False)
    assert "standby" not in {c.name for c in alone.commands()}
