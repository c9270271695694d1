"""Which numbers exist, and how a cast may choose among them. Knows no arrays."""

from __future__ import annotations

from qsim.formats.catalog import (
    ALIASES,
    E2M1FN,
    E2M3FN,
    E3M2FN,
    E4M3,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0FNU,
    FORMATS,
    get_format,
    get_policy,
)
from qsim.formats.model import FloatFormat, FormatParams, NanEncoding
from qsim.formats.policy import (
    NAN_REFUSED,
    POLICIES,
    CastCodes,
    CastPolicy,
    NanPolicy,
    Overflow,
    RoundMode,
    cast_codes,
)

__all__ = [
    "ALIASES",
    "E2M1FN",
    "E2M3FN",
    "E3M2FN",
    "E4M3",
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0FNU",
    "FORMATS",
    "NAN_REFUSED",
    "POLICIES",
    "CastCodes",
    "CastPolicy",
    "FloatFormat",
    "FormatParams",
    "NanEncoding",
    "NanPolicy",
    "Overflow",
    "RoundMode",
    "cast_codes",
    "get_format",
    "get_policy",
]
