"""The value table as numbers that follow from the codes, and the policy table as codes."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from qsim.codec.oracle import encode_scalar
from qsim.errors import FormatError
from qsim.formats import (
    ALIASES,
    E2M1FN,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FORMATS,
    POLICIES,
    FloatFormat,
    MissingNan,
    NanEncoding,
    NanPolicy,
    Overflow,
    RoundMode,
    cast_codes,
    get_format,
    get_missing_nan,
    get_nan_policy,
    get_policy,
    get_round_mode,
)

# name: bits, bias, max, its code, min normal, its code, least, its code, Inf, NaN, has -0, finite codes
TABLE = {
    "float8_e4m3fn": (8, 7, 448.0, 0x7E, 2.0**-6, 0x08, 2.0**-9, 0x01, (), (0x7F, 0xFF), True, 254),
    "float8_e5m2": (
        8, 15, 57344.0, 0x7B, 2.0**-14, 0x04, 2.0**-16, 0x01,
        (0x7C, 0xFC), (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), True, 248,
    ),
    "float8_e4m3fnuz": (8, 8, 240.0, 0x7F, 2.0**-7, 0x08, 2.0**-10, 0x01, (), (0x80,), False, 255),
    "float8_e5m2fnuz": (8, 16, 57344.0, 0x7F, 2.0**-15, 0x04, 2.0**-17, 0x01, (), (0x80,), False, 255),
    "float8_e4m3": (
        8, 7, 240.0, 0x77, 2.0**-6, 0x08, 2.0**-9, 0x01,
        (0x78, 0xF8), (*range(0x79, 0x80), *range(0xF9, 0x100)), True, 240,
    ),
    "float4_e2m1fn": (4, 1, 6.0, 0x7, 1.0, 0x2, 0.5, 0x1, (), (), True, 16),
    "float6_e2m3fn": (6, 1, 7.5, 0x1F, 1.0, 0x08, 0.125, 0x01, (), (), True, 64),
    "float6_e3m2fn": (6, 3, 28.0, 0x1F, 0.25, 0x04, 0.0625, 0x01, (), (), True, 64),
    "float8_e8m0fnu": (8, 127, 2.0**127, 0xFE, 2.0**-127, 0x00, 2.0**-127, 0x00, (), (0xFF,), False, 255),
}  # fmt: skip


def test_the_catalog_holds_exactly_the_rows_of_the_value_table():
    assert set(TABLE) == set(FORMATS)
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@pytest.mark.parametrize("name", TABLE)
def test_a_row_of_the_value_table(name):
    fmt = FORMATS[name]
    bits, bias, top, max_code, normal, normal_code, least, least_code, inf, nan, negative_zero, finite = TABLE[name]
    assert (bits, bias) == (fmt.bits, fmt.bias)
    assert (top, max_code) == (fmt.max, fmt.max_code)
    assert (normal, least) == (fmt.min_normal, fmt.smallest_subnormal)
    assert (top, normal, least) == tuple(fmt.magnitude(c) for c in (max_code, normal_code, least_code))
    assert inf == fmt.inf_codes
    assert nan == fmt.nan_codes
    assert bool(nan) == fmt.has_nan
    assert negative_zero == fmt.has_negative_zero
    assert finite == fmt.code_count - len(fmt.inf_codes) - len(fmt.nan_codes)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_finite_magnitudes_increase_with_the_code_and_end_at_max(fmt):
    values = [fmt.magnitude(code) for code in range(fmt.max_code + 1)]
    assert sorted(set(values)) == values
    assert values[-1] == fmt.max
    assert values[0] == (0.0 if fmt.has_zero else fmt.smallest_subnormal)


def test_e2m1_values_are_the_eight_known_ones():
    assert [E2M1FN.magnitude(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float8_e4m3fn", (4, 3, 7, 0x7E, 0x80, 1)),
        ("float8_e5m2fnuz", (5, 2, 16, 0x7F, 0x80, 0)),
        ("float4_e2m1fn", (2, 1, 1, 0x7, 0x8, 1)),
        ("float6_e3m2fn", (3, 2, 3, 0x1F, 0x20, 1)),
    ],
)
def test_params_are_what_a_kernel_needs(name, expected):
    assert expected == tuple(FORMATS[name].params())


def test_a_scale_format_has_no_element_params():
    with pytest.raises(FormatError, match="float8_e8m0fnu has no sign or no zero"):
        E8M0FNU.params()


def test_only_e2m1_packs_two_codes_a_byte():
    assert {"float4_e2m1fn"} == {name for name, fmt in FORMATS.items() if fmt.codes_per_byte == 2}


def test_a_format_is_frozen_hashable_and_survives_pickle():
    with pytest.raises(FrozenInstanceError):
        E4M3FN.bias = 8
    assert pickle.loads(pickle.dumps(E4M3FN)) == E4M3FN
    assert hash(replace(E4M3FN)) == hash(E4M3FN)
    assert replace(E4M3FN, bias=8) != E4M3FN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"has_inf": True}, "Inf and the IEEE encoding"),
        ({"exponent_bits": 6}, "10 bits is outside 2..8"),
        ({"bias": 128}, "leave the range of float32"),
        ({"exponent_bits": 7, "mantissa_bits": 0, "bias": -1}, "leave the range of float32"),
        ({"codes_per_byte": 2}, "2 codes of 8 bits exceed a byte"),
        ({"signed": False, "nan": NanEncoding.NEGATIVE_ZERO}, "without -0"),
    ],
)
def test_a_literal_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(FormatError, match=message):
        replace(E4M3FN, **changes)


def test_aliases_lead_to_formats():
    assert set(ALIASES.values()) <= set(FORMATS)
    assert [get_format(name) for name in ("e4m3", "E5M2", "e2m1")] == [E4M3FN, E5M2, E2M1FN]
    assert get_format(E5M2) is E5M2


def test_an_unknown_format_names_a_close_one():
    with pytest.raises(FormatError, match=r"unknown format 'float8_e4m3fm': did you mean 'float8_e4m3fn'\?"):
        get_format("float8_e4m3fm")


def test_an_unknown_policy_lists_the_known_ones():
    with pytest.raises(FormatError, match="known: ocp, cuda, cuda_nosat, ml_dtypes, torch"):
        get_policy("nearest")


# policy, format: code of a positive overflow, of NaN, of -NaN (facts: "Policies differ")
POLICY_TABLE = [
    ("ml_dtypes", "float8_e4m3fn", (0x7F, 0x7F, 0xFF)),
    ("ml_dtypes", "float8_e5m2", (0x7C, 0x7E, 0xFE)),
    ("ml_dtypes", "float4_e2m1fn", (0x7, 0x8, 0x0)),
    ("torch", "float8_e4m3fn", (0x7E, 0x7F, 0xFF)),
    ("torch", "float8_e5m2", (0x7C, 0x7F, 0xFF)),
    ("cuda", "float8_e4m3fn", (0x7E, 0x7F, 0x7F)),
    ("cuda", "float8_e5m2", (0x7B, 0x7F, 0x7F)),
    ("cuda", "float4_e2m1fn", (0x7, 0x7, 0x7)),
    ("cuda_nosat", "float8_e4m3fn", (0x7F, 0x7F, 0x7F)),
    ("cuda_nosat", "float8_e5m2", (0x7C, 0x7F, 0x7F)),
    ("cuda_nosat", "float4_e2m1fn", (0x7, 0x7, 0x7)),
    ("ocp", "float8_e4m3fn", (0x7E, 0x7F, 0xFF)),
    ("ocp", "float8_e5m2", (0x7B, 0x7F, 0xFF)),
    ("ml_dtypes", "float8_e4m3fnuz", (0x80, 0x80, 0x80)),
    ("cuda_nosat", "float8_e5m2fnuz", (0x80, 0x80, 0x80)),
    ("torch", "float8_e4m3fnuz", (0x80, 0x80, 0x80)),
    ("torch", "float8_e5m2fnuz", (0x80, 0x80, 0x80)),
    ("cuda", "float8_e4m3fnuz", (0x7F, 0x80, 0x80)),
]


@pytest.mark.parametrize(("policy", "fmt", "expected"), POLICY_TABLE)
def test_a_cell_of_the_policy_table(policy, fmt, expected):
    assert (*expected, False, False) == tuple(POLICIES[policy].codes(FORMATS[fmt]))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_preset_is_usable_for_every_format(policy, fmt):
    assert all(0 <= code < fmt.code_count for code in policy.codes(fmt)[:3])
    if not fmt.has_nan:
        assert policy.overflow(fmt) is Overflow.SATURATE


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if not fmt.has_nan])
def test_ieee_overflow_is_an_error_where_there_is_neither_inf_nor_nan(name):
    with pytest.raises(FormatError, match=f"'ieee' does not exist for {name}"):
        cast_codes(FORMATS[name], overflow=Overflow.IEEE, nan=NanPolicy.SIGNED)


def test_with_overflow_changes_what_a_format_can_express():
    policy = POLICIES["ocp"].with_overflow(Overflow.IEEE)
    assert tuple(policy.codes(fmt).overflow for fmt in (E5M2, E4M3FN, E2M1FN)) == (0x7C, 0x7F, 7)
    assert policy.nan is NanPolicy.SIGNED


def test_a_refused_overflow_exists_for_every_format_and_leaves_the_codes_saturating():
    policy = POLICIES["ml_dtypes"].with_overflow(Overflow.RAISE)
    for fmt in FORMATS.values():
        assert (fmt.max_code, True) == (policy.codes(fmt).overflow, policy.codes(fmt).refuses_overflow)
    assert not any(POLICIES[name].codes(fmt)[3:] != (False, False) for name in POLICIES for fmt in FORMATS.values())


def test_a_refused_nan_is_resolved_by_format():
    every, missing = POLICIES["ocp"].with_choices(nan="raise"), POLICIES["ocp"].with_choices(missing_nan="raise")
    for fmt in FORMATS.values():
        assert (True, not fmt.has_nan) == (every.codes(fmt).refuses_nan, missing.codes(fmt).refuses_nan)


def test_a_policy_with_another_choice_has_another_name():
    changes = [
        {"rounding": "up"}, {"overflow": "raise"}, {"nan": "raise"}, {"missing_nan": "raise"}, {"random_bits": 8},
        {"rounding": RoundMode.STOCHASTIC, "random_bits": 8}, {"overflow": Overflow.IEEE},
        {"missing_nan": MissingNan.ZERO},
    ]  # fmt: skip
    policies = [POLICIES["ocp"].with_choices(**change) for change in changes]
    names = [policy.name for policy in policies]
    assert names[5] == "ocp+rounding=stochastic+random_bits=8"
    assert len({*names, "ocp"}) == 9
    assert POLICIES["ocp"].with_choices() is POLICIES["ocp"]
    assert (policies[5].rounding, policies[5].random_bits) == (RoundMode.STOCHASTIC, 8)
    assert [policy.missing_nan for policy in policies[3::4]] == [MissingNan.RAISE, MissingNan.ZERO]


@pytest.mark.parametrize("bits", [0, 33, -1])
def test_a_random_word_has_1_to_32_bits_to_use(bits):
    with pytest.raises(FormatError, match=f"random_bits {bits} is outside 1..32"):
        POLICIES["ocp"].with_choices(random_bits=bits)


def test_a_format_with_neither_inf_nor_nan_cannot_be_promised_one():
    with pytest.raises(FormatError, match="overflow_finite 'ieee' does not exist"):
        replace(POLICIES["ocp"], overflow_finite=Overflow.IEEE)


def test_roundings_have_the_names_of_the_issue_and_aliases():
    expected = ["nearest_even", "nearest_away", "toward_zero", "up", "down", "odd", "stochastic"]
    assert expected == [mode.value for mode in RoundMode]
    assert list(RoundMode) == [get_round_mode(name) for name in expected]
    assert list(RoundMode) == [get_round_mode(mode) for mode in RoundMode]
    assert list(RoundMode) == [get_round_mode(mode.name.title()) for mode in RoundMode]
    short = ("rne", "rna", "rz", "ru", "rd", "odd", "sr")
    assert list(RoundMode) == [get_round_mode(name) for name in short]


def test_an_unknown_choice_names_a_close_one():
    with pytest.raises(FormatError, match=r"unknown rounding 'towards_zero': did you mean 'toward_zero'\? known: near"):
        get_round_mode("towards_zero")
    with pytest.raises(FormatError, match="unknown NaN policy 'sign': did you mean 'signed'"):
        get_nan_policy("sign")
    with pytest.raises(FormatError, match="unknown rule for a missing NaN 'poison': known: max, zero, raise"):
        get_missing_nan("poison")
    assert (get_nan_policy("keep_sign"), get_nan_policy("canonical")) == (NanPolicy.SIGNED, NanPolicy.POSITIVE)


def test_eight_bits_without_nan_are_a_format_too():
    full = replace(E4M3FN, name="e4m3_no_nan", nan=NanEncoding.NONE)
    assert (full.max, full.max_code, full.nan_codes) == (480.0, 0x7F, ())
    assert encode_scalar(-1e9, full) == 0xFF


def test_a_format_needs_no_code_of_its_own():
    tiny = FloatFormat(
        name="e2m0",
        exponent_bits=2,
        mantissa_bits=0,
        bias=1,
        has_inf=False,
        nan=NanEncoding.NONE,
        codes_per_byte=2,
    )
    assert (tiny.bits, [tiny.magnitude(code) for code in range(4)]) == (3, [0, 1, 2, 4])
