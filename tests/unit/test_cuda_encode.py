"""The CUDA encoder: its text compiles for every target, and run on the CPU it equals the codec."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from typing import Any

import numpy as np
import pytest

from cuda_kernels import DeviceMemoryError, DeviceUnavailableError, KernelBuildError, host
from cuda_kernels._nvrtc import compile_cubin
from cuda_kernels._place import HOST, device
from cuda_kernels.encode import ENCODE, KERNEL, EncodeParams, encode
from qsim.arrays import F32, F64, FLT_MAX, U8
from qsim.backends import CastSpec, get_backend
from qsim.codec import decode as decode_codes
from qsim.codec import encode as encode_codes
from qsim.formats import FORMATS, POLICIES, CastPolicy, FloatFormat
from tests.places import Given, launch, played_device

ELEMENT_FORMATS = tuple(fmt for fmt in FORMATS.values() if fmt.signed and fmt.has_zero and fmt.mantissa_bits)
CENTRAL = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


@functools.cache
def built(old: str = "", new: str = "") -> host.HostKernel:
    """The kernel for the CPU, with ``old`` replaced by ``new`` in its text."""
    text = ENCODE.text
    assert not old or text.count(old) == 1
    return host.build(text.replace(old, new) if old else text, KERNEL)


def params(fmt: FloatFormat, policy: CastPolicy) -> EncodeParams:
    p, codes = fmt.params(), policy.codes(fmt)
    return EncodeParams(
        p.mantissa_bits,
        p.bias,
        p.max_code,
        p.sign_bit,
        p.negative_zero,
        codes.overflow,
        codes.nan,
        codes.negative_nan,
    )


def from_bits(*words: int) -> F32:
    return np.array(words, np.uint32).view(np.float32)


@functools.cache
def probes(name: str) -> F32:
    """Every value of the format, every midpoint (overflow threshold included), neighbours, specials."""
    fmt = FORMATS[name]
    values = np.array([fmt.magnitude(code) for code in range(fmt.max_code + 1)])
    beyond = fmt.max + (values[-1] - values[-2])
    grid = np.append(values, beyond)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, fmt.smallest_subnormal / 4 * np.arange(5)])
    exact = points.astype(np.float32)
    assert np.array_equal(exact, points)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))])
    nans = from_bits(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF)
    edges = from_bits(0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF, 0x7F800000)
    return np.concatenate([near, -near, edges, -edges, nans])


@functools.cache
def random_patterns(count: int = 1_000_003) -> F32:
    words = np.random.default_rng(20260102).integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    # Half keep their random exponent, half are moved to the range where formats have values.
    words[::2] = (words[::2] & 0x807FFFFF) | ((words[::2] >> 8) % 48 + 96) << 23
    return words.view(np.float32)


def assert_codes_equal(expected: U8, actual: U8, x: F32) -> None:
    assert expected.shape == actual.shape
    assert np.uint8 == actual.dtype
    differing = np.flatnonzero((expected != actual).reshape(-1))
    if differing.size:
        at = int(differing[0])
        value = np.ascontiguousarray(x).reshape(-1)[at : at + 1]
        raise AssertionError(
            f"{differing.size} of {expected.size} codes differ, first at {at}: x {value[0]!r} "
            f"({value.view(np.uint32)[0]:08x}), expected {expected.reshape(-1)[at]:02x}, "
            f"got {actual.reshape(-1)[at]:02x}"
        )


@pytest.mark.usefixtures("nvrtc")
def test_the_options_decide_about_flushing_and_contraction() -> None:
    # Plain operators, unlike __fmul_rn, follow the options: they hold, and the check can fail.
    text = 'extern "C" __global__ void f(float* x, float y) { x[0] = x[1] * y + x[2]; }'
    kept = compile_cubin(text, "sm_90a", ptx=True).ptx
    lost = compile_cubin(text, "sm_90a", ptx=True, options=("--fmad=true", "--ftz=true")).ptx
    assert kept is not None
    assert lost is not None
    assert (".ftz" in kept, "fma." in kept) == (False, False)
    assert (".ftz" in lost, "fma." in lost) == (True, True)


@pytest.mark.usefixtures("nvrtc")
def test_a_text_that_does_not_compile_is_reported_with_its_line() -> None:
    with pytest.raises(KernelBuildError, match=r'bad\.cu\(2\): error: identifier "y" is undefined'):
        compile_cubin("__global__ void f()\n{ int x = y; }", "sm_90a", name="bad.cu")
    with pytest.raises(KernelBuildError, match="sm_13"):
        compile_cubin("", "sm_13")


def test_missing_tools_are_named_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings", None)
        with pytest.raises(KernelBuildError, match="NVRTC was not found: install the extra"):
            compile_cubin("", "sm_90a")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(KernelBuildError, match="g\\+\\+ was not found: install"):
            host.build("", KERNEL)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        with pytest.raises(DeviceUnavailableError, match="CuPy is missing: install the extra"):
            device()


def test_the_launcher_passes_what_the_kernel_takes_in_its_order() -> None:
    signature = re.search(rf"{KERNEL}\(([^)]*)\)", ENCODE.text)
    assert signature is not None
    names = [part.split()[-1].lstrip("*") for part in signature.group(1).split(",")]
    sizes = ("replicas", "per_replica", "center_period", "center_stride")
    assert ["x", "scale", "center", "codes", *sizes, *EncodeParams._fields] == names


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("shape", [(2, 5), (3, 2300), (0, 4)])
def test_the_device_launcher_covers_the_array_with_the_right_arguments(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = played_device(monkeypatch)
    fmt, policy = FORMATS["float8_e5m2"], POLICIES["torch"]
    x = random_patterns()[: shape[0] * shape[1]].reshape(shape)
    scale, center = np.full(shape[0], 0.75, np.float32), x[:1, ::-1] if shape[0] else None
    for s, c in ((None, None), (scale, None), (scale, center), (None, center)):
        ones = np.ones(shape[0], np.float32) if s is None else s
        expected = get_backend("numba").quantize(x, ones, c, CastSpec(fmt=fmt, policy=policy)).codes
        own, on_s, on_c, out = (
            None if a is None else place.upload(a) for a in (x, s, c, np.full(shape, 0x55, np.uint8))
        )
        assert encode(place, own, params(fmt, policy), scale=on_s, center=on_c, out=out) is out
        assert_codes_equal(expected, out.get(), x)


@pytest.mark.usefixtures("gpp")
def test_a_device_without_room_says_how_much_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    place = played_device(monkeypatch, room=1000)
    small = place.upload(np.ones(200, np.float32))
    with pytest.raises(DeviceMemoryError, match=r"1004 bytes for float32\[251\], 1000 of 2000 are free; use fewer"):
        place.upload(np.ones(251, np.float32))
    with pytest.raises(DeviceMemoryError, match="2000 bytes for uint8"):
        place.empty(2000, "uint8")
    assert encode(place, small, params(FORMATS["float8_e5m2"], POLICIES["ocp"])).get().tolist() == [0x3C] * 200


@pytest.mark.usefixtures("gpp")
def test_a_text_that_g_plus_plus_refuses_is_reported() -> None:
    with pytest.raises(KernelBuildError, match="nonsense"):
        host.build("nonsense", KERNEL)


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda fmt: fmt.name)
def test_on_the_cpu_the_text_equals_the_codec_at_every_edge(fmt: FloatFormat, policy: CastPolicy) -> None:
    x = probes(fmt.name)
    expected = encode_codes(x, fmt, policy=policy)
    assert_codes_equal(expected, launch(encode, x, params(fmt, policy)), x)


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("policy", ["ocp", "cuda_nosat"])
@pytest.mark.parametrize("name", CENTRAL)
def test_on_the_cpu_the_text_equals_the_codec_on_a_million_patterns(name: str, policy: str) -> None:
    x, fmt = random_patterns(), FORMATS[name]
    expected = encode_codes(x, fmt, policy=policy)
    assert_codes_equal(expected, launch(encode, x, params(fmt, POLICIES[policy])), x)
    assert len(np.unique(expected)) >= fmt.max_code  # the patterns reach the format's codes


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("name", CENTRAL)
def test_on_the_cpu_the_text_equals_ml_dtypes(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x = np.concatenate([probes(name), random_patterns(100_001)])
    with np.errstate(all="ignore"):
        expected = x.astype(getattr(ml_dtypes, name)).view(np.uint8)
    assert_codes_equal(expected, launch(encode, x, params(FORMATS[name], POLICIES["ml_dtypes"])), x)


@pytest.mark.usefixtures("gpp")
def test_known_codes_of_public_mistakes() -> None:
    saturating = params(FORMATS["float8_e4m3fn"], POLICIES["cuda"])
    x = np.array([1000, 448, 464, 465, -1000, 4.25, 1.0625001, 400.1, 0.00097656244, -1e-45], np.float32)
    assert launch(encode, x, saturating).tobytes() == bytes.fromhex("7e7e7e7efe48397d0080")
    rest = params(FORMATS["float8_e4m3fn"], POLICIES["cuda_nosat"])
    assert launch(encode, x[:5], rest).tobytes() == bytes.fromhex("7f7e7e7fff")
    e5m2 = params(FORMATS["float8_e5m2"], POLICIES["cuda_nosat"])
    x = np.array([1.125, 1.625, 2.0**-16, 1e-5, -0.0, 58000, 61440, 61439.99, 7.629394e-06], np.float32)
    assert launch(encode, x, e5m2).tobytes() == bytes.fromhex("3c3e0101807b7c7b00")
    e2m1 = params(FORMATS["float4_e2m1fn"], POLICIES["cuda"])
    x = np.array([-1.25, 0.25, 0.25000006, 0.75, 1.75, 3.5, 5.0, 5.0000005, 1e30, -1e30], np.float32)
    assert launch(encode, x, e2m1).tobytes() == bytes.fromhex("0a00010204060607070f")


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 191, 192, 193, 385])
def test_every_tail_is_encoded_and_nothing_beyond_it(size: int) -> None:
    fmt, policy = FORMATS["float8_e4m3fn"], POLICIES["ocp"]
    x = random_patterns()[:size]
    assert_codes_equal(encode_codes(x, fmt), launch(encode, x, params(fmt, policy)), x)
    guarded = np.full(size + 8, 0x55, np.uint8)
    pointers = [ctypes.c_void_p(at) for at in (x.ctypes.data, None, None, guarded.ctypes.data)]
    sizes = [ctypes.c_longlong(n) for n in (1, size, 1, 0)]
    args = [*pointers, *sizes, *(ctypes.c_int(n) for n in params(fmt, policy))]
    for grid, block in (((1,), (1,)), ((2, 3), (33,)), ((7,), (8, 2))):
        guarded[:] = 0x55
        built()(grid, block, args)
        assert_codes_equal(encode_codes(x, fmt), guarded[:size], x)
        assert guarded[size:].tolist() == [0x55] * 8


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("name", CENTRAL)
@pytest.mark.parametrize(
    "center_shape", [None, (), (7,), (5, 7), (3, 1, 1), (3, 1, 7), (1, 5, 7), (3, 5, 1), (1, 5, 1), (3, 5, 7)]
)
def test_scale_and_centre_equal_the_numba_backend(name: str, center_shape: tuple[int, ...] | None) -> None:
    fmt, policy = FORMATS[name], POLICIES["ocp"]
    rng = np.random.default_rng(20260103)
    x = rng.standard_normal((3, 5, 7)).astype(np.float32)
    x[0, 0] = from_bits(0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x80000000, 0, 1)
    scale = np.array([FLT_MAX, 1.7e-3, 30.1], np.float32)
    center = None if center_shape is None else rng.standard_normal(center_shape).astype(np.float32)
    if center is not None and center.size > 1:
        center.reshape(-1)[:2] = np.inf, -np.nan
    spec = CastSpec(fmt=fmt, policy=policy)
    expected = get_backend("numba").quantize(x, scale, center, spec).codes
    actual = launch(encode, x, params(fmt, policy), scale=scale, center=center)
    assert_codes_equal(expected, actual, x)


@pytest.mark.usefixtures("gpp")
def test_many_replicas_and_strides_equal_the_numba_backend() -> None:
    fmt, policy = FORMATS["float8_e4m3fn"], POLICIES["cuda"]
    x = random_patterns()[: 70 * 64].reshape(70, 64)
    scale = (2.0 ** np.arange(-35, 35)).astype(np.float32)
    spec = CastSpec(fmt=fmt, policy=policy)
    for view, scales in ((x[::-1, ::3], scale[::-1]), (np.asfortranarray(x), scale), (x[::2], scale[::2])):
        expected = get_backend("numba").quantize(view, scales, None, spec).codes
        assert_codes_equal(expected, launch(encode, view, params(fmt, policy), scale=scales), view)


@pytest.mark.usefixtures("gpp")
def test_subnormal_operands_residuals_and_products_are_kept() -> None:
    def codes(x: F64, scale: float, center: float | None, bias: int) -> list[int]:
        e4m3_moved = EncodeParams(3, bias, 126, 128, 1, 126, 127, 255)  # its unit is 2^(1 - bias - 3)
        row = x.astype(np.float32).reshape(1, -1)
        c = None if center is None else np.array([center], np.float32)
        out: U8 = launch(encode, row, e4m3_moved, scale=np.array([scale], np.float32), center=c)
        return [int(code) for code in out[0]]

    k = np.arange(1.0, 8.0)
    expected = [1, 2, 3, 4, 5, 6, 7]  # flushed, each would be 0
    assert expected == codes(k * 2.0**-149, 2.0**117, None, 30)
    assert expected == codes(2.0**-126 + k * 2.0**-149, 2.0**117, 2.0**-126, 30)
    assert expected == codes(k * 2.0**-100, 2.0**-29, None, 127)


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ odd) >> drop", "+ 1u) >> drop"),  # ties away from zero
        ("+ odd) >> drop", ") >> drop"),  # ties towards zero
        ("(significand + ((1u << (drop - 1)) - 1u) + odd)", "(significand)"),  # truncation
        ("exponent > lowest ? exponent : lowest", "exponent"),  # no subnormals
        ("(field != 0u ? 0x800000u : 0u)", "0u"),  # no hidden bit
        ("code > k.max_code", "code >= k.max_code + 2"),  # overflow seen one code late
        ("(limited | k.negative_zero) != 0u", "limited != 0u"),  # -0 lost
        ("(negative ? k.negative_nan_code : k.nan_code)", "k.nan_code"),
        ("magnitude > 0x7F800000u", "magnitude >= 0x7F800000u"),  # Inf taken for NaN
        ("wanted < 25 ? wanted : 25", "wanted < 24 ? wanted : 24"),  # values below half round up
    ],
)
def test_a_wrong_text_is_caught_by_the_same_comparison(old: str, new: str) -> None:
    wrong = built(old, new)
    caught = 0
    for name in CENTRAL:
        for policy in (POLICIES["ocp"], POLICIES["cuda_nosat"]):
            x, fmt = probes(name), FORMATS[name]
            actual = encode(Given(made=wrong), x, params(fmt, policy))
            try:
                assert_codes_equal(encode_codes(x, fmt, policy=policy), actual, x)
            except AssertionError:
                caught += 1
    assert caught > 0


@pytest.mark.usefixtures("gpp")
def test_ties_away_differs_at_ties_and_nowhere_else() -> None:
    fmt, policy = FORMATS["float8_e4m3fn"], POLICIES["cuda_nosat"]
    x = np.concatenate([probes(fmt.name), random_patterns(100_001)])
    x = x[np.isfinite(x)]
    wrong = encode(Given(made=built("+ odd) >> drop", "+ 1u) >> drop")), x, params(fmt, policy))
    differ = wrong != encode_codes(x, fmt, policy=policy)
    values = np.array([fmt.magnitude(code) for code in range(fmt.max_code + 1)] + [480.0])
    ties = np.isin(np.abs(x), (values[1:] + values[:-1]) / 2)
    even_below = np.isin(np.abs(x), (values[1:] + values[:-1])[::2] / 2)
    assert ties.sum() > even_below.sum() > 100
    assert np.array_equal(even_below, differ)


@pytest.mark.usefixtures("gpp")
def test_every_finite_code_encodes_to_itself() -> None:
    for fmt in ELEMENT_FORMATS:
        codes = np.array([c for c in range(fmt.code_count) if c not in (*fmt.nan_codes, *fmt.inf_codes)], np.uint8)
        x = decode_codes(codes, fmt)
        assert_codes_equal(codes, launch(encode, x, params(fmt, POLICIES["ocp"])), x)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": np.ones(2, np.float32)}, ValueError, r"scale of shape \(2,\) is not the leading axis"),
        ({"scale": np.ones((3, 4), np.float32)}, ValueError, "is not the leading axis"),
        ({"scale": np.ones(3)}, TypeError, "scale is numpy.ndarray of float64"),
        ({"center": np.ones(3, np.float32)}, ValueError, r"center of shape \(3,\) does not broadcast"),
        ({"center": np.ones((1, 3, 4), np.float32)}, ValueError, "does not broadcast"),
        ({"center": 0.5}, TypeError, "center is builtins.float of no dtype"),
    ],
)
def test_wrong_operands_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x = np.ones((3, 4), np.float32)
    with pytest.raises(error, match=message):
        encode(HOST, x, params(FORMATS["float8_e4m3fn"], POLICIES["ocp"]), **change)
    with pytest.raises(ValueError, match=r"nan_code 300 is outside 0\.\.255"):
        encode(HOST, x, EncodeParams(3, 7, 126, 128, 1, 126, 300, 255))
