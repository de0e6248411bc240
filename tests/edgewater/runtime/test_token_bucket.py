from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgewater.runtime.token_bucket import TokenBucket


@given(
    rate=st.integers(100, 1_000_000),
    burst=st.integers(0, 1_000_000),
    sizes=st.lists(st.integers(1, 1 << 18), min_size=1, max_size=50),
    pauses=st.lists(st.floats(0, 30), min_size=50, max_size=50),
)
def test_over_any_time_the_limit_is_exceeded_by_one_message_at_most(
    rate: int, burst: int, sizes: list[int], pauses: list[float]
) -> None:
    bucket, now, sent = TokenBucket(rate, 0.0, burst), 0.0, []
    for size, pause in zip(sizes, pauses, strict=False):
        now += pause
        now += bucket.delay_s(now)
        bucket.consume(size, now)
        sent.append((now, size))
    for i, (began, _) in enumerate(sent):
        for j, (ended, size) in enumerate(sent[i:], i):
            allowed = burst + rate * (ended - began)
            assert sum(s for _, s in sent[i:j]) <= allowed * (1 + 1e-9) + 1e-3, f"and one of {size}"
    busy = max(0, sum(sizes[:-1]) - burst) / rate
    assert now <= busy + sum(pauses[: len(sizes)]) + 1e-3, "no capacity is lost"
