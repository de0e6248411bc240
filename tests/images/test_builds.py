"""Both Containerfiles build as they are, and the images hold what they promise."""

from __future__ import annotations

import pytest

from tests.images.conftest import Build
from tests.images.engine import Engine

pytestmark = pytest.mark.images
MB = 1_000_000
NOTHING_WRITABLE = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none")


def output(engine: Engine, image: str, *command: str, options: tuple[str, ...] = ()) -> str:
    """What a command in a container prints that may do nothing."""
    arguments = ["run", "--rm", *NOTHING_WRITABLE, *options, f"--entrypoint={command[0]}", image, *command[1:]]
    return engine.podman(*arguments)


def test_the_edge_image_is_small_and_its_agent_starts(engine: Engine, edge_image: str) -> None:
    assert engine.size(edge_image) <= 350 * MB
    assert output(engine, edge_image, "edgewater", "edge", "--help")
    assert output(engine, edge_image, "id", "-u") == "10001"


def test_what_the_edge_image_leaves_out_is_not_needed(engine: Engine, edge_image: str) -> None:
    program = (
        "import edge.cli, edge.agent, edge.config, edge.uplink.client, edge.sources.factory, numpy, io\n"
        "import pyarrow as pa, pyarrow.compute, pyarrow.csv, pyarrow.json, pyarrow.parquet as pq\n"
        "sink = io.BytesIO(); pq.write_table(pa.table({'a': [1, 2]}), sink, compression='zstd')\n"
        "print(pq.read_table(io.BytesIO(sink.getvalue()))['a'].to_pylist())"
    )
    assert output(engine, edge_image, "python", "-c", program) == "[1, 2]"


@pytest.mark.parametrize("package", ["pyspark", "pandas", "fastapi", "sqlalchemy", "pip", "confluent_kafka"])
def test_the_edge_image_has_nothing_of_the_center_and_no_installer(
    engine: Engine, edge_image: str, package: str
) -> None:
    program = f"import importlib.util; print(importlib.util.find_spec({package!r}))"
    assert output(engine, edge_image, "python", "-c", program) == "None"


def test_the_edge_image_with_sources_reads_brokers(engine: Engine, build: Build) -> None:
    image = build("edge-sources", "--build-arg=LOCK=edge-sources.txt")
    program = (
        "import confluent_kafka, paho.mqtt.client, edge.sources.kafka, edge.sources.mqtt, edge.sources.otlp, "
        "edge.sources.remote_write\nprint(confluent_kafka.libversion()[0] > '2')"
    )
    assert output(engine, image, "python", "-c", program) == "True"
    assert engine.size(image) <= 400 * MB


def test_the_center_image_has_java_spark_and_an_archive_of_classes(engine: Engine, center_image: str) -> None:
    assert engine.size(center_image) <= 1200 * MB
    assert output(engine, center_image, "id", "-u") == "10001"
    assert "17." in output(engine, center_image, "sh", "-c", "java -version 2>&1")
    assert output(engine, center_image, "python", "-c", "import pyspark; print(pyspark.__version__)").startswith("4.")
    assert output(engine, center_image, "sh", "-c", "find /opt/venv -name '*.jsa' | grep -c .") != "0"


def test_images_say_who_they_are_and_stop_by_sigterm(engine: Engine, edge_image: str, center_image: str) -> None:
    for image in (edge_image, center_image):
        config = engine.inspect("image", image)["Config"]
        assert config["User"] == "10001:10001"
        assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert config["StopSignal"] == "SIGTERM"
        assert set(config["Volumes"]) == {"/var/lib/edgewater"}
