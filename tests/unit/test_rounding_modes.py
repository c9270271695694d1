"""Every rounding of every format: the oracle against gfloat and hand-made tables, the kernels against the oracle."""

import functools
import itertools
import math
from fractions import Fraction

import gfloat
import numpy as np
import pytest
from gfloat.formats import format_info_ocp_e8m0

from qsim import RandomStream
from qsim.codec import decode_scalar, encode, encode_scalar, encode_with_counts, pack
from qsim.codec.general import encode_flat
from qsim.codec.general_kernels import COUNTS, encode32_drawn, encode64_drawn, rules_of
from qsim.codec.oracle import encode_by_policy, round_magnitude
from qsim.codec.threads import threads
from qsim.conformance.codec import CodecSubject, check_codec, critical_values
from qsim.conformance.compare import assert_codes_equal
from qsim.errors import FormatError, UsageError
from qsim.formats import (
    E2M1FN,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E8M0FNU,
    FORMATS,
    POLICIES,
    FloatFormat,
    NanEncoding,
    Overflow,
    RoundMode,
)

STREAM = RandomStream(seed=0x123456789ABCDEF, step=7, layer=3, site=2, role=1)
INF, NAN = math.inf, math.nan
MODES = list(RoundMode)
CHANCELESS = [mode for mode in RoundMode if mode is not RoundMode.STOCHASTIC]
BY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
BY_FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)

GFLOAT = {
    RoundMode.TIES_TO_EVEN: gfloat.RoundMode.TiesToEven,
    RoundMode.TIES_TO_AWAY: gfloat.RoundMode.TiesToAway,
    RoundMode.TOWARD_ZERO: gfloat.RoundMode.TowardZero,
    RoundMode.UP: gfloat.RoundMode.TowardPositive,
    RoundMode.DOWN: gfloat.RoundMode.TowardNegative,
}

# What no format of the catalogue is: a sign without a zero, a zero without a sign, six bits of mantissa, none.
ODD_FORMATS = [
    FloatFormat(name="e4m3_no_zero", exponent_bits=4, mantissa_bits=3, bias=7, has_inf=False,
                nan=NanEncoding.ALL_ONES, has_zero=False),
    FloatFormat(name="ue5m3", exponent_bits=5, mantissa_bits=3, bias=15, has_inf=False, nan=NanEncoding.ALL_ONES,
                signed=False),
    FloatFormat(name="e1m6", exponent_bits=1, mantissa_bits=6, bias=0, has_inf=False, nan=NanEncoding.NONE),
    FloatFormat(name="e7m0", exponent_bits=7, mantissa_bits=0, bias=127, has_inf=False, nan=NanEncoding.NONE),
    FloatFormat(name="e4m3_no_nan", exponent_bits=4, mantissa_bits=3, bias=7, has_inf=False, nan=NanEncoding.NONE),
    FloatFormat(name="ue5m2_no_zero", exponent_bits=5, mantissa_bits=2, bias=127, has_inf=False,
                nan=NanEncoding.NONE, signed=False, has_zero=False),
]  # fmt: skip


@functools.cache
def probes(fmt):
    """float32 where a rounding can go wrong, and random patterns near the format's range."""
    rng = np.random.default_rng(5)
    top = int(np.float32(fmt.max).view(np.uint32)) >> 23
    span = top - max((int(np.float32(fmt.smallest_subnormal).view(np.uint32)) >> 23) - 2, 0)
    random = rng.integers(0, 2**32, 400, dtype=np.uint32) & np.uint32(0x807FFFFF)
    random |= (top + 1 - rng.integers(0, span + 2, 400, dtype=np.uint32)).astype(np.uint32) << np.uint32(23)
    return np.concatenate([critical_values(fmt), random.view(np.float32)])


@functools.cache
def float64_probes(fmt):
    """float64 one step from every value and midpoint, beyond the range of float32 on both sides, specials."""
    values = [fmt.magnitude(code) for code in range(fmt.max_code + 1)]
    points = np.array([*values, *((a + b) / 2 for a, b in itertools.pairwise(values)), 2 * fmt.max, 1.5 * fmt.max])
    x = np.concatenate([np.nextafter(points, np.inf), np.nextafter(points, 0), points * (1 + 2**-30)])
    extremes = [5e-324, 1e-300, 2.0**-150, 2.0**-128, 1e300, 2.0**128, 2.0**129, INF, NAN, 0.0]
    return np.concatenate([x, -x, extremes, np.negative(extremes)])


def by_oracle(x, fmt, policy, *, stream=STREAM):
    words = stream.words(len(x))
    codes = [encode_by_policy(float(v), fmt, policy, word=int(word)) for v, word in zip(x, words, strict=True)]
    return np.array(codes, np.uint8)


def with_mode(mode, policy="ocp", **choices):
    return POLICIES[policy].with_choices(rounding=mode, **choices)


def widened(x):
    with np.errstate(invalid="ignore"):  # numpy warns of signalling NaN
        return x.astype(np.float64)


def fast(x, fmt, policy):
    """Codes by the general kernels, whatever the policy."""
    codes = np.empty(x.size, np.uint8)
    stream = STREAM if policy.rounding is RoundMode.STOCHASTIC else None
    encode_flat(x, codes, fmt=fmt, policy=policy, stream=stream)
    return codes


# ---- the oracle against gfloat ------------------------------------------------------------------------------


def gfloat_info(fmt):
    """The format as gfloat describes it."""
    if not fmt.has_zero:
        return format_info_ocp_e8m0
    return gfloat.FormatInfo(
        name=fmt.name, k=fmt.bits, precision=fmt.mantissa_bits + 1, bias=fmt.bias, is_signed=True,
        domain=gfloat.Domain.Extended if fmt.has_inf else gfloat.Domain.Finite,
        has_nz=fmt.has_negative_zero,
        num_high_nans=len([code for code in fmt.nan_codes if code < fmt.sign_bit]),
        has_subnormals=True, is_twos_complement=False,
    )  # fmt: skip


def same_value(a, b):
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize("mode", GFLOAT, ids=lambda mode: mode.value)
@BY_FORMAT
def test_the_oracle_equals_gfloat_at_every_critical_value(fmt, mode):
    x = critical_values(fmt)
    x = x[~np.isnan(x)]
    if not fmt.has_zero:  # gfloat gives negatives and what is below the least value no meaning
        x = x[x >= fmt.smallest_subnormal]
    info = gfloat_info(fmt)
    beyond = x[np.abs(x) > fmt.max] if fmt.has_nan else x[:0]  # the two overflow rules differ nowhere else
    for overflow, numbers in ((Overflow.SATURATE, x), (Overflow.IEEE, beyond)):
        for v in numbers.tolist():
            expected = float(gfloat.round_float(info, v, GFLOAT[mode], sat=overflow is Overflow.SATURATE))
            code = encode_scalar(v, fmt, rounding=mode, overflow=overflow)
            assert same_value(expected, decode_scalar(code, fmt)), (v, overflow, code, expected)


@pytest.mark.parametrize("fmt", [E2M1FN, E4M3FNUZ, FORMATS["float6_e3m2fn"]], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_equals_gfloat_where_the_fraction_has_no_more_bits_than_the_word(fmt):
    """gfloat goes up iff fraction * 2^n + its bits >= 2^n, so its bits are 2^n - 1 less ours."""
    info, bits = gfloat_info(fmt), 3
    values = [Fraction(fmt.magnitude(code)) for code in range(fmt.max_code + 1)]
    values.append(2 * values[-1] - values[-2])
    for (a, b), k, ours in itertools.product(itertools.pairwise(values), range(2**bits), range(2**bits)):
        x = a + (b - a) * k / 2**bits
        code = encode_scalar(-x, fmt, rounding="stochastic", word=ours << 29 | 0x1FFFFFFF, random_bits=bits)
        theirs = 2**bits - 1 - ours
        expected = gfloat.round_float(
            info, -float(x), gfloat.RoundMode.Stochastic, sat=True, srbits=theirs, srnumbits=bits
        )
        assert float(expected) == decode_scalar(code, fmt), (x, ours)


# ---- by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "codes"),
    [  # nearest even, nearest away, toward zero, up, down, odd
        (1.0625, [0x38, 0x39, 0x38, 0x39, 0x38, 0x39]),  # the tie of 1.0 and 1.125
        (1.1875, [0x3A, 0x3A, 0x39, 0x3A, 0x39, 0x39]),  # the tie of 1.125 and 1.25
        (-1.0625, [0xB8, 0xB9, 0xB8, 0xB8, 0xB9, 0xB9]),
        (1.0625 - 2**-40, [0x38, 0x38, 0x38, 0x39, 0x38, 0x39]),
        (1.125 + 2**-40, [0x39, 0x39, 0x39, 0x3A, 0x39, 0x39]),
        (1.125, [0x39] * 6),
        (15.5, [0x58, 0x58, 0x57, 0x58, 0x57, 0x57]),  # across a binade
        (2**-10, [0x00, 0x01, 0x00, 0x01, 0x00, 0x01]),
        (1e-300, [0x00, 0x00, 0x00, 0x01, 0x00, 0x01]),
        (-1e-300, [0x80, 0x80, 0x80, 0x80, 0x81, 0x81]),
        (2**-6 - 2**-20, [0x08, 0x08, 0x07, 0x08, 0x07, 0x07]),  # the largest subnormal is 07
        (464, [0x7E, 0x7F, 0x7E, 0x7F, 0x7E, 0x7F]),  # a tie of max and the first overflow, which is odd
        (448.00001, [0x7E, 0x7E, 0x7E, 0x7F, 0x7E, 0x7F]),
        (1e30, [0x7F, 0x7F, 0x7E, 0x7F, 0x7E, 0x7F]),
        (-1e30, [0xFF, 0xFF, 0xFE, 0xFE, 0xFF, 0xFF]),
    ],
)
def test_e4m3_in_every_mode_by_hand(x, codes):
    found = [encode_scalar(x, E4M3FN, rounding=mode, overflow="ieee") for mode in CHANCELESS]
    assert codes == found
    assert codes == [int(encode(x, E4M3FN, rounding=mode, overflow="ieee")) for mode in CHANCELESS]


@pytest.mark.parametrize(
    ("mode", "ieee", "saturating"),
    [
        ("nearest_even", [0x7C, 0xFC], [0x7B, 0xFB]),
        ("nearest_away", [0x7C, 0xFC], [0x7B, 0xFB]),
        ("toward_zero", [0x7B, 0xFB], [0x7B, 0xFB]),
        ("up", [0x7C, 0xFB], [0x7B, 0xFB]),
        ("down", [0x7B, 0xFC], [0x7B, 0xFB]),
        ("odd", [0x7C, 0xFC], [0x7B, 0xFB]),
    ],
)
def test_directed_overflow_follows_ieee_754_section_7_4(mode, ieee, saturating):
    for x in (65536.0, 1e30, 1e300):
        assert ieee == encode([x, -x], E5M2, rounding=mode, overflow="ieee").tolist()
        assert saturating == encode([x, -x], E5M2, rounding=mode).tolist()
    # Inf is no rounding: it stays itself whatever the mode.
    assert encode([INF, -INF], E5M2, rounding=mode, overflow="ieee").tolist() == [0x7C, 0xFC]
    assert encode([INF, -INF], E5M2, rounding=mode).tolist() == [0x7B, 0xFB]


def test_the_overflow_threshold_of_each_mode_is_where_the_rounded_value_leaves_the_format():
    x = [58000.0, 61439.0, 61440.0, 65535.0]  # max is 57344, the next value would be 65536
    rows = {mode: encode(x, E5M2, rounding=mode, overflow="ieee").tolist() for mode in CHANCELESS}
    assert rows == {
        RoundMode.TIES_TO_EVEN: [0x7B, 0x7B, 0x7C, 0x7C],
        RoundMode.TIES_TO_AWAY: [0x7B, 0x7B, 0x7C, 0x7C],
        RoundMode.TOWARD_ZERO: [0x7B] * 4,
        RoundMode.UP: [0x7C] * 4,
        RoundMode.DOWN: [0x7B] * 4,
        RoundMode.TO_ODD: [0x7B] * 4,  # max is odd
    }


def test_e8m0_rounds_by_its_codes():
    x = np.array([3.0, 0.75, 1.5, 1.0000001, 0.0, 2.0**-127 * (1 + 2**-22), 2.0**-130, -1.0], np.float32)
    rows = {mode: encode(x, E8M0FNU, rounding=mode).tolist() for mode in CHANCELESS}
    assert rows == {
        RoundMode.TIES_TO_EVEN: [0x80, 0x7E, 0x80, 0x7F, 0x00, 0x00, 0x00, 0xFF],
        RoundMode.TIES_TO_AWAY: [0x81, 0x7F, 0x80, 0x7F, 0x00, 0x00, 0x00, 0xFF],
        RoundMode.TOWARD_ZERO: [0x80, 0x7E, 0x7F, 0x7F, 0x00, 0x00, 0x00, 0xFF],
        RoundMode.UP: [0x81, 0x7F, 0x80, 0x80, 0x00, 0x01, 0x00, 0xFF],
        RoundMode.DOWN: [0x80, 0x7E, 0x7F, 0x7F, 0x00, 0x00, 0x00, 0xFF],
        RoundMode.TO_ODD: [0x81, 0x7F, 0x7F, 0x7F, 0x00, 0x01, 0x00, 0xFF],
    }


@pytest.mark.parametrize(
    ("mode", "codes"), [("up", [0x01, 0x00]), ("down", [0x00, 0x81]), ("odd", [0x01, 0x81]), ("toward_zero", [0, 0])]
)
def test_without_minus_zero_a_negative_that_goes_to_zero_is_plus_zero(mode, codes):
    assert codes == encode([1e-30, -1e-30], E4M3FNUZ, rounding=mode).tolist()


def test_rounding_to_odd_is_safe_to_round_once_more():
    """E5M6-like steps: odd into six bits of mantissa, then nearest into E1M3-like ones, is nearest at once."""
    wide = FloatFormat(name="w", exponent_bits=2, mantissa_bits=5, bias=1, has_inf=False, nan=NanEncoding.NONE)
    narrow = FORMATS["float6_e2m3fn"]
    x = np.random.default_rng(9).uniform(-7.7, 7.7, 4000)
    x = np.concatenate([x, np.arange(-61, 62) / 8, np.arange(-61, 62) / 8 + 2.0**-20])
    odd = encode(x, wide, rounding="odd")
    through = encode([decode_scalar(int(code), wide) for code in odd], narrow)
    assert_codes_equal(encode(x, narrow), through, narrow, inputs=x)
    twice = encode([decode_scalar(int(code), wide) for code in encode(x, wide)], narrow)
    assert (twice != through).sum() > 50  # nearest and nearest again is another thing


# ---- stochastic rounding ------------------------------------------------------------------------------------


def drawn_by_words(x, fmt, words, *, bits, kernel=encode32_drawn, policy="ocp"):
    """Codes by a kernel under given words."""
    word, floating = (np.uint32, np.float32) if kernel is encode32_drawn else (np.uint64, np.float64)
    rules = rules_of(fmt, with_mode(RoundMode.STOCHASTIC, policy, random_bits=bits), word)
    codes = np.empty(len(words), np.uint8)
    numbers = np.broadcast_to(np.asarray(x, floating), codes.shape)
    kernel(np.ascontiguousarray(numbers).view(word), words, rules, codes, np.empty(COUNTS, np.int64))
    return codes.tolist()


def every_word(bits):
    """All words of ``bits`` bits, with noise below that must not count."""
    return np.arange(2**bits, dtype=np.uint32) << np.uint32(32 - bits) | np.uint32((1 << (32 - bits)) - 1)


BOTH_KERNELS = pytest.mark.parametrize("kernel", [encode32_drawn, encode64_drawn], ids=["float32", "float64"])


@BOTH_KERNELS
def test_the_mean_over_all_words_is_the_fraction_cut_to_8_bits(kernel):
    codes = drawn_by_words(0.1, E2M1FN, every_word(8), bits=8, kernel=kernel)
    assert math.floor(0.2 * 256) == sum(codes) == 51
    assert sum(decode_scalar(code, E2M1FN) for code in codes) / 256 == 0.099609375
    scalars = [encode_scalar(0.1, E2M1FN, rounding="sr", word=int(w), random_bits=8) for w in every_word(8)]
    assert scalars == codes


@BOTH_KERNELS
@pytest.mark.parametrize("bits", [1, 2, 8, 12])
@pytest.mark.parametrize(
    ("x", "fmt", "low", "ups"),
    [
        (1.125 * 2**-14, E5M2, 0x04, Fraction(1, 2)),
        (-1.125 * 2**-14, E5M2, 0x84, Fraction(1, 2)),
        (2.0**-10, E4M3FN, 0x00, Fraction(1, 2)),  # to the least subnormal
        (7.5 * 2.0**-9, E4M3FN, 0x07, Fraction(1, 2)),  # from the subnormals to the normals
        (15.25, E4M3FN, 0x57, Fraction(1, 4)),  # across a binade
        (3.0, E8M0FNU, 0x80, Fraction(1, 2)),
        (1.75, E8M0FNU, 0x7F, Fraction(3, 4)),
        (1.125, E4M3FN, 0x39, Fraction(0)),  # an exact value never moves
        (0.0, E4M3FN, 0x00, Fraction(0)),
        (2.0**-140, E8M0FNU, 0x00, Fraction(0)),
    ],
)
def test_each_code_comes_as_often_as_its_fraction_says(x, fmt, low, ups, bits, kernel):
    codes = drawn_by_words(x, fmt, every_word(bits), bits=bits, kernel=kernel)
    up = math.floor(ups * 2**bits)
    assert [low + 1] * up + [low] * (2**bits - up) == codes  # the smaller words go up


@BOTH_KERNELS
def test_at_max_the_words_that_go_up_overflow(kernel):
    half = [0x7F] * 8 + [0x7E] * 8
    assert half == drawn_by_words(464, E4M3FN, every_word(4), bits=4, kernel=kernel, policy="cuda_nosat")
    assert [0x7E] * 16 == drawn_by_words(464, E4M3FN, every_word(4), bits=4, kernel=kernel)
    assert [0x7C] * 12 + [0x7B] * 4 == drawn_by_words(
        57344 + 6144, E5M2, every_word(4), bits=4, kernel=kernel, policy="torch"
    )
    assert [0xF] * 4 == drawn_by_words(-7, E2M1FN, every_word(2), bits=2, kernel=kernel)
    assert [0x7F] * 4 == drawn_by_words(1e30, E4M3FN, every_word(2), bits=2, kernel=kernel, policy="cuda_nosat")


def test_a_float64_fraction_is_used_to_its_last_bit():
    """Three quarters of 2^-32 beyond k / 2^32 needs more bits than float32 has."""
    x = 1 + (12345 * 2.0**-32 + 0.75 * 2.0**-32) / 8  # between 1.0 and 1.125
    words = np.array([0, 12344, 12345, 2**32 - 1], np.uint32)
    assert [0x39, 0x39, 0x38, 0x38] == drawn_by_words(x, E4M3FN, words, bits=32, kernel=encode64_drawn)
    almost = 1 + (1 - 2.0**-33) / 8
    words = np.array([2**32 - 2, 2**32 - 1], np.uint32)
    assert [0x39, 0x38] == drawn_by_words(almost, E4M3FN, words, bits=32, kernel=encode64_drawn)
    subnormal = 2.0**-16 * (1 + 2**-23)  # (2^23 + 1) * 4 units of 2^-32 of the least value
    words = np.array([2**25 + 3, 2**25 + 4], np.uint32)
    for kernel in (encode32_drawn, encode64_drawn):
        assert [1, 0] == drawn_by_words(subnormal, E4M3FN, words, bits=32, kernel=kernel)
    tiny = 2.0**-9 * 2.0**-31  # two units of 2^-32 of the least value
    words = np.array([0, 1, 2], np.uint32)
    assert [1, 1, 0] == drawn_by_words(tiny, E4M3FN, words, bits=32, kernel=encode64_drawn)
    assert [1, 1, 0] == drawn_by_words(tiny, E4M3FN, words, bits=32, kernel=encode32_drawn)
    assert [0, 0, 0] == drawn_by_words(tiny / 4, E4M3FN, words, bits=32, kernel=encode32_drawn)


def test_element_i_takes_word_i():
    x = np.random.default_rng(1).standard_normal((7, 11))
    expected = [encode_scalar(v, E4M3FN, rounding="sr", word=STREAM.word(i)) for i, v in enumerate(x.flat)]
    assert np.reshape(expected, x.shape).tolist() == encode(x, E4M3FN, rounding="sr", stream=STREAM).tolist()


def test_the_same_key_gives_the_same_bits_and_another_key_others():
    x = np.random.default_rng(2).standard_normal(4096).astype(np.float32)
    codes = encode(x, E5M2, rounding="stochastic", stream=STREAM)
    assert codes.tolist() == encode(x, E5M2, rounding="stochastic", stream=STREAM).tolist()
    for field, value in {"seed": 1, "step": 8, "microbatch": 1, "worker": 1, "layer": 4, "site": 3, "role": 2}.items():
        other = encode(x, E5M2, rounding="stochastic", stream=STREAM._replace(**{field: value}))
        assert 1000 < (codes != other).sum() < 2000, field  # a third of the pairs of uniform draws differ


def test_codes_depend_on_neither_layout_nor_threads_nor_chunks():
    rng = np.random.default_rng(3)
    x = rng.standard_normal(1_100_003).astype(np.float32)
    with threads(1):
        alone, counts = encode_with_counts(x, E4M3FN, rounding="sr", stream=STREAM)
    for count in (2, 3):
        with threads(count):
            codes, again = encode_with_counts(x, E4M3FN, rounding="sr", stream=STREAM)
        assert_codes_equal(alone, codes, E4M3FN)
        assert int(counts.flushed) == int(again.flushed)
    for start in (0, 65_534, 131_071, 550_000, 1_099_990):  # where chunks and spans meet, and at the end
        part = range(start, min(start + 13, x.size))
        expected = [encode_scalar(x[i], E4M3FN, rounding="sr", word=STREAM.word(i)) for i in part]
        assert expected == alone[part.start : part.stop].tolist()
    view = x[: 6 * 1000].reshape(30, 200)[::-2, ::3]
    expected = encode(view.copy(), E4M3FN, rounding="sr", stream=STREAM)
    assert_codes_equal(expected, encode(view, E4M3FN, rounding="sr", stream=STREAM), E4M3FN)
    assert_codes_equal(expected, encode(np.asfortranarray(view), E4M3FN, rounding="sr", stream=STREAM), E4M3FN)
    out = np.zeros((40, 200), np.uint8)[::2, 1::2][: view.shape[0], : view.shape[1]]
    assert_codes_equal(expected, encode(view, E4M3FN, rounding="sr", stream=STREAM, out=out).copy(), E4M3FN)
    packed = encode(view, E2M1FN, rounding="sr", stream=STREAM, packed=True)
    assert pack(encode(view, E2M1FN, rounding="sr", stream=STREAM)).tolist() == packed.tolist()


def test_a_stream_comes_with_stochastic_rounding_and_with_no_other():
    with pytest.raises(UsageError, match="rounds stochastically and no stream was given"):
        encode([1.0], E4M3FN, rounding="stochastic")
    with pytest.raises(UsageError, match="policy ocp rounds by 'nearest_even': leave it out"):
        encode([1.0], E4M3FN, stream=STREAM)
    with pytest.raises(UsageError, match="layer 4096 does not fit its 12 bits"):
        encode([1.0], E4M3FN, rounding="sr", stream=RandomStream(0, layer=4096))
    with pytest.raises(FormatError, match="word 4294967296 of 24 bits"):
        encode_scalar(1.0, E4M3FN, rounding="sr", word=2**32)


def test_a_refused_overflow_is_found_where_its_own_word_made_it():
    x = np.full(300_000, 464.0, np.float32)
    policy = with_mode(RoundMode.STOCHASTIC, overflow="raise", random_bits=1)
    up = STREAM.words(x.size) >> 31 == 0
    first = int(np.argmax(up))
    with pytest.raises(FormatError, match=rf"^x\[{first}\] is 464\.0: it rounds beyond 448"):
        encode(x, E4M3FN, policy=policy, stream=STREAM)
    x[:first] = np.nan
    x[up] = 1.0
    assert (encode(x[first:-3], E4M3FN, policy="ocp", overflow="raise") <= 0x7E).all()


# ---- the kernels against the oracle -------------------------------------------------------------------------


@BY_MODE
@BY_FORMAT
def test_the_kernels_equal_the_oracle_in_every_mode(fmt, mode):
    x, policy = probes(fmt), with_mode(mode)
    expected = by_oracle(x, fmt, policy)
    assert_codes_equal(expected, fast(x, fmt, policy), fmt, inputs=x)
    assert_codes_equal(expected, fast(widened(x), fmt, policy), fmt, inputs=x)
    special = x[~(np.abs(x) <= fmt.max)]  # policies differ where it overflows and at NaN
    for name in POLICIES:
        policy = with_mode(mode, name)
        assert_codes_equal(by_oracle(special, fmt, policy), fast(special, fmt, policy), fmt, inputs=special)


@BY_MODE
@BY_FORMAT
def test_float64_is_rounded_once_in_every_mode(fmt, mode):
    x = float64_probes(fmt)
    for policy in (with_mode(mode), with_mode(mode, "cuda_nosat")):
        stream = STREAM if mode is RoundMode.STOCHASTIC else None
        expected = by_oracle(x, fmt, policy)
        assert_codes_equal(expected, encode(x, fmt, policy=policy, stream=stream), fmt, inputs=x)


@BY_MODE
@pytest.mark.parametrize("fmt", ODD_FORMATS, ids=lambda fmt: fmt.name)
def test_formats_outside_the_catalogue_need_no_code_of_their_own(fmt, mode):
    stream = STREAM if mode is RoundMode.STOCHASTIC else None
    for x in (probes(fmt), float64_probes(fmt)):
        policy = with_mode(mode, "ml_dtypes")
        expected = by_oracle(x, fmt, policy)
        assert_codes_equal(expected, encode(x, fmt, policy=policy, stream=stream), fmt, inputs=x)


@pytest.mark.parametrize("bits", [1, 2, 8, 31, 32])
@pytest.mark.parametrize("fmt", [E4M3FN, E2M1FN, E8M0FNU], ids=lambda fmt: fmt.name)
def test_every_number_of_random_bits_equals_the_oracle(fmt, bits):
    policy = with_mode(RoundMode.STOCHASTIC, random_bits=bits)
    for x in (probes(fmt), float64_probes(fmt)):
        assert_codes_equal(by_oracle(x, fmt, policy), fast(x, fmt, policy), fmt, inputs=x)


@BY_MODE
def test_integers_are_rounded_once_in_every_mode(mode):
    stream = STREAM if mode is RoundMode.STOCHASTIC else None
    x = np.array([2**62, 2**62 + 1, 2**62 - 1, 3 << 61, (3 << 61) - 1, 2**53 + 1, 2**63 - 1, 17, 0], np.int64)
    for fmt in (E8M0FNU, E4M3FN):
        words = STREAM.words(x.size).tolist()
        expected = [encode_scalar(v, fmt, rounding=mode, word=w) for v, w in zip(x, words, strict=True)]
        assert expected == encode(x, fmt, rounding=mode, stream=stream).tolist()


@BY_MODE
@BY_FORMAT
def test_counts_equal_those_of_the_definition(fmt, mode):
    x = np.concatenate([widened(probes(fmt)), float64_probes(fmt)])
    stream = STREAM if mode is RoundMode.STOCHASTIC else None
    words = STREAM.words(x.size).tolist()
    saturated = flushed = 0
    for v, word in zip(x.tolist(), words, strict=True):
        if math.isfinite(v) and (fmt.signed or v >= 0):
            code = round_magnitude(abs(Fraction(v)), fmt, rounding=mode, negative=v < 0, word=word)
            saturated += code > fmt.max_code
            flushed += fmt.has_zero and code == 0 and v != 0
    _, counts = encode_with_counts(x, fmt, rounding=mode, stream=stream)
    expected = (saturated, flushed, int(np.isnan(x).sum()), int(np.isinf(x).sum()))
    assert expected == tuple(int(n) for n in (counts.saturated, counts.flushed, counts.nan, counts.inf))


@BY_MODE
def test_the_conformance_suite_takes_every_rounding_and_what_is_refused_aside(mode):
    stream = STREAM if mode is RoundMode.STOCHASTIC else None
    for fmt, refused in ((E4M3FN, False), (E5M2, True), (E8M0FNU, True)):
        policy = with_mode(mode, overflow="raise", nan="raise") if refused else with_mode(mode)
        subject = CodecSubject(
            name=policy.name, fmt=fmt, policy=policy, stream=stream,
            encode=functools.partial(encode, fmt=fmt, policy=policy, stream=stream),
        )  # fmt: skip
        assert (check_codec(subject) < critical_values(fmt).size) == refused
