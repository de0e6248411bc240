from __future__ import annotations

from center.serving.synopsis_cache import SynopsisCache


def test_a_window_without_data_is_cached_like_data() -> None:
    looks: list[bool] = []
    made: list[int] = []
    decoded = SynopsisCache(1 << 20, looks.append)

    def make() -> None:
        made.append(1)

    assert [decoded.get("window", make) for _ in range(3)] == [None] * 3
    assert (looks, len(made)) == ([False, True, True], 1)
