"""A measure by `kll`: registered, merged over two edges, asked at any rank, refused at another confidence."""

import pytest
from conftest import T0


def test_ranks_of_a_kll_measure_are_answered_within_their_bounds(desk):
    desk.connect("jfk")
    query = desk.register(measures={"delay": "kll(dep_delay, k=64)"})
    desk.report(query, "jfk", T0, {"UA": 2001})
    path = "/v1/queries/flights/latest"
    answer = desk.get(f"{path}?quantile=0.25&quantile=0.5").json()
    row = answer["data"][0]["delay"]["quantiles"]
    assert set(row) == {"0.25", "0.5"} and answer["confidence"] == 0.95
    assert row["0.5"]["lower"] <= 1000 <= row["0.5"]["upper"]
    assert row["0.5"]["estimate"] == pytest.approx(1000, rel=0.1)
    assert desk.get(f"{path}?confidence=0.95").status_code == 200
    refused = desk.get(f"{path}?confidence=0.5")
    assert refused.status_code == 422 and "delay is given at 0.95" in refused.json()["reason"]
