"""The oracle against values worked out by hand and by other libraries (facts of the project)."""

import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from qsim.codec.oracle import decode_scalar, encode_by_codes, encode_scalar
from qsim.errors import FormatError
from qsim.formats import (
    E2M1FN,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0FNU,
    FORMATS,
    POLICIES,
    MissingNan,
    NanPolicy,
    Overflow,
)

INF, NAN = math.inf, math.nan
NEGATIVE_NAN = math.copysign(NAN, -1.0)


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (-431.99999999999994, 0xFD),
        (1.0625 + 2**-40, 0x39),
        (19 - 2**-40, 0x59),
        (2**-10 + 2**-60, 0x01),
        (1.0625001, 0x39),
        (400.1, 0x7D),
        (272.1, 0x79),
        (400.199585, 0x7D),
        (272.156555, 0x79),
        (136.002075, 0x71),
        (Fraction(17, 16) + Fraction(1, 10**40), 0x39),
        (Fraction(17, 16), 0x38),
        (np.float32(1.0625), 0x38),
        (np.int64(-17), 0xD8),
    ],
)
def test_a_value_is_rounded_once(x, code):
    assert code == encode_scalar(x, E4M3FN)


@pytest.mark.parametrize(
    ("overflow", "codes"),
    [
        (Overflow.IEEE, [0x7F, 0x7E, 0x7E, 0x7F, 0xFF]),
        (Overflow.SATURATE, [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]),
    ],
)
def test_e4m3_at_its_edge(overflow, codes):
    assert codes == [encode_scalar(x, E4M3FN, overflow=overflow) for x in (1000, 448, 464, 465, -1000)]


def test_464_is_the_last_that_rounds_to_max_in_e4m3():
    after = np.uint32(0x43E80001).view(np.float32)
    assert encode_scalar(464.0, E4M3FN, overflow=Overflow.IEEE) == 0x7E
    assert encode_scalar(after, E4M3FN, overflow=Overflow.IEEE) == 0x7F


@pytest.mark.parametrize(
    ("x", "saturating", "ieee"),
    [(61440.0, 0x7B, 0x7C), (61439.99, 0x7B, 0x7B), (58000, 0x7B, 0x7B), (1e30, 0x7B, 0x7C)],
)
def test_e5m2_at_its_edge(x, saturating, ieee):
    assert saturating == encode_scalar(x, E5M2)
    assert ieee == encode_scalar(x, E5M2, overflow=Overflow.IEEE)


@pytest.mark.parametrize(
    ("x", "fmt", "code"),
    [
        (4.25, E4M3FN, 0x48),
        (232.03683, E4M3FN, 0x77),
        (-1.25, E2M1FN, 0xA),
        (0.25, E2M1FN, 0),
        (0.25000006, E2M1FN, 1),
        (0.75, E2M1FN, 2),
        (1.25, E2M1FN, 2),
        (1.25000012, E2M1FN, 3),
        (1.75, E2M1FN, 4),
        (2.5, E2M1FN, 4),
        (2.5000002, E2M1FN, 5),
        (3.5, E2M1FN, 6),
        (5.0, E2M1FN, 6),
        (5.0000005, E2M1FN, 7),
        (8.4, E2M1FN, 7),
        (1.125, E5M2, 0x3C),
        (1.625, E5M2, 0x3E),
        (2**-16, E5M2, 0x01),
        (1e-5, E5M2, 0x01),
        (-0.0, E5M2, 0x80),
        (0.00097656244, E4M3FN, 0),
        (7.629394e-06, E5M2, 0),
        (0.24999998509, E2M1FN, 0),
        (256.0, E4M3FN, 0x78),
        (57344.0, E5M2, 0x7B),
        (4.0, E2M1FN, 6),
        (-1e-45, E4M3FN, 0x80),
        (-1e-45, E4M3FNUZ, 0x00),
        (-0.0, E5M2FNUZ, 0x00),
    ],
)
def test_public_mistakes_as_right_values(x, fmt, code):
    assert code == encode_scalar(x, fmt)


@pytest.mark.parametrize("fmt", [E4M3FNUZ, E5M2FNUZ])
@pytest.mark.parametrize("x", [INF, -INF, 1e30, -1e30])
def test_fnuz_overflow_is_its_only_nan(fmt, x):
    assert encode_scalar(x, fmt, overflow=Overflow.IEEE) == 0x80


@pytest.mark.parametrize(
    ("code", "fmt", "value"),
    [
        (0, E2M1FN, 0.0),
        (1, E2M1FN, 0.5),
        (8, E2M1FN, -0.0),
        (9, E2M1FN, -0.5),
        (0x00, E4M3FN, 0.0),
        (0x01, E4M3FN, 2.0**-9),
        (0x80, E4M3FN, -0.0),
        (0x07, E4M3FN, 0.013671875),
        (0x7C, E5M2, INF),
        (0xFC, E5M2, -INF),
        (103, E8M0FNU, 2.0**-24),
        (0, E8M0FNU, 2.0**-127),
        (0xFE, E8M0FNU, 2.0**127),
    ],
)
def test_decode(code, fmt, value):
    decoded = decode_scalar(code, fmt)
    assert value == decoded
    assert math.copysign(1, value) == math.copysign(1, decoded)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_nan_codes_decode_to_nan_with_their_sign(fmt):
    found = [(code, math.copysign(1, decode_scalar(code, fmt))) for code in fmt.nan_codes]
    assert found == [(code, -1.0 if code & fmt.sign_bit else 1.0) for code in fmt.nan_codes]
    assert all(math.isnan(decode_scalar(code, fmt)) for code in fmt.nan_codes)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_code_but_nan_decodes_and_encodes_to_itself(fmt):
    codes = [code for code in range(fmt.code_count) if code not in fmt.nan_codes]
    overflow = Overflow.IEEE if fmt.has_inf else Overflow.SATURATE
    assert codes == [encode_scalar(decode_scalar(code, fmt), fmt, overflow=overflow) for code in codes]


@pytest.mark.parametrize("code", [-1, 300])
def test_a_code_outside_the_format_is_named(code):
    with pytest.raises(FormatError, match=f"code {code} is outside 0..255 of float8_e4m3fn"):
        decode_scalar(code, E4M3FN)


@pytest.mark.parametrize("x", [None, "a", "1.5", b"1", 1j, np.complex64(1), [1.0], {}], ids=repr)
def test_what_is_no_real_number_is_named(x):
    with pytest.raises(FormatError, match=re.escape(f"x {x!r} is no real number; pass a float, an integer or a Frac")):
        encode_scalar(x, "e4m3")


# input, policy: code (facts: "Policies differ")
POLICY_ROWS = [
    (E4M3FN, 1e30, {"ml_dtypes": 0x7F, "torch": 0x7E, "cuda": 0x7E, "cuda_nosat": 0x7F}),
    (E4M3FN, INF, {"ml_dtypes": 0x7F, "torch": 0x7E, "cuda": 0x7E, "cuda_nosat": 0x7F}),
    (E4M3FN, -INF, {"ml_dtypes": 0xFF, "torch": 0xFE, "cuda": 0xFE, "cuda_nosat": 0xFF}),
    (E5M2, 1e30, {"ml_dtypes": 0x7C, "torch": 0x7C, "cuda": 0x7B, "cuda_nosat": 0x7C}),
    (E5M2, INF, {"ml_dtypes": 0x7C, "torch": 0x7C, "cuda": 0x7B, "cuda_nosat": 0x7C}),
    (E4M3FN, NAN, {"ml_dtypes": 0x7F, "torch": 0x7F, "cuda": 0x7F, "cuda_nosat": 0x7F}),
    (E4M3FN, NEGATIVE_NAN, {"ml_dtypes": 0xFF, "torch": 0xFF, "cuda": 0x7F, "cuda_nosat": 0x7F}),
    (E5M2, NAN, {"ml_dtypes": 0x7E, "torch": 0x7F, "cuda": 0x7F, "cuda_nosat": 0x7F}),
    (E5M2, NEGATIVE_NAN, {"ml_dtypes": 0xFE, "torch": 0xFF, "cuda": 0x7F, "cuda_nosat": 0x7F}),
    (E2M1FN, NAN, {"ml_dtypes": 8, "cuda": 7, "cuda_nosat": 7}),
    (E2M1FN, NEGATIVE_NAN, {"ml_dtypes": 0, "cuda": 7, "cuda_nosat": 7}),
    (E4M3FN, -0.0, dict.fromkeys(POLICIES, 0x80)),
    (E4M3FN, -1e-45, dict.fromkeys(POLICIES, 0x80)),
]


@pytest.mark.parametrize(("fmt", "x", "expected"), POLICY_ROWS)
def test_a_row_of_the_policy_table(fmt, x, expected):
    assert expected == {name: encode_by_codes(x, fmt, POLICIES[name].codes(fmt)) for name in expected}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("x", [NAN, NEGATIVE_NAN])
def test_a_nan_is_refused_in_every_format(fmt, x):
    with pytest.raises(FormatError, match=f"^x is NaN and the policy refuses it in {fmt.name}"):
        encode_scalar(x, fmt, nan=NanPolicy.RAISE)


def test_a_missing_nan_is_refused_only_where_it_is_missing():
    with pytest.raises(FormatError, match=r"^x is NaN and the policy refuses it in float4_e2m1fn"):
        encode_scalar(NAN, E2M1FN, missing_nan=MissingNan.RAISE)
    assert encode_scalar(NAN, E4M3FN, missing_nan=MissingNan.RAISE) == 0x7F
    assert [encode_scalar(x, E2M1FN, missing_nan=MissingNan.ZERO) for x in (NAN, NEGATIVE_NAN)] == [8, 0]
    assert [encode_scalar(x, E2M1FN) for x in (NAN, NEGATIVE_NAN)] == [7, 7]


def test_a_negative_number_without_sign_is_a_nan_that_can_be_refused():
    with pytest.raises(FormatError, match=r"^x is -1\.0: float8_e8m0fnu has no sign"):
        encode_scalar(-1.0, E8M0FNU, nan=NanPolicy.RAISE)
    assert encode_scalar(-0.0, E8M0FNU, nan=NanPolicy.RAISE) == 0


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_overflow_is_refused_in_every_format_from_where_it_rounds_beyond_max(fmt):
    with pytest.raises(FormatError, match=re.escape(f"x is inf: it rounds beyond {fmt.max:g}, the largest {fmt.name}")):
        encode_scalar(INF, fmt, overflow=Overflow.RAISE)
    beyond = 2 * Fraction(fmt.max)
    with pytest.raises(FormatError, match=f"^x is {beyond}: it rounds beyond"):
        encode_scalar(beyond, fmt, overflow=Overflow.RAISE)
    assert encode_scalar(fmt.max, fmt, overflow=Overflow.RAISE) == fmt.max_code
    just_above = Fraction(fmt.max) * (1 + Fraction(1, 1000))
    assert encode_scalar(just_above, fmt, overflow=Overflow.RAISE) == fmt.max_code


def test_ieee_overflow_of_e2m1_is_an_error_for_any_value():
    with pytest.raises(FormatError, match="always saturates"):
        encode_scalar(1.0, E2M1FN, overflow=Overflow.IEEE)


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (3.0, 0x80),
        (0.75, 0x7E),
        (1.5, 0x80),
        (2.0**-127 * (1 + 2**-22), 0x00),
        (1.5 * 2.0**-127, 0x00),
        (1.5000002 * 2.0**-127, 0x01),
        (1.5 * 2.0**127, 0xFE),
        (0.0, 0x00),
        (-0.0, 0x00),
        (1e-60, 0x00),
        (INF, 0xFE),
        (NAN, 0xFF),
        (-1.0, 0xFF),
        (-INF, 0xFF),
    ],
)
def test_e8m0_rounds_to_the_even_code_and_has_no_zero_and_no_sign(x, code):
    assert code == encode_scalar(x, E8M0FNU)


def test_e8m0_overflow_without_saturation_is_nan():
    assert [encode_scalar(x, E8M0FNU, overflow=Overflow.IEEE) for x in (1.5 * 2.0**127, 1.5000001 * 2.0**127, INF)] == [
        0xFE,
        0xFF,
        0xFF,
    ]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_encoding_is_the_nearest_value_by_search(fmt):
    """Independent of the bit arithmetic: search the values for the nearest, a tie to the even code."""
    values = [Fraction(fmt.magnitude(code)) for code in range(fmt.max_code + 1)]
    for low, (a, b) in enumerate(itertools.pairwise(values)):
        around = range(max(low - 1, 0), min(low + 3, len(values)))
        for probe in (
            a,
            (7 * a + b) / 8,
            (9 * a + 7 * b) / 16,
            (a + b) / 2,
            (7 * a + 9 * b) / 16,
            (a + 7 * b) / 8,
        ):
            nearest = min(around, key=lambda code: (abs(values[code] - probe), code % 2))
            assert nearest == encode_scalar(probe, fmt)
