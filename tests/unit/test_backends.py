"""The Numba backend against the oracle backend bit by bit, and both against counts worked out by hand."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from qsim.arrays import FLT_MAX
from qsim.backends import BACKENDS, Backend, CastSpec, get_backend, parts
from qsim.backends.numba_backend import NumbaBackend
from qsim.backends.oracle import OracleBackend
from qsim.codec import encode
from qsim.codec.threads import threads
from qsim.conformance.compare import assert_bits_equal, assert_codes_equal
from qsim.errors import FormatError, UsageError
from qsim.formats import E2M1FN, E4M3FN, E4M3FNUZ, E5M2, E8M0FNU, FORMATS, POLICIES, RoundMode
from qsim.philox import RandomStream
from tests.backends import AGAINST_ORACLE, EACH

ORACLE, NUMBA = OracleBackend(), NumbaBackend()
ELEMENTS = {name: fmt for name, fmt in FORMATS.items() if fmt.signed}
NEGATIVE_NAN = np.uint32(0xFFC00000).view(np.float32)
SPECIAL = np.array(
    [np.nan, NEGATIVE_NAN, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1e38, -FLT_MAX, 2.0**-126], np.float32
)

# shape, lead, shape of the centre
LAYOUTS = [
    ((3, 4, 5), 1, None),
    ((3, 4, 5), 1, (3, 1, 5)),
    ((3, 4, 5), 1, (1, 1, 5)),
    ((3, 4, 5), 1, (5,)),
    ((3, 4, 5), 1, (3, 4, 1)),
    ((3, 4, 5), 1, (3, 1, 1)),
    ((3, 4, 5), 1, (3, 4, 5)),
    ((3, 4, 5), 1, ()),
    ((2, 3, 4, 5), 1, (2, 3, 1, 5)),
    ((4, 13), 0, None),
    ((4, 13), 0, (1, 13)),
    ((4, 13), 0, (4, 1)),
    ((13,), 0, (1,)),
    ((13,), 0, (13,)),
    ((13,), 1, (13,)),
    ((13,), 1, None),
    ((), 0, None),
    ((), 0, ()),
    ((0, 4), 0, (1, 4)),
    ((2, 0), 1, (2, 1)),
    ((2, 0, 3), 1, (1, 1, 3)),
]


def spec_of(fmt, policy="ocp"):
    return CastSpec(fmt=fmt, policy=POLICIES[policy])


def float32(values):
    return np.array(values, np.float32)


def assert_same(expected, actual, fmt, where=""):
    """Every field of two result dataclasses, bit by bit."""
    for field in dataclasses.fields(expected):
        a, b, path = getattr(expected, field.name), getattr(actual, field.name), f"{where}.{field.name}"
        if dataclasses.is_dataclass(a):
            assert_same(a, b, fmt, path)
        elif a is None:
            assert b is None, path
        elif field.name == "codes":
            assert_codes_equal(a, b, fmt)
        elif a.dtype == np.float32:
            assert_bits_equal(a, b, what=path)
        else:
            assert (a.dtype, a.shape, a.tolist()) == (b.dtype, b.shape, b.tolist()), path


def tensor(shape, seed):
    """Ordinary numbers with special ones among them, read-only as in a world."""
    rng = np.random.default_rng(seed)
    x = np.asarray((rng.standard_normal(shape) * 4).astype(np.float32) if shape else float32(1.3))
    if x.size > 2 * SPECIAL.size:
        x.reshape(-1)[: 2 * SPECIAL.size : 2] = SPECIAL
    x.setflags(write=False)
    return x


@AGAINST_ORACLE
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fmt", ELEMENTS.values(), ids=ELEMENTS)
def test_quantize_and_decode_equal_the_oracle(backend, fmt, policy):
    spec = spec_of(fmt, policy)
    for seed, (shape, lead, center_shape) in enumerate(LAYOUTS):
        rng = np.random.default_rng(100 + seed)
        x = tensor(shape, seed)
        center = None if center_shape is None else float32(rng.standard_normal(center_shape))
        scale = float32(rng.random(shape[:lead]) * 3)
        expected = ORACLE.quantize(x, scale, center, spec)
        assert_same(expected, backend.quantize(x, scale, center, spec), fmt)
        decoded = ORACLE.decode(expected.codes, scale, center, spec)
        assert_bits_equal(decoded, backend.decode(expected.codes, scale, center, spec))


@AGAINST_ORACLE
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_observe_equals_the_oracle(backend, layout):
    shape, lead, center_shape = layout
    x = tensor(shape, 7)
    center = None if center_shape is None else float32(np.random.default_rng(8).standard_normal(center_shape))
    rest = tuple(range(lead, len(shape)))
    for axes in {None, rest, rest[:-1], rest[-1:], tuple(a - len(shape) for a in rest[:1])}:
        expected = ORACLE.observe(x, center, lead=lead, mean_axes=axes)
        assert_same(expected, backend.observe(x, center, lead=lead, mean_axes=axes), E4M3FN, str(axes))


@AGAINST_ORACLE
@pytest.mark.parametrize("scale", [FLT_MAX, 2.0**-149, 0.0, -2.0, np.inf, np.nan, 1.0])
@pytest.mark.parametrize("center", [None, 0.5, np.inf, np.nan, FLT_MAX])
def test_extreme_scales_and_centres_equal_the_oracle(backend, scale, center):
    x = np.concatenate([SPECIAL, -SPECIAL, tensor((20,), 3)])
    c = None if center is None else float32([center])
    for fmt in (E4M3FN, E5M2, E2M1FN, E4M3FNUZ):
        expected = ORACLE.quantize(x, float32(scale), c, spec_of(fmt))
        assert_same(expected, backend.quantize(x, float32(scale), c, spec_of(fmt)), fmt)
        codes = np.arange(fmt.code_count, dtype=np.uint8)
        assert_bits_equal(
            ORACLE.decode(codes, float32(scale), c, spec_of(fmt)),
            backend.decode(codes, float32(scale), c, spec_of(fmt)),
        )


@EACH
def test_counts_by_hand(backend):
    x = float32([[448, 464, 465, -1e30, np.inf, np.nan], [1e-3, -1e-4, 0, -0.0, 1e-45, 2.0**-9]])
    cast = backend.quantize(x, float32([1, 1]), None, spec_of(E4M3FN))
    assert cast.codes.tolist() == [[0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x7F], [0x01, 0x80, 0x00, 0x80, 0x00, 0x01]]
    assert cast.counts.saturated.tolist() == [2, 0]
    assert cast.counts.flushed.tolist() == [0, 2]
    assert cast.counts.nan.tolist() == [1, 0]
    assert cast.counts.inf.tolist() == [1, 0]
    assert_bits_equal(float32([1e30, 2.0**-9]), cast.amax)


@EACH
def test_saturation_is_counted_in_every_overflow_mode(backend):
    x = float32([1e30, -1e30, 500, 1])
    for policy, codes in {"ocp": [0x7E, 0xFE, 0x7E, 0x38], "cuda_nosat": [0x7F, 0xFF, 0x7F, 0x38]}.items():
        cast = backend.quantize(x, float32(1), None, spec_of(E4M3FN, policy))
        assert (codes, 3) == (cast.codes.tolist(), int(cast.counts.saturated))


@EACH
def test_a_product_that_overflows_float32_is_saturated(backend):
    cast = backend.quantize(float32([1e30, 1]), FLT_MAX, None, spec_of(E4M3FN))
    assert (cast.codes.tolist(), int(cast.counts.saturated), int(cast.counts.inf)) == ([0x7E, 0x7E], 2, 0)
    assert_bits_equal(float32(1e30), cast.amax)


@EACH
def test_a_tiny_tensor_under_the_largest_scale_has_finite_codes(backend):
    cast = backend.quantize(float32([1e-38, -1e-38]), FLT_MAX, None, spec_of(E4M3FN))
    assert (cast.codes.tolist(), int(cast.counts.saturated)) == ([0x46, 0xC6], 0)  # 3.4 -> 3.5


@EACH
def test_a_nan_made_by_arithmetic_is_positive_and_uncounted(backend):
    x = float32([np.inf, np.inf, NEGATIVE_NAN, -np.nan])
    center = float32([np.inf, 0, 0, np.inf])
    cast = backend.quantize(x, float32(0), center, spec_of(E4M3FN))
    assert cast.codes.tolist() == [0x7F, 0x7F, 0xFF, 0xFF]
    assert tuple(int(n) for n in (cast.counts.nan, cast.counts.inf, cast.counts.saturated, cast.counts.flushed)) == (
        2,
        2,
        0,
        0,
    )


@EACH
def test_a_nan_is_never_flushed_though_its_code_be_zero(backend):
    cast = backend.quantize(float32([np.nan, NEGATIVE_NAN, 0.1]), float32(1), None, spec_of(E2M1FN, "ml_dtypes"))
    assert (cast.codes.tolist(), int(cast.counts.flushed)) == ([8, 0, 0], 1)


@EACH
def test_without_a_centre_minus_zero_stays_and_with_one_it_goes(backend):
    spec, x, one = spec_of(E4M3FN), float32([-0.0, 0.0]), float32(1)
    codes = backend.quantize(x, one, None, spec).codes
    assert codes.tolist() == [0x80, 0x00]
    assert_bits_equal(x, backend.decode(codes, one, None, spec))
    assert_bits_equal(float32([0.0, 0.0]), backend.decode(codes, one, float32([0.0]), spec))
    assert backend.quantize(x, one, float32([0.0]), spec).codes.tolist() == [0x80, 0x00]


@EACH
def test_each_operation_is_rounded_on_its_own(backend):
    spec = spec_of(E4M3FN)
    # 1.0625 is the tie of 1.0 and 1.125; both exact results lie a little above it and round to it first.
    residual = backend.quantize(float32([1.0625]), float32(1), float32([-(2.0**-26)]), spec)
    product = backend.quantize(float32([1 + 2**-23]), float32(1.0625 - 2**-23), None, spec)
    assert [residual.codes.tolist(), product.codes.tolist()] == [[0x38], [0x38]]
    descale, shift = np.float32(1.1), float32([-1.1])
    expected = float32([np.float32(np.float32(1.125) * descale) + shift[0]])
    assert_bits_equal(expected, backend.decode(np.array([0x39], np.uint8), descale, shift, spec))
    fused = np.float32(1.125 * float(descale) + float(shift[0]))
    assert fused != expected[0]


@EACH
def test_decoded_nan_has_one_pattern(backend):
    codes = np.array([0x7F, 0xFF, 0x7E], np.uint8)
    out = backend.decode(codes, float32(np.inf), float32([-np.inf]), spec_of(E4M3FN))
    assert out.view(np.uint32).tolist() == [0x7FC00000] * 3


@AGAINST_ORACLE
@pytest.mark.parametrize("center_shape", [None, (16, 1, 24), (1, 1, 24), (16, 8, 1)])
def test_the_bits_of_a_replica_do_not_depend_on_how_many_there_are(backend, center_shape):
    rng = np.random.default_rng(11)
    x = rng.standard_normal((16, 8, 24)).astype(np.float32)
    scale = float32(rng.random(16) * 100)
    center = None if center_shape is None else float32(rng.standard_normal(center_shape))
    spec = spec_of(E4M3FN)
    together = backend.quantize(x, scale, center, spec)
    decoded = backend.decode(together.codes, scale, center, spec)
    seen = backend.observe(x, center, lead=1, mean_axes=(1,))
    for r in range(16):
        own = None if center is None else center[r] if center.shape[0] == 16 else center[0]
        alone = backend.quantize(x[r], scale[r], own, spec)
        assert_codes_equal(alone.codes, together.codes[r], E4M3FN)
        assert_bits_equal(alone.amax, together.amax[r])
        assert int(alone.counts.saturated) == int(together.counts.saturated[r])
        assert int(alone.counts.flushed) == int(together.counts.flushed[r])
        assert_bits_equal(backend.decode(alone.codes, scale[r], own, spec), decoded[r])
        one = backend.observe(x[r], own, lead=0, mean_axes=(0,))
        assert_bits_equal(one.amax, seen.amax[r])
        assert np.array_equal(one.sums.total, seen.sums.total[r])


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("shape", [(1, 1, 700), (1, 3, 300), (1, 9, 100), (2, 2, 600), (7, 4, 33)])
@pytest.mark.parametrize("own", ["none", "one", "replica", "channel", "row", "element"])
def test_threads_never_change_a_bit(monkeypatch, count, shape, own):
    """A row cut at 256 elements, rows, replicas: whatever there is enough of."""
    monkeypatch.setattr(parts, "GRAIN", 64)
    monkeypatch.setattr("qsim.codec.threads.GRAIN", 64)
    rng = np.random.default_rng(13)
    x = rng.standard_normal(shape).astype(np.float32)
    x[-1, -1, -5:] = [np.nan, np.inf, 1e-30, -0.0, 500]
    r, p, length = shape
    center_shape = {
        "one": (1, 1, 1),
        "replica": (r, 1, 1),
        "channel": (1, 1, length),
        "row": (r, p, 1),
        "element": shape,
    }
    center = None if own == "none" else float32(rng.standard_normal(center_shape[own]))
    scale, spec = float32(rng.random(r) * 100), spec_of(E4M3FN)
    with threads(1):
        cast, seen = NUMBA.quantize(x, scale, center, spec), NUMBA.observe(x, center, lead=1, mean_axes=(1, 2))
        back = NUMBA.decode(cast.codes, scale, center, spec)
    with threads(count):
        assert_same(cast, NUMBA.quantize(x, scale, center, spec), E4M3FN)
        assert_bits_equal(back, NUMBA.decode(cast.codes, scale, center, spec))
        again = NUMBA.observe(x, center, lead=1, mean_axes=(1, 2))
    assert_bits_equal(seen.amax, again.amax)
    assert np.array_equal(seen.nan_count, again.nan_count)
    assert np.array_equal(seen.inf_count, again.inf_count)
    assert np.array_equal(seen.sums.total, again.sums.total)


@AGAINST_ORACLE
def test_the_layout_of_x_and_codes_never_changes_a_bit(backend):
    rng = np.random.default_rng(12)
    x = rng.standard_normal((6, 10, 14)).astype(np.float32)
    center = rng.standard_normal((14, 1, 6)).astype(np.float32).T[:, :, ::2]
    scale = float32(np.arange(12))[::2]
    for view in (x[:, ::2, ::2], np.asfortranarray(x[:, ::2, ::2]), x[:, ::-2, :7]):
        expected = backend.quantize(np.array(view, order="C"), scale.copy(), center.copy(), spec_of(E2M1FN))
        assert_same(expected, backend.quantize(view, scale, center, spec_of(E2M1FN)), E2M1FN)
        codes = np.asfortranarray(expected.codes)
        plain = backend.decode(expected.codes, scale.copy(), center.copy(), spec_of(E2M1FN))
        assert_bits_equal(plain, backend.decode(codes, scale, center, spec_of(E2M1FN)))


@AGAINST_ORACLE
@pytest.mark.parametrize("length", [1, 15, 17, 31, 33, 528])
def test_the_amax_is_found_at_every_place(backend, length):
    for place in {0, 1 % length, length // 2, length - 1}:
        x = np.linspace(-1, 1, length, dtype=np.float32)
        x[place] = -7.25
        for center in (None, float32([0.25]), np.zeros(length, np.float32)):
            expected = np.float32(7.25 + (0.25 if center is not None and center.size == 1 and center[0] else 0))
            assert_bits_equal(expected, backend.quantize(x, float32(1), center, spec_of(E2M1FN)).amax[()])
            assert_bits_equal(expected, backend.observe(x, center, lead=0, mean_axes=None).amax[()])


@AGAINST_ORACLE
def test_pack_and_unpack_equal_the_oracle(backend):
    codes = np.random.default_rng(13).integers(0, 16, (3, 7), dtype=np.uint8)
    packed = ORACLE.pack(codes)
    assert packed.tolist() == backend.pack(codes).tolist()
    assert codes.tolist() == ORACLE.unpack(packed, 7).tolist() == backend.unpack(packed, 7).tolist()


@AGAINST_ORACLE
def test_matmul_is_the_exact_sum_rounded_once(backend):
    rng = np.random.default_rng(14)
    a, b = rng.standard_normal((2, 5, 9)).astype(np.float32), rng.standard_normal((9, 4)).astype(np.float32)
    expected = np.zeros((2, 5, 4))
    for n, t, o in np.ndindex(2, 5, 4):
        # products of float32 are exact in float64, and fsum adds them exactly
        expected[n, t, o] = math.fsum(float(p) * float(q) for p, q in zip(a[n, t], b[:, o], strict=True))
    assert_bits_equal(float32(expected), ORACLE.matmul(a, b))
    assert_bits_equal(float32(expected), backend.matmul(a, b))


def test_backends_are_found_by_name():
    assert [(n, isinstance(get_backend(n), Backend)) for n in ("oracle", "numba")] == [
        ("oracle", True),
        ("numba", True),
    ]
    assert get_backend("auto").name == "numba"
    assert all(get_backend(name).name == name for name in ("oracle", "numba"))
    with pytest.raises(UsageError, match="unknown backend 'gpu'; known: oracle, numba"):
        get_backend("gpu")
    for wrong in ([1, 2], {}, None, np.zeros(2)):
        with pytest.raises(UsageError, match=r"unknown backend .* known: oracle, numba"):
            get_backend(wrong)
    assert {"oracle", "numba"} <= set(BACKENDS)


def test_importing_the_contract_does_not_import_numba():
    program = "import sys, qsim.backends, qsim.codec, qsim.formats; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@EACH
def test_mistakes_are_named(backend):
    spec, x, one = spec_of(E4M3FN), np.zeros((2, 3), np.float32), float32(1)
    with pytest.raises(FormatError, match="x is float64; a backend takes float32"):
        backend.quantize(x.astype(float), one, None, spec)
    with pytest.raises(FormatError, match="center is float64"):
        backend.quantize(x, one, np.zeros(3), spec)
    with pytest.raises(UsageError, match=r"scale of shape \(3,\) does not fit x of shape \(2, 3\)"):
        backend.quantize(x, float32([1, 1, 1]), None, spec)
    with pytest.raises(UsageError, match=r"center of shape \(2,\) does not broadcast to x of shape \(2, 3\)"):
        backend.quantize(x, one, float32([1, 1]), spec)
    with pytest.raises(FormatError, match="float8_e8m0fnu has no sign or no zero"):
        backend.quantize(x, one, None, spec_of(E8M0FNU))
    with pytest.raises(FormatError, match="codes are int64"):
        backend.decode(np.zeros(2, np.int64), one, None, spec)
    with pytest.raises(FormatError, match=r"code 16 is outside 0\.\.15 of float4_e2m1fn"):
        backend.decode(np.array([16], np.uint8), one, None, spec_of(E2M1FN))
    with pytest.raises(UsageError, match=r"mean_axes \(0,\) of shape \(2, 3\): axes 1\.\.1 can be reduced"):
        backend.observe(x, None, lead=1, mean_axes=(0,))


def streams(count, seed=77):
    return tuple(RandomStream(seed, step=replica) for replica in range(count))


def spec_in(mode, fmt, policy="ocp", *, replicas=1, **choices):
    draws = streams(replicas) if mode is RoundMode.STOCHASTIC else ()
    return CastSpec(fmt=fmt, policy=POLICIES[policy].with_choices(rounding=mode, **choices), streams=draws)


@AGAINST_ORACLE
@pytest.mark.parametrize("mode", RoundMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    ("fmt", "policy"), [(E4M3FN, "ocp"), (E5M2, "ml_dtypes"), (E2M1FN, "cuda"), (E4M3FNUZ, "cuda_nosat")]
)
def test_quantize_in_every_mode_equals_the_oracle(backend, fmt, policy, mode):
    for seed, (shape, lead, center_shape) in enumerate(LAYOUTS):
        rng = np.random.default_rng(300 + seed)
        x = tensor(shape, seed)
        center = None if center_shape is None else float32(rng.standard_normal(center_shape))
        scale = float32(rng.random(shape[:lead]) * 30)
        spec = spec_in(mode, fmt, policy, replicas=math.prod(shape[:lead]), random_bits=8)
        assert_same(ORACLE.quantize(x, scale, center, spec), backend.quantize(x, scale, center, spec), fmt)


@AGAINST_ORACLE
@pytest.mark.parametrize("mode", [RoundMode.UP, RoundMode.STOCHASTIC], ids=["up", "stochastic"])
@pytest.mark.parametrize("scale", [FLT_MAX, 2.0**-149, 0.0, -2.0, np.inf, np.nan])
def test_extreme_scales_in_other_modes_equal_the_oracle(backend, scale, mode):
    x = np.concatenate([SPECIAL, -SPECIAL, tensor((20,), 3)])
    for center in (None, 0.5, np.inf, FLT_MAX):
        c = None if center is None else float32([center])
        spec = spec_in(mode, E5M2, "cuda_nosat")
        assert_same(ORACLE.quantize(x, float32(scale), c, spec), backend.quantize(x, float32(scale), c, spec), E5M2)


@EACH
def test_counts_in_other_modes_by_hand(backend):
    x = float32([449, 480, -1e30, 2.0**-11, -(2.0**-11), 1e-45, np.inf, np.nan])
    rows = {}
    for mode in (RoundMode.TOWARD_ZERO, RoundMode.UP, RoundMode.DOWN, RoundMode.TO_ODD):
        cast = backend.quantize(x, float32(1), None, spec_in(mode, E4M3FN))
        rows[mode] = (cast.codes.tolist(), int(cast.counts.saturated), int(cast.counts.flushed))
    assert rows == {
        RoundMode.TOWARD_ZERO: ([0x7E, 0x7E, 0xFE, 0x00, 0x80, 0x00, 0x7E, 0x7F], 2, 3),
        RoundMode.UP: ([0x7E, 0x7E, 0xFE, 0x01, 0x80, 0x01, 0x7E, 0x7F], 3, 1),
        RoundMode.DOWN: ([0x7E, 0x7E, 0xFE, 0x00, 0x81, 0x00, 0x7E, 0x7F], 2, 2),
        RoundMode.TO_ODD: ([0x7E, 0x7E, 0xFE, 0x01, 0x81, 0x01, 0x7E, 0x7F], 3, 0),
    }
    halved = backend.quantize(float32([2.0**-149, 1]), float32(2.0**-2), None, spec_in(RoundMode.UP, E4M3FN))
    assert (halved.codes.tolist(), int(halved.counts.flushed)) == ([0x00, 0x28], 1)  # the product is already 0


@EACH
def test_the_words_of_a_replica_do_not_depend_on_the_others(backend):
    x = np.random.default_rng(21).standard_normal((3, 4, 5)).astype(np.float32)
    scale = float32([1, 2, 3])
    spec = spec_in(RoundMode.STOCHASTIC, E4M3FN, replicas=3)
    together = backend.quantize(x, scale, None, spec)
    for r in range(3):
        alone = dataclasses.replace(spec, streams=spec.streams[r : r + 1])
        assert_codes_equal(backend.quantize(x[r], scale[r], None, alone).codes, together.codes[r], E4M3FN)
    plain = encode(x[1] * np.float32(2), E4M3FN, rounding="stochastic", stream=spec.streams[1])
    assert_codes_equal(plain, together.codes[1], E4M3FN)
    assert (backend.quantize(x[[0, 0, 0]], float32([1, 1, 1]), None, spec).codes.std(axis=0) > 0).any()


@EACH
def test_another_number_of_streams_than_replicas_is_refused(backend):
    x, scale = np.zeros((3, 4), np.float32), float32([1, 1, 1])
    with pytest.raises(UsageError, match="rounds by 'stochastic' and the cast has 1 streams for 3 replicas"):
        backend.quantize(x, scale, None, spec_in(RoundMode.STOCHASTIC, E4M3FN, replicas=1))
    with pytest.raises(UsageError, match="rounds by 'nearest_even' and the cast has 3 streams"):
        backend.quantize(x, scale, None, CastSpec(fmt=E4M3FN, policy=POLICIES["ocp"], streams=streams(3)))
    spec = spec_in(RoundMode.STOCHASTIC, E4M3FN)
    with pytest.raises(UsageError, match="stream is int; pass RandomStream"):
        backend.quantize(x, float32(1), None, dataclasses.replace(spec, streams=(7,)))


@EACH
def test_what_a_policy_refuses_is_named_with_its_index(backend):
    x = float32([[1, 2, 3], [4, 5, 6]])
    refusing = CastSpec(fmt=E2M1FN, policy=POLICIES["ocp"].with_choices(overflow="raise", nan="raise"))
    assert backend.quantize(x, float32([1, 1]), None, refusing).codes.tolist() == [[2, 4, 5], [6, 6, 7]]
    with pytest.raises(FormatError, match=r"^scaled x\[1, 2\] is 7\.5: it rounds beyond 6, the largest float4_e2m1fn"):
        backend.quantize(x, float32([1, 1.25]), None, refusing)
    with pytest.raises(FormatError, match=r"^scaled x\[0, 0\] is inf: it rounds beyond"):
        backend.quantize(float32([[1e30, 1]]), FLT_MAX, None, refusing)
    nan = CastSpec(fmt=E4M3FN, policy=POLICIES["ocp"].with_choices(nan="raise"))
    with pytest.raises(FormatError, match=r"^scaled x\[1\] is NaN and the policy refuses it in float8_e4m3fn"):
        backend.quantize(float32([1, np.inf]), float32(1), float32([np.inf]), nan)
    assert backend.quantize(float32([np.inf]), float32(1), None, nan).codes.tolist() == [0x7E]


def test_a_mean_over_too_many_elements_is_refused():
    x = np.broadcast_to(np.float32(1), (2**22 + 1,))
    with pytest.raises(UsageError, match="a mean over 4194305 elements"):
        NUMBA.observe(x, None, lead=0, mean_axes=(0,))
    full = NUMBA.observe(x[1:], None, lead=0, mean_axes=(0,)).sums
    assert (int(full.total[0]), int(full.count[0])) == (2**62, 2**22)
