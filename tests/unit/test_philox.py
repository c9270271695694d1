"""Random words against the published vectors, and the layout of key and counter field by field."""

import hashlib

import numpy as np
import pytest

from qsim.codec.general_kernels import fill_words
from qsim.errors import UsageError
from qsim.philox import Purpose, RandomStream, philox4x32, random_bell, random_order, random_words
from qsim.quant import OpId

ONES = 0xFFFFFFFF
PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)


def philox(counter, key):
    return philox4x32(np.array(counter, np.uint32), key)


@pytest.mark.parametrize("field", ["seed", "step", "microbatch", "worker", "layer", "site", "role"])
@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint32, np.int64])
def test_a_narrow_numpy_integer_names_the_same_stream(field, kind):
    plain = RandomStream(**{"seed": 1, field: 5}).words(3).tolist()
    assert plain == RandomStream(**{"seed": 1, field: kind(5)}).words(3).tolist()
    assert plain != RandomStream(seed=1).words(3).tolist()


@pytest.mark.parametrize("bad", [{"seed": 1.5}, {"seed": "a"}, {"seed": 1, "layer": 1.0}])
def test_a_field_that_is_no_integer_is_refused(bad):
    with pytest.raises(UsageError, match="is no integer"):
        RandomStream(**bad).words(1)


# ---- the generator --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI_COUNTER, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_published_known_answers_come_out(counter, key, expected):
    assert expected == tuple(int(word) for word in philox(counter, key))


def test_a_block_of_counters_gives_what_each_gives_alone():
    counters = np.array([PI_COUNTER, (0,) * 4, (1, 2, 3, 4)], np.uint32)
    together = philox4x32(counters, PI_KEY)
    assert together.dtype == np.uint32
    assert [philox(c, PI_KEY).tolist() for c in counters] == together.tolist()


def test_a_scalar_philox_of_python_integers_agrees_on_random_counters():
    """The round written out with unbounded integers: no uint64 wrap can hide in it."""
    rng = np.random.default_rng(3)
    counters = rng.integers(0, 2**32, (50, 4), dtype=np.uint32)
    for counter in counters:
        c, k = [int(v) for v in counter], [0xDEADBEEF, 0x12345678]
        for _ in range(10):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & ONES, (p0 >> 32) ^ c[3] ^ k[1], p0 & ONES]
            k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
        assert c == philox(counter, (0xDEADBEEF, 0x12345678)).tolist()


# ---- key and counter ------------------------------------------------------------------------------------

BASE = {"step": 5, "microbatch": 6, "worker": 7, "layer": 8, "site": 9, "role": 10}
SEED = 0x0123456789ABCDEF
KEY = (0x89ABCDEF, 0x01234567)


def counter_of(block, *, purpose=Purpose.ROUNDING, **fields):
    f = {**BASE, **fields}
    packed = purpose * 2**24 + f["layer"] * 2**12 + f["site"] * 2**8 + f["role"]
    return (block, f["step"], f["microbatch"] * 2**16 + f["worker"], packed)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"step": 2**32 - 1},
        {"microbatch": 0xFFFF},
        {"worker": 0xFFFF},
        {"layer": 0xFFF},
        {"site": 0xF},
        {"role": 0xFF},
        dict.fromkeys(BASE, 0),
    ],
    ids=lambda fields: "-".join(fields) if len(fields) < 2 else "all zero",
)
def test_every_field_lies_where_the_design_says(fields):
    expected = [philox(counter_of(block, **fields), KEY) for block in range(3)]
    words = random_words(SEED, Purpose.ROUNDING, count=12, **{**BASE, **fields})
    assert np.concatenate(expected).tolist() == words.tolist()


@pytest.mark.parametrize("purpose", list(Purpose))
def test_the_purpose_is_the_high_byte_of_the_last_word(purpose):
    expected = philox(counter_of(0, purpose=purpose), KEY)
    assert expected.tolist() == random_words(SEED, purpose, count=4, **BASE).tolist()


def test_purposes_have_values_of_their_own():
    assert len(set(Purpose)) == len(Purpose.__members__)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 100])
def test_fewer_words_are_a_prefix_of_more(count):
    words = random_words(1, Purpose.ROWS, count=count, step=3)
    assert words.shape == (count,)
    assert words.tolist() == random_words(1, Purpose.ROWS, count=count + 1, step=3)[:count].tolist()


@pytest.mark.parametrize(
    ("field", "bits"), [("step", 32), ("microbatch", 16), ("worker", 16), ("layer", 12), ("site", 4), ("role", 8)]
)
def test_a_field_that_does_not_fit_is_an_error_that_names_it(field, bits):
    for value in (1 << bits, -1):
        with pytest.raises(UsageError, match=f"^{field} {value} does not fit its {bits} bits"):
            random_words(0, Purpose.ROWS, count=1, **{field: value})
    random_words(0, Purpose.ROWS, count=1, **{field: (1 << bits) - 1})


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_an_error(seed):
    with pytest.raises(UsageError, match=f"seed {seed} is outside"):
        random_words(seed, Purpose.ROWS, count=1)


@pytest.mark.parametrize("count", [-1, 2**34 + 1])
def test_a_count_beyond_the_block_counter_is_an_error(count):
    with pytest.raises(UsageError, match=f"count {count} is outside"):
        random_words(0, Purpose.ROWS, count=count)


def test_the_largest_seed_fills_both_key_words():
    expected = philox((0, 0, 0, Purpose.ROWS * 2**24), (ONES, ONES))
    assert expected.tolist() == random_words(2**64 - 1, Purpose.ROWS, count=4).tolist()


# ---- streams and operations -----------------------------------------------------------------------------


def test_a_stream_is_its_key_and_the_upper_three_words_of_its_counter():
    stream = RandomStream(SEED, **BASE)
    assert stream.key() == KEY
    assert stream.counter() == counter_of(0)[1:] == (5, 0x00060007, 0x0400890A)
    expected = [int(word) for block in range(3) for word in philox(counter_of(block), KEY)]
    assert expected == stream.words(12).tolist() == [stream.word(e) for e in range(12)]
    assert random_words(SEED, Purpose.ROUNDING, count=7, **BASE).tolist() == stream.words(7).tolist()


def test_the_last_word_of_a_stream_is_the_fourth_of_the_last_block():
    assert int(philox(counter_of(ONES), KEY)[3]) == RandomStream(SEED, **BASE).word(2**34 - 1)
    for element in (-1, 2**34):
        with pytest.raises(UsageError, match=f"element {element} is outside"):
            RandomStream(SEED).word(element)


@pytest.mark.parametrize("purpose", [Purpose.ROUNDING, Purpose.HADAMARD])
def test_an_operation_has_the_stream_of_its_fields(purpose):
    op = OpId(logical_step=5, microbatch=6, worker_id=7, layer_id=8, site=9, role_id=10)
    stream = op.stream(SEED, purpose)
    assert (stream.key(), stream.counter()) == (KEY, counter_of(0, purpose=purpose)[1:])
    assert op._replace(visit=3).stream(SEED, purpose) == stream  # a recompute draws the words of the forward
    others = [op._replace(**{field: 1}).stream(SEED, purpose) for field in op._fields[:-1]]
    assert len({stream, *others}) == 7


def test_the_words_of_an_operation_are_known():
    words = OpId(logical_step=1, layer_id=2, role_id=1).stream(2024).words(4)
    assert [0x2AC523AD, 0x9EE87ED0, 0xD9011C4A, 0x230A53B1] == words.tolist()


def test_a_field_of_an_operation_that_does_not_fit_is_named():
    with pytest.raises(UsageError, match=r"^layer 4096 does not fit its 12 bits"):
        OpId(0, layer_id=4096).stream(0).words(1)


# ---- the same words in Numba ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key"), [((0,) * 4, (0, 0)), ((ONES,) * 4, (ONES, ONES)), (PI_COUNTER, PI_KEY)], ids=["0", "1", "pi"]
)
def test_the_kernel_gives_the_published_known_answers(counter, key):
    words = np.empty(4, np.uint32)
    fill_words(np.array([*key, *counter[1:]], np.uint32), counter[0], words)
    assert philox(counter, key).tolist() == words.tolist()


@pytest.mark.parametrize("first", [0, 1, 1000, 2**32 - 64])
def test_the_kernel_gives_the_words_of_the_stream_from_any_block(first):
    rng = np.random.default_rng(first)
    stream = rng.integers(0, 2**32, 5, dtype=np.uint32)
    blocks = np.arange(first, first + 64).astype(np.uint32)
    counters = np.stack([blocks, *(np.full(64, word, np.uint32) for word in stream[2:])], axis=-1)
    words = np.empty(256, np.uint32)
    fill_words(stream, first, words)
    assert philox(counters, tuple(int(k) for k in stream[:2])).reshape(-1).tolist() == words.tolist()


# ---- what is made of the words --------------------------------------------------------------------------


def test_bell_is_the_scaled_sum_of_four_words():
    words = random_words(9, Purpose.WEIGHTS, count=4 * 6, layer=2, site=1).astype(object).reshape(6, 4)
    exact = [(int(sum(row)) - 2 * (2**32 - 1)) / float(np.sqrt(2.0**64 / 3)) for row in words]
    expected = np.array(exact, np.float64).astype(np.float32)
    actual = random_bell(9, Purpose.WEIGHTS, (2, 3), layer=2, site=1)
    assert actual.shape == (2, 3)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(expected.view(np.uint32), actual.reshape(-1).view(np.uint32))


def test_bell_has_mean_0_variance_1_and_its_bound():
    """Irwin-Hall of four: kurtosis 2.7, so the variance of n values strays by sqrt(1.7 / n)."""
    bell = random_bell(0, Purpose.WEIGHTS, (400, 500)).astype(np.float64)
    assert abs(bell.mean()) < 4 / np.sqrt(bell.size)
    assert abs(bell.var() - 1) < 4 * np.sqrt(1.7 / bell.size)
    assert abs((bell**4).mean() - 2.7) < 0.05
    assert np.abs(bell).max() < 3.47


def test_bell_reproduces_to_the_bit():
    bell = random_bell(42, Purpose.WEIGHTS, (64, 32), layer=3, site=2)
    digest = hashlib.sha256(bell.astype("<f4").tobytes()).hexdigest()
    assert digest == "c57790f8291204333ed32fec2da0a7eccc2d63a8dbc70ab6ebcd891b6f4004d2"


def test_order_is_a_permutation_that_sorts_the_words():
    words = random_words(4, Purpose.ORDER, count=257)
    order = random_order(4, Purpose.ORDER, 257)
    assert list(range(257)) == sorted(order.tolist())
    assert sorted(words.tolist()) == words[order].tolist()
    assert order.tolist() != random_order(5, Purpose.ORDER, 257).tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 24])
def test_order_is_a_permutation_at_small_counts(count):
    assert list(range(count)) == sorted(random_order(11, Purpose.ORDER, count).tolist())
