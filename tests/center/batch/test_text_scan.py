"""CSV and JSON lines that tasks read with Arrow have the rows that Spark reads; or Spark reads them."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import center.batch.builder
from center.batch import build
from center.batch.file_scan import file_scan
from center.batch.scan_plan import FileRange, ScanPlan
from center.batch.text_scan import CSV, JSON, TextScan
from edgewater.model.windows import TumblingWindow
from edgewater.synopses import CountMin, Kll

pytestmark = pytest.mark.spark

FIELDS = (("a", "bigint"), ("s", "string"), ("d", "double"), ("i", "int"), ("b", "boolean"))
SCHEMA = ", ".join(f"{name} {type_}" for name, type_ in FIELDS)
PLAIN = {"csv": "5,text of it,1.5,7,true\n", "json": '{"a":5,"s":"text of it","d":1.5,"i":7,"b":true}\n'}
READ = {
    "csv": [
        PLAIN["csv"], "5,x,1.5,7,false", "\n\n5,x,2,7,true\n\n", ",,,,\n", "-9223372036854775808,a b,1e3,-0,\n",
        "007,-,.5,00,true\n", "1,NA,-0,1,true\n", "1,null,5e-324,1,true\n", "1,{[(#';,1.,2147483647,false\n",
        "1,x,123456789012345678901234567890.5,1,true\n", "1,x,0.1000000000000000055511151231257827,1,true\n",
        "1,a,1E-7,1,true\n" * 3,
    ],
    "json": [
        PLAIN["json"], "{}\n", '{"a":5}\n{"s":"x"}\n', '{"a":null,"d":7,"other":{"a":[1,{}]}}',
        '{ "a" : -0 , "d" : -0.0 }\n', '{"d":1E-7,"s":"  , x\' {}"}\n', '{"A":5,"a":6}\n', '{"d":5e-324,"b":false}\n',
        '{"d":123456789012345678901234567890.5}\n', '{"s":"","i":-2147483648}\n', '{"other":NaN}',
    ],
}  # fmt: skip
"""Files that are read by tasks, or left to Spark where Arrow cannot."""
HOSTILE = {
    "csv": [
        '5,"x",1.5,7,true\n', "5,x\\,1.5,7,true\n", "5,x,1.5,7,true\r\n", "5,\u00e9,1.5,7,true\n", "5,x\n",
        "5,x,1.5,7,true,more\n", " 5,x,1.5,7,true\n", "5 ,x,1.5,7,true\n", "0x1F,x,1.5,7,true\n", "+5,x,1.5,7,true\n",
        "5.0,x,1.5,7,true\n", "9223372036854775808,x,1.5,7,true\n", "5,x,NaN,7,true\n", "5,x,inf,7,true\n",
        "5,x,1e999,7,true\n", "5,x,1.5d,7,true\n", "5,x,1.5,2147483648,true\n", "5,x,1.5,7,TRUE\n", "5,x,1.5,7,1\n",
        "   \n5,x,1.5,7,true\n", "5,x\0,1.5,7,true\n", "5,x\ty,1.5,7,true\n", "five,x,1.5,7,true\n",
        '5,"x\ny",1.5,7,true\n',
        "5, x,1.5,7,true\n", "\ufeff5,x,1.5,7,true\n", "5,x,1.5,7,true \n", "5,x,0x1p3,7,true\n",
    ],
    "json": [
        '{"a":5.0}\n', '{"a":"5"}\n', '{"a":1e3}\n', '{"a":9223372036854775808}\n', '{"s":5}\n', '{"s":{"x":1}}\n',
        '{"s":"\\u00e9"}\n', '{"s":"\u00e9"}\n', '{"a":5,"a":6}\n', '{"a":5} {"a":6}\n', '{"a":5}{"a":6}\n',
        '[{"a":5},{"a":6}]\n', '{"a":\n5}\n', '{"a":5\n', "{'a':5}\n", "null\n", "\n\n{}\n", '{"d":"NaN"}\n',
        '{"d":NaN}\n', '{"d":1e999}\n', '{"b":"true"}\n', '{"b":1}\n', '{"i":2147483648}\n', '{"a":05}\n',
        '{"a":5},\n', ' {"a":5}\n', '{"a":5}\r\n', '{"a":5}x\n', '{"a":{"a":1}\n}\n', '{"d":.5}\n', '{"s":"x\ty"}\n',
    ],
}  # fmt: skip
"""Files that Arrow and Spark read differently, or might."""


def scan_of(path: Path, kind: str, **options: str) -> TextScan:
    size = path.stat().st_size
    names = tuple(name for name, _ in FIELDS)
    ranges = ((FileRange(str(path), 0, size, size),),)
    plan = ScanPlan({"csv": CSV, "json": JSON}[kind], options, FIELDS, names, (), ranges)
    return TextScan(plan, {str(path): path.stat().st_mtime_ns})


def rows_of(scan: TextScan) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in scan.batches(0) for row in batch.to_pylist()]


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_each_file_that_tasks_read_has_the_rows_that_spark_reads(spark: Any, tmp_path: Path, kind: str) -> None:
    texts = READ[kind] + HOSTILE[kind]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.{kind}").write_text(text, encoding="utf-8", newline="")
    theirs = defaultdict(list)
    df = spark.read.schema(SCHEMA).format(kind).load(str(tmp_path))
    for *row, name in df.withColumn("file", F.input_file_name()).coalesce(1).collect():
        theirs[int(Path(name).stem)].append(tuple(row))
    taken = 0
    for number, text in enumerate(texts):
        scan = scan_of(tmp_path / f"{number}.{kind}", kind)
        difference = scan.difference(0)
        assert difference is not None or number < len(READ[kind]), text
        if difference is None:
            taken += 1
            assert list(map(repr, rows_of(scan))) == list(map(repr, theirs[number])), text
    assert taken >= len(READ[kind]) - 1


def test_a_build_of_text_equals_that_of_rows_which_spark_reads(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(1_640_995_200_000 + i * 7, f"10.0.{i % 9}.1" if i % 5 else "", i * 37 % 1000 / 8) for i in range(4000)]
    (tmp_path / "csv").mkdir()
    (tmp_path / "json").mkdir()
    for number in range(2):
        part = rows[number::2]
        lines = "".join(f"{ts};{ip};{value}\n" for ts, ip, value in part)
        (tmp_path / "csv" / f"{number}.csv").write_text("time;ip;value\n" + lines)
        lines = "".join(f'{{"ts":{ts},"ip":"{ip}","value":{value}}}\n' for ts, ip, value in part)
        (tmp_path / "json" / f"{number}.json").write_text(lines)
    before = spark.conf.get("spark.sql.files.maxPartitionBytes")
    spark.conf.set("spark.sql.files.maxPartitionBytes", "20k")
    try:
        schema = "ts bigint, ip string, value double"  # a reader keeps its options
        frames = {
            "csv": spark.read.schema(schema).csv(str(tmp_path / "csv"), sep=";", header=True),
            "json": spark.read.schema(schema).json(str(tmp_path / "json")),
        }
        for kind, df in frames.items():
            some = df.where("ip is not null and ts >= 1640995200070")
            arguments: dict[str, Any] = {"of": "value", "time": "ts", "window": TumblingWindow("5s")}
            scans: list[Any] = []

            def seen(records: Any, scans: list[Any] = scans) -> Any:
                scans.append(file_scan(records))
                return scans[-1]

            monkeypatch.setattr(center.batch.builder, "file_scan", seen)
            scanned = build(some, Kll(64), **arguments)
            assert scans[0] is not None and len(scans[0].plan.partitions) > 2, kind
            monkeypatch.setattr(center.batch.builder, "file_scan", lambda records: None)
            found = [sorted(map(repr, out.collect())) for out in (scanned, build(some, Kll(64), **arguments))]
            assert found[0] == found[1] and len(found[0]) > 3, kind
        with caplog.at_level(logging.INFO, "center.batch"):
            assert file_scan(spark.read.schema(schema).csv(str(tmp_path / "csv"), nullValue="x")) is None
            (tmp_path / "json" / "1.json").write_text('{"ip":"\\u0041"}\n')
            assert file_scan(spark.read.schema(schema).json(str(tmp_path / "json"))) is None
        assert "options nullvalue" in caplog.text
        assert "1.json: a backslash" in caplog.text
    finally:
        spark.conf.set("spark.sql.files.maxPartitionBytes", before)


def test_a_file_that_changes_before_the_job_runs_is_refused(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "1.csv"
    path.write_text("1\n2\n")
    out = build(spark.read.schema("a bigint").csv(str(tmp_path)), CountMin(64, 3), of="a")
    path.write_text("1\n2\n3\n")
    with pytest.raises(Exception, match="the file has changed"):
        out.collect()
