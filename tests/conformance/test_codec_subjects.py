"""Every codec that this machine has, held against the oracle by the suite that users run on their own."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from cuda_kernels import encode as encoder
from qsim.arrays import F32, U8
from qsim.backends import Backend, CastSpec
from qsim.codec import decode, encode
from qsim.conformance.codec import CodecSubject, check_codec, critical_values
from qsim.formats import FORMATS, POLICIES, CastPolicy, FloatFormat
from tests.backends import EACH
from tests.places import launch
from tests.unit.test_cuda_encode import params

ELEMENTS = [fmt for fmt in FORMATS.values() if fmt.signed]
CENTRAL = [FORMATS[name] for name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")]


def through_backend(backend: Backend, fmt: FloatFormat, policy: CastPolicy) -> CodecSubject:
    spec, one = CastSpec(fmt=fmt, policy=policy), np.float32(1.0)
    return CodecSubject(
        name=f"backend {backend.name}",
        fmt=fmt,
        policy=policy,
        encode=lambda x: backend.quantize(x, np.asarray(one), None, spec).codes,
        decode=lambda codes: backend.decode(codes, np.asarray(one), None, spec),
    )


@pytest.mark.parametrize("fmt", ELEMENTS, ids=lambda f: f.name)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_public_codec_conforms(fmt: FloatFormat, policy: CastPolicy) -> None:
    subject = CodecSubject(
        name="qsim.codec", fmt=fmt, policy=policy, encode=partial(encode, fmt=fmt, policy=policy),
        decode=partial(decode, fmt=fmt),
    )  # fmt: skip
    assert check_codec(subject) == critical_values(fmt).size + fmt.code_count


@pytest.mark.parametrize("fmt", CENTRAL, ids=lambda f: f.name)
@EACH
def test_every_backend_conforms(backend: Backend, fmt: FloatFormat) -> None:
    for policy in POLICIES.values():
        assert check_codec(through_backend(backend, fmt, policy)) > 3 * fmt.code_count


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("fmt", CENTRAL, ids=lambda f: f.name)
def test_the_cuda_kernel_compiled_for_the_cpu_conforms(fmt: FloatFormat) -> None:
    for policy in POLICIES.values():
        own = partial(launch, encoder.encode, params=params(fmt, policy))
        subject = CodecSubject(name="qsim_encode on the host", fmt=fmt, policy=policy, encode=own)
        assert check_codec(subject) == critical_values(fmt).size


@pytest.mark.parametrize("fmt", ELEMENTS, ids=lambda f: f.name)
def test_ml_dtypes_conforms_under_the_policy_that_bears_its_name(fmt: FloatFormat) -> None:
    dtype = getattr(ml_dtypes, fmt.name)

    def cast(x: F32) -> U8:
        with np.errstate(all="ignore"):
            return x.astype(dtype).view(np.uint8)

    check_codec(
        CodecSubject(
            name="ml_dtypes", fmt=fmt, policy=POLICIES["ml_dtypes"], encode=cast,
            decode=lambda codes: codes.view(dtype).astype(np.float32),
        )
    )  # fmt: skip


def test_a_subject_with_one_wrong_tie_is_named_with_its_input_and_both_codes() -> None:
    fmt = FORMATS["float8_e4m3fn"]

    def ties_up(x: F32) -> U8:
        codes = encode(x, fmt).copy()
        codes[x == np.float32(17.0)] += 1  # 17 is a tie of 16 and 18; 16 is even
        return codes

    wrong = CodecSubject(name="ties up", fmt=fmt, policy=POLICIES["ocp"], encode=ties_up)
    with pytest.raises(AssertionError, match=r"first at .*17\.0.*expected 0x58 \(16\.0\), actual 0x59 \(18\.0\)"):
        check_codec(wrong)


def test_a_subject_that_loses_the_sign_of_zero_is_caught() -> None:
    fmt = FORMATS["float4_e2m1fn"]
    lossy = CodecSubject(
        name="lossy", fmt=fmt, policy=POLICIES["ocp"], encode=partial(encode, fmt=fmt),
        decode=lambda codes: decode(codes, fmt) + np.float32(0),
    )  # fmt: skip
    with pytest.raises(AssertionError, match=r"values of lossy differ at 1 of 16 places"):
        check_codec(lossy)
