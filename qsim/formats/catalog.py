"""The formats that exist, one literal a row. Knows no arithmetic."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from qsim.errors import FormatError
from qsim.formats.model import FloatFormat, NanEncoding
from qsim.formats.names import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

E4M3FN = FloatFormat(
    name="float8_e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, has_inf=False, nan=NanEncoding.ALL_ONES
)
E5M2 = FloatFormat(name="float8_e5m2", exponent_bits=5, mantissa_bits=2, bias=15, has_inf=True, nan=NanEncoding.IEEE)
E4M3FNUZ = FloatFormat(
    name="float8_e4m3fnuz",
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    has_inf=False,
    nan=NanEncoding.NEGATIVE_ZERO,
)
E5M2FNUZ = FloatFormat(
    name="float8_e5m2fnuz",
    exponent_bits=5,
    mantissa_bits=2,
    bias=16,
    has_inf=False,
    nan=NanEncoding.NEGATIVE_ZERO,
)
E4M3 = FloatFormat(name="float8_e4m3", exponent_bits=4, mantissa_bits=3, bias=7, has_inf=True, nan=NanEncoding.IEEE)
E2M1FN = FloatFormat(
    name="float4_e2m1fn",
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    has_inf=False,
    nan=NanEncoding.NONE,
    codes_per_byte=2,
)
E2M3FN = FloatFormat(
    name="float6_e2m3fn", exponent_bits=2, mantissa_bits=3, bias=1, has_inf=False, nan=NanEncoding.NONE
)
E3M2FN = FloatFormat(
    name="float6_e3m2fn", exponent_bits=3, mantissa_bits=2, bias=3, has_inf=False, nan=NanEncoding.NONE
)
E8M0FNU = FloatFormat(
    name="float8_e8m0fnu",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    has_inf=False,
    nan=NanEncoding.ALL_ONES,
    signed=False,
    has_zero=False,
)

FORMATS: Mapping[str, FloatFormat] = MappingProxyType(
    {fmt.name: fmt for fmt in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E4M3, E2M1FN, E2M3FN, E3M2FN, E8M0FNU)}
)
"""Every format by its ml_dtypes name."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "e4m3": "float8_e4m3fn",  # as in CUDA and OCP; the IEEE-like one is only float8_e4m3
        "e4m3fn": "float8_e4m3fn",
        "e5m2": "float8_e5m2",
        "e4m3fnuz": "float8_e4m3fnuz",
        "e5m2fnuz": "float8_e5m2fnuz",
        "e2m1": "float4_e2m1fn",
        "e2m1fn": "float4_e2m1fn",
        "fp4": "float4_e2m1fn",
        "e2m3": "float6_e2m3fn",
        "e2m3fn": "float6_e2m3fn",
        "e3m2": "float6_e3m2fn",
        "e3m2fn": "float6_e3m2fn",
        "e8m0": "float8_e8m0fnu",
        "e8m0fnu": "float8_e8m0fnu",
    }
)


def get_format(name: str | FloatFormat) -> FloatFormat:
    """The format of this name or alias (any case); a FloatFormat is returned as it is. Else FormatError."""
    if isinstance(name, FloatFormat):
        return name
    key = str(name).lower()
    key = ALIASES.get(key, key)
    if key in FORMATS:
        return FORMATS[key]
    raise FormatError(unknown("format", name, (*FORMATS, *ALIASES), FORMATS))
