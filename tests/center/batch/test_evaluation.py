"""MeasureQuestions to windows on Spark, one by one, as a stream, and in SQL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import functions as F

from center.batch import build, evaluate, register_sql
from edgewater.base.errors import InvalidRequest
from edgewater.model.windows import SlidingWindow, TumblingWindow
from edgewater.synopses import CountMin, DDSketch, Distinct, Frequency, HyperLogLog, Quantile, from_bytes

pytestmark = pytest.mark.spark

ORIGIN = 1_640_995_200_000


def ms(row: Any) -> int:
    return int(row.window_start.timestamp() * 1000)


@pytest.fixture(scope="module")
def counted(df: Any) -> Any:
    window = SlidingWindow("20s", "10s")
    return build(df, CountMin(1 << 13, 4), of="ip", time="ts", window=window, stratify_by="site").cache()


def test_a_stream_of_questions_is_answered_by_every_window_over_their_times(
    spark: Any, counted: Any, records: pd.DataFrame
) -> None:
    asked = [(json.dumps({"question": "frequency", "item": f"10.0.0.{i}"}), ORIGIN + 7_000 * i, i) for i in range(1, 9)]
    asked += [('{"question": "quantile", "q": 0.5}', ORIGIN, 20), ("{", ORIGIN, 21), (asked[0][0], 0, 22)]
    questions = spark.createDataFrame(asked, "question string, time long, id int").repartition(3)
    answers = evaluate(counted, questions, "timestamped", stratified=False).toPandas()
    for i in range(1, 9):
        of = answers[answers.id == i]
        assert len(of) == 2  # windows of 20 s every 10 s
        for row in of.itertuples():
            held = records[(records.ts >= ms(row)) & (records.ts < ms(row) + 20_000)]
            truth = int((held.ip == f"10.0.0.{i}").sum())
            # Too high by a collision in all four rows: once in 1e15.
            assert (row.estimate, row.error) == (truth, None)
            assert row.lower <= truth <= row.upper
            assert (row.confidence > 0.98, row.basis) == (True, "count_min")
    wrong = {row.id: row.error for row in answers.itertuples() if row.error}
    assert wrong.keys() == {20, 21, 22}
    assert "frequency" in wrong[20]
    assert "no window for this question" in wrong[22]


def test_each_stratum_answers_for_itself(spark: Any, counted: Any, records: pd.DataFrame) -> None:
    question = '{"question": "frequency", "item": "10.0.0.1"}'
    questions = spark.createDataFrame(
        [(question, "lga"), (question, "ewr"), (question, "bos")], "question string, site string"
    )
    answers = {
        r.site: r for r in evaluate(counted, questions, last=3).toPandas().sort_values("window_end").itertuples()
    }
    for site in ("lga", "ewr"):
        held = records[(records.site == site) & (records.ts >= ms(answers[site]))]
        assert answers[site].estimate == (held.ip == "10.0.0.1").sum()
    assert "no window for this question" in answers["bos"].error
    assert len(evaluate(counted, questions, last=3).collect()) == 7


def test_the_latest_windows_answer_one_question(counted: Any, records: pd.DataFrame) -> None:
    answers = evaluate(counted, Frequency("10.0.0.2"), last=2, stratified=False).collect()
    assert sorted(map(ms, answers)) == [ORIGIN + 80_000, ORIGIN + 90_000]
    for row in answers:
        held = records[(records.ts >= ms(row)) & (records.ts < ms(row) + 20_000)]
        assert row.estimate == (held.ip == "10.0.0.2").sum()


def test_of_a_result_of_the_last_release_the_newest_revision_of_a_window_counts(spark: Any) -> None:
    first, second = CountMin(64, 3), CountMin(64, 3)
    first.update(["a"])
    second.update(["a", "a"])
    rows = [
        (0, 10, first.to_bytes(), 1, 0, 1, 0),
        (0, 10, second.to_bytes(), 2, 0, 2, 0),
        (0, 10, None, 0, 0, None, 5),  # late records
        (20, 30, first.to_bytes(), 1, 0, 1, 0),
        (20, 30, None, 0, 0, 2, 0),  # a session that was withdrawn
    ]
    columns = "window_start long, window_end long, synopsis binary, records long, nulls long, revision long, late long"
    stored = spark.createDataFrame(rows, columns)
    for name in ("window_start", "window_end"):
        stored = stored.withColumn(name, F.timestamp_millis(F.col(name)))
    answers = evaluate(stored, Frequency("a"), last=5).collect()
    assert [(ms(row), row.estimate) for row in answers] == [(0, 2)]


def test_questions_of_a_streaming_dataframe_are_answered_as_they_come(spark: Any, counted: Any, tmp_path: Path) -> None:
    texts = [json.dumps({"question": "frequency", "item": f"10.0.0.{i}"}) for i in range(50)]
    pd.DataFrame({"question": texts}).to_parquet(tmp_path / "questions.parquet")
    questions = spark.readStream.schema("question string").parquet(str(tmp_path))
    answers = evaluate(counted, questions, stratified=False)
    query = answers.writeStream.format("memory").queryName("answers").trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    found = {r.question: r.estimate for r in spark.table("answers").collect()}
    whole = from_bytes(bytes(evaluated_window(counted)))
    assert found == {t: whole.query(Frequency(json.loads(t)["item"])).value for t in texts}


def evaluated_window(counted: Any) -> bytes:
    rows = [r for r in counted.collect() if ms(r) == ORIGIN + 90_000]
    first, *others = (from_bytes(bytes(r.synopsis)) for r in rows)
    return first.merge_many(others).to_bytes()


def test_sql_estimates_and_merges(spark: Any, df: Any, records: pd.DataFrame) -> None:
    register_sql(spark)
    for name, prototype, column in (("latencies", DDSketch(), "latency"), ("ips", HyperLogLog(), "ip")):
        out = build(df, prototype, of=column, time="ts", window=TumblingWindow("25s"), stratify_by="site")
        out.createOrReplaceTempView(name)
    rows = spark.sql("""
        select site, a.estimate, a.lower, a.upper, a.basis
        from (select site, edgewater_estimate(edgewater_merge(synopsis), 'quantile', 0.99) as a
              from latencies group by site)
    """).collect()
    assert {r.site for r in rows} == {"jfk", "lga", "ewr"}
    for row in rows:
        truth = records[records.site == row.site].latency.quantile(0.99, "lower")
        assert row.lower <= truth <= row.upper
        whole = DDSketch()
        whole.update(records[records.site == row.site].latency.to_numpy())
        assert row.estimate == whole.query(Quantile(0.99)).value
    (row,) = spark.sql(
        "select edgewater_estimate(edgewater_merge(synopsis), 'distinct').estimate as n from ips"
    ).collect()
    whole = HyperLogLog()
    whole.update(records.ip.tolist())
    assert row.n == whole.query(Distinct()).value
    (row,) = spark.sql("select edgewater_estimate(cast(null as binary), 'distinct') as n").collect()
    assert row.n is None
    with pytest.raises(Exception, match="hyperloglog"):
        spark.sql("select edgewater_estimate(synopsis, 'quantile', 0.5) from ips").collect()


@pytest.mark.parametrize(
    ("questions", "arguments", "message"),
    [
        (Distinct(), {"mode": "newest"}, '"latest" or "timestamped"'),
        (Distinct(), {"mode": "timestamped"}, "a DataFrame with the columns question and time"),
        (Distinct(), {"last": 0}, "at least 1"),
        ("no json", {}, "a JSON object"),
        (None, {}, "site"),
        (None, {"stratified": False, "question": "id"}, "column id of type"),
    ],
)  # fmt: skip
def test_an_invalid_question_is_refused_at_once(
    spark: Any, counted: Any, questions: Any, arguments: dict[str, Any], message: str
) -> None:
    given = spark.createDataFrame([("{}", 1)], "question string, id int") if questions is None else questions
    with pytest.raises(InvalidRequest, match=message):
        evaluate(counted, given, **arguments)
