import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import InvalidRecord
from edgewater.synopses.hashing import DEFAULT_SEED, hash_values
from tests.refusals import refused

MASK = (1 << 64) - 1


def reference_mix(word: int) -> int:
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & MASK
    return word ^ word >> 31


def reference_text(data: bytes, seed: int, tag: int) -> int:
    """Computes the hash by the definition, one value at a time, with Python integers."""
    golden = 0x9E3779B97F4A7C15
    key = reference_mix((seed + tag * golden) & MASK)
    total = reference_mix((len(data) + golden) & MASK)
    for position in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * position : 8 * position + 8], "little")
        total += reference_mix((word + reference_mix((key + position * golden) & MASK)) & MASK)
    return reference_mix((total + key) & MASK)


def one(value: object, seed: int = DEFAULT_SEED) -> int:
    return int(hash_values(pa.array([value]), seed)[0])


# Never change these: every stored sketch depends on them.
GOLDEN = [
    (0, 0x77D4CBA99E04D2C4),
    (1, 0x5A229EB6904940A2),
    (-1, 0x0D7386FB074D9FBE),
    (1 << 62, 0xAB373EB0E48C4855),
    (0.0, 0x7EEAE568682700F8),
    (1.0, 0x1B3DCC83911FE648),
    (float("nan"), 0x810C264A7AEEBB04),
    (float("inf"), 0xA8F564FDE0DEA656),
    (True, 0x16A89D4D16A3139B),
    (False, 0x091009BD0C8945A7),
    ("", 0xEC77C0DCE4FED415),
    ("a", 0x72F0AD3CC7C61EE4),
    ("edgewater", 0xBBF360D0B099787F),
    ("日本", 0x8A76FEB9FBAEE887),
    ("x" * 200, 0x1BDA15753143A60D),
    (b"a", 0x3DE7C89EE7565551),
]


@pytest.mark.parametrize(("value", "expected"), GOLDEN, ids=[repr(v)[:12] for v, _ in GOLDEN])
def test_hashes_are_the_same_on_every_platform_and_in_every_release(value: object, expected: int) -> None:
    assert one(value) == expected


def test_hashes_of_strings_match_the_definition() -> None:
    texts = [
        "",
        "a",
        "abcdefg",
        "abcdefgh",
        "abcdefghi",
        "ä",
        "日本語テキスト",
        "x" * 127,
        "x" * 128,
        "y" * 129,
        "z" * 5000,
    ]
    expected = [reference_text(t.encode(), 7, 4) for t in texts]
    assert hash_values(pa.array(texts), 7).tolist() == expected
    assert hash_values(pa.array(texts, pa.large_string()), 7).tolist() == expected
    binary = [reference_text(t.encode(), 7, 5) for t in texts]
    assert hash_values(pa.array([t.encode() for t in texts]), 7).tolist() == binary


@given(st.lists(st.text(max_size=300), max_size=30), st.integers(0, MASK))
def test_hashes_of_any_strings_match_the_definition(texts: list[str], seed: int) -> None:
    expected = [reference_text(t.encode(), seed, 4) for t in texts]
    assert hash_values(pa.array(texts, pa.string()), seed).tolist() == expected


def test_a_slice_hashes_as_the_same_values_on_their_own() -> None:
    texts = pa.array([str(i) * (i % 40) for i in range(1000)])
    np.testing.assert_array_equal(hash_values(texts)[100:900], hash_values(texts.slice(100, 800)))
    np.testing.assert_array_equal(
        hash_values(texts), hash_values(pa.chunked_array([texts.slice(0, 7), texts.slice(7)]))
    )


def test_hashing_only_distinct_strings_gives_equal_hashes() -> None:
    long = [f"https://example.org/a/rather/long/path/to/some/page-{i % 50}" for i in range(6000)]
    plain = pa.array(long)
    singly = np.concatenate([hash_values(plain.slice(i, 1000)) for i in range(0, 6000, 1000)])
    np.testing.assert_array_equal(hash_values(plain), singly)
    np.testing.assert_array_equal(hash_values(plain.dictionary_encode()), singly)


def test_a_string_of_a_megabyte_among_short_ones_is_hashed() -> None:
    texts = ["a", "b" * (1 << 20), "c"]
    hashes = hash_values(pa.array(texts))
    assert len(set(hashes.tolist())) == 3
    assert hashes[0] == one("a") and hashes[2] == one("c")
    assert one("b" * (1 << 20) + "\0") != one("b" * (1 << 20))


def test_one_zero_and_one_nan() -> None:
    assert one(0.0) == one(-0.0)
    nans = np.array([0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000, 0x7FF4000000000000], np.uint64)
    with np.errstate(invalid="ignore"):
        assert len(set(hash_values(nans.view(np.float64)).tolist())) == 1
    assert one(float("inf")) != one(float("-inf"))


def test_types_hash_differently_and_widths_do_not() -> None:
    assert len({one(1), one(1.0), one(True), one("1"), one(b"1")}) == 5
    narrow = [np.array([-5], t) for t in (np.int8, np.int16, np.int32, np.int64)]
    assert len({int(hash_values(a)[0]) for a in narrow}) == 1
    assert hash_values(np.array([5], np.uint8))[0] == one(5)
    assert hash_values(np.array([0.5], np.float32))[0] == one(0.5)
    assert hash_values(np.array([MASK], np.uint64))[0] == one(-1), "integers count in two's complement"


def test_arrow_and_numpy_give_equal_hashes() -> None:
    for values in ([1, -2, 3], [0.5, -0.0, float("nan")], [True, False]):
        np.testing.assert_array_equal(hash_values(np.array(values)), hash_values(pa.array(values)))


def test_seeds_give_unrelated_hashes() -> None:
    x = np.arange(20_000)
    differing = np.bitwise_count(hash_values(x, 1) ^ hash_values(x, 2))
    assert abs(differing.mean() - 32) < 0.2  # sd of the mean is 4/√20000 = 0.03


@pytest.mark.parametrize(
    "values",
    [np.arange(1 << 16), np.arange(1 << 16) << 40, np.arange(1 << 16) * 1.0, np.arange(1 << 16) / 7],
    ids=["sequence", "high bits only", "whole floats", "fractions"],
)
def test_regular_inputs_spread_over_every_bit(values: np.ndarray) -> None:
    hashes = hash_values(values)
    assert len(np.unique(hashes)) == len(values), "a bijection per type"
    for bit in range(64):
        share = float((hashes >> np.uint64(bit) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 6 * 0.5 / 256, f"bit {bit}"  # 6 standard deviations: 1e-8 per bit


def test_each_input_bit_flips_half_of_the_output() -> None:
    x = np.random.default_rng(5).integers(0, 1 << 62, 2000)
    for bit in range(62):
        flipped = np.bitwise_count(hash_values(x) ^ hash_values(x ^ (1 << bit)))
        assert abs(flipped.mean() - 32) < 1, f"bit {bit}"


def test_nulls_and_other_types_are_refused() -> None:
    with refused(InvalidRecord, "values"):
        hash_values(pa.array([1, None]))
    with refused(InvalidRecord, "values"):
        hash_values(np.array([1j]))
    with refused(InvalidRecord, "values"):
        hash_values(pa.array([[1]]))


def test_an_empty_array_has_no_hashes() -> None:
    for kind in (pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.binary()):
        assert hash_values(pa.array([], kind)).shape == (0,)


def unmixed(words: np.ndarray) -> np.ndarray:
    """The inverse of `reference_mix`."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        shifted = words.copy()
        for _ in range(3):
            shifted = words ^ shifted >> np.uint64(shift)
        words = shifted * np.uint64(pow(factor, -1, 1 << 64))
    return words


def test_texts_that_collide_under_one_seed_do_not_under_another() -> None:
    """Two words of a text are chosen so that their mixed sum is equal. The finaliser alone would keep that."""
    golden, seed = 0x9E3779B97F4A7C15, 7
    key = reference_mix((seed + 4 * golden) & MASK)
    first = np.random.default_rng(0).integers(0, 128, (100_000, 8)).astype(np.uint8).view("<u8")[:, 0]
    keys = [np.uint64(reference_mix((key + position * golden) & MASK)) for position in (0, 1)]
    mixed = np.array([reference_mix(int(w)) for w in first + keys[0]], np.uint64)
    second = unmixed(np.uint64(12345) - mixed) - keys[1]
    pairs = np.stack([first, second], axis=1).astype("<u8").view(np.uint8)
    ascii_only = pairs[(pairs < 128).all(axis=1)]
    texts = pa.array([row.tobytes().decode() for row in ascii_only])
    assert len(texts) > 100
    assert len(set(hash_values(texts, seed).tolist())) == 1
    for other in (8, DEFAULT_SEED, MASK):
        assert len(set(hash_values(texts, other).tolist())) == len(texts)
