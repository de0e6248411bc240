"""A measure by `kll`: registered, merged over two edges, asked at any rank and confidence."""

import pytest

T0 = 1_356_998_400_000


def test_ranks_of_a_kll_measure_are_answered_within_their_bounds(desk):
    query = desk.register_over("jfk", measures={"delay": "kll(dep_delay, k=64)"})
    desk.report(query, "jfk", T0, {"UA": 2001})
    path = "/v1/queries/flights/latest"
    answer = desk.get(f"{path}?quantile=0.25&quantile=0.5").json()
    row = answer["data"][0]["delay"]["quantiles"]
    assert set(row) == {"0.25", "0.5"} and answer["confidence"] == 0.95
    assert row["0.5"]["lower"] <= 1000 <= row["0.5"]["upper"]
    assert row["0.5"]["estimate"] == pytest.approx(1000, rel=0.1)
    narrow, wide = (
        desk.get(f"{path}?quantile=0.5&confidence={c}").json()["data"][0]["delay"]["quantiles"]["0.5"]
        for c in (0.5, 0.999)
    )
    assert wide["lower"] < narrow["lower"] <= narrow["upper"] < wide["upper"]
