"""The doors quantize and dequantize: axes, centres, rotations, packing, odd shapes, degenerate tensors, errors."""

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import qsim
from qsim.codec.hadamard import rotate
from qsim.codec.means import mean_of
from qsim.errors import FormatError, UsageError
from qsim.quant import Layout, StateKey
from qsim.quant.plain import CENTERS, NIBBLE_ORDERS, dequantize, lined_shape, quantize, unpacked_codes

NAMES = ("e4m3", "e5m2_row", "e4m3_col", "e2m1_1x128", "e4m3_128x128", "mxfp4_rceil", "mxfp8_floor", "nvfp4_te",
         "nvfp4_exact_16x16", "nvfp4_4over6")  # fmt: skip
SIGNS = qsim.hadamard_signs(5)


def ordinary(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 1.5).astype(np.float32)


def same(a, b):
    assert (a.shape, a.layout, a.recipe) == (b.shape, b.layout, b.recipe)
    for name in ("codes", "scales", "tensor_scale", "center", "signs", "amax"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


# ---- the steps, in their order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_both_backends_give_the_same_tensor_and_the_same_values(name):
    x = ordinary((3, 2, 48))
    x[0, 0, :5] = [np.nan, np.inf, 0, -0.0, 1e-40]
    for options in ({}, {"center": "channel"}, {"hadamard": SIGNS, "center": "token"}, {"rounding": "toward_zero"}):
        fast = quantize(x, name, backend="numba", counts=True, **options)
        slow = quantize(x, name, backend="oracle", counts=True, **options)
        same(slow, fast)
        assert slow.counts == fast.counts
        assert dequantize(slow, backend="oracle").tobytes() == dequantize(fast, backend="numba").tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_centre_is_the_mean_subtracted_before_and_added_after(name):
    x = ordinary((6, 32))
    for center, axes in (("tensor", (0, 1)), ("channel", (0,)), ("token", (1,))):
        q = quantize(x, name, center=center)
        c = mean_of(qsim.get_backend("numba").observe(x, None, lead=0, mean_axes=axes).sums)
        assert q.center.tobytes() == c.tobytes()
        residual = (x - c).astype(np.float32)
        plain = quantize(residual, name)
        assert plain.codes.tobytes() == q.codes.tobytes()
        assert np.abs(residual).max() == q.amax
        assert (dequantize(plain) + c).astype(np.float32).tobytes() == dequantize(q).tobytes()


def test_a_block_centre_is_the_mean_of_each_block_its_tail_included():
    x = ordinary((3, 37))
    q = quantize(x, "nvfp4_te", center="block")
    assert (3, 3) == q.center.shape
    for row in range(3):
        for b, part in enumerate((x[row, :16], x[row, 16:32], x[row, 32:])):
            assert np.float32(np.mean(part.astype(np.float64))) == pytest.approx(q.center[row, b], rel=2**-22)
    spread = np.repeat(q.center, 16, axis=1)[:, :37]
    assert quantize((x - spread).astype(np.float32), "nvfp4_te").codes.tobytes() == q.codes.tobytes()


def test_a_rotation_comes_after_the_centre_and_before_the_scale():
    x = ordinary((4, 32))
    q = quantize(x, "mxfp4_rceil", center="channel", hadamard=SIGNS)
    rotated = rotate((x - q.center).astype(np.float32), SIGNS)
    assert quantize(rotated, "mxfp4_rceil").codes.tobytes() == q.codes.tobytes()
    assert np.abs(dequantize(q) - x).max() < 1


def test_a_centre_of_ones_own_stands_in_for_a_delayed_one():
    x, last = ordinary((4, 32)), ordinary((1, 32), seed=9)
    q = quantize(x, "nvfp4_te", center=last)
    same(quantize((x - last).astype(np.float32), "nvfp4_te"), quantize((x - last).astype(np.float32), "nvfp4_te"))
    assert last.tobytes() == q.center.tobytes()
    assert (dequantize(quantize((x - last).astype(np.float32), "nvfp4_te")) + last).tobytes() == dequantize(q).tobytes()
    assert not np.signbit(quantize(x, "e2m1", center=np.float32(-0.0)).center).any()


def test_a_constant_tensor_has_no_residual_and_decodes_to_itself():
    x = np.full((8, 64), np.float32(0.1) * 1000, np.float32)
    for name in ("e2m1", "mxfp4_rceil", "nvfp4_te", "nvfp4_exact"):
        for center in CENTERS[:3]:
            q = quantize(x, name, center=center)
            assert 0.0 == q.amax
            assert not (q.codes & 7).any()
            assert x.tobytes() == dequantize(q).tobytes()


@pytest.mark.parametrize("side", [2**40, 2**62, 2**63])
def test_a_block_wider_than_the_tensor_takes_no_more_memory(side):
    x, row = ordinary((3, 33)), qsim.get_scale_recipe("e4m3_row")
    wide = replace(row, block=(1, side))
    for options in ({"center": "block"}, {"center": "block", "rounding": "up"}):
        expected = quantize(x, row, **options)
        for backend in ("numba", "oracle"):
            q = quantize(x, wide, backend=backend, **options)
            same(replace(expected, recipe=wide), q)
            assert dequantize(expected).tobytes() == dequantize(q, backend=backend).tobytes()


@pytest.mark.parametrize("backend", ["numba", "oracle"])
def test_a_tensor_amax_is_never_minus_zero(backend):
    q = quantize(np.zeros((1, 16)), "nvfp4_te", tensor_amax=-0.0, backend=backend)
    assert (0.0, False) == (q.tensor_scale, np.signbit(q.tensor_scale))
    assert bytes(64) == dequantize(q, backend=backend).tobytes()


def test_stochastic_rounding_takes_its_words_with_the_axis_last():
    x, stream = ordinary((32, 3)), qsim.RandomStream(seed=4)
    down = quantize(x, "mxfp4_rceil", axis=0, rounding="stochastic", stream=stream)
    along = quantize(np.ascontiguousarray(x.T), "mxfp4_rceil", rounding="stochastic", stream=stream)
    assert along.codes.T.tobytes() == down.codes.tobytes()
    assert not np.array_equal(along.codes, quantize(x.T, "mxfp4_rceil").codes)


# ---- shapes, dtypes, layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (0, 4), (3, 0), (2, 0, 3), (2, 3, 33)], ids=str)
def test_any_shape_comes_back(name, shape):
    x = ordinary(shape)
    for axis in range(max(len(shape), 1)):
        back = dequantize(quantize(x, name, axis=axis))
        assert (shape, np.float32) == (back.shape, back.dtype)
        assert (np.abs(back - x) <= 1).all()


def test_scales_have_the_shape_of_their_blocks():
    x = ordinary((2, 3, 40))
    shapes = {name: quantize(x, name).scales.shape for name in NAMES}
    assert () == shapes["e4m3"]
    assert (2, 3, 1) == shapes["e5m2_row"]
    assert (1, 40) == shapes["e4m3_col"]
    assert (1, 1) == shapes["e4m3_128x128"]
    assert (2, 3, 2) == shapes["mxfp4_rceil"]
    assert (2, 3, 3) == shapes["nvfp4_te"]
    assert (1, 3) == shapes["nvfp4_exact_16x16"]
    assert (3, 40, 1) == quantize(x, "mxfp8_floor", axis=0).scales.shape


@pytest.mark.parametrize("order", NIBBLE_ORDERS)
@pytest.mark.parametrize("length", [1, 31, 32, 33])
@pytest.mark.parametrize("axis", [0, 1])
def test_packing_is_only_a_layout(order, length, axis):
    x = ordinary((3, length) if axis == 1 else (length, 3))
    plain = quantize(x, "nvfp4_te", axis=axis)
    packed = quantize(x, "nvfp4_te", axis=axis, packed=True, order=order)
    assert dequantize(plain).tobytes() == dequantize(packed).tobytes()
    assert packed.codes.shape[axis] == qsim.codec.packed_length(length, order)


@pytest.mark.parametrize("order", NIBBLE_ORDERS)
@pytest.mark.parametrize("name", ["mxfp4_floor", "nvfp4_exact", "e2m1"])
def test_a_number_without_axes_is_packed_too(order, name):
    for value in (3.0, -6.0):
        q = quantize(np.float32(value), name, packed=True, order=order)
        back = dequantize(q)
        assert ((), value) == (back.shape, back)
        assert (1, 1) == unpacked_codes(q, lined_shape(q.shape, q.axis)).shape


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.int8, bool])
def test_other_dtypes_are_taken_as_float32(dtype):
    x = np.arange(-4, 28).astype(dtype)
    same(quantize(x.astype(np.float32), "mxfp8_rceil"), quantize(x, "mxfp8_rceil"))


def test_results_are_read_only_and_counts_come_on_request():
    q = quantize(ordinary((2, 16)), "nvfp4_te")
    assert q.counts is None
    assert not q.codes.flags.writeable
    assert not q.scales.flags.writeable


# ---- two tensors -------------------------------------------------------------------------------------------------


def test_a_tensor_equals_itself_alone_and_is_compared_by_bits_by_name():
    x = ordinary((4, 32))
    x[1, 3] = np.nan  # NaN differs from itself; its bits do not
    options = {"center": "channel", "packed": True}
    a, b = (quantize(x, "nvfp4_te", **options) for _ in range(2))
    assert a == a
    assert a != b
    assert 2 == len({a, b, a})
    assert a.same_bits(b)
    assert b.same_bits(a)
    assert quantize(x, "e4m3").same_bits(quantize(x, "e4m3", counts=True))


def test_one_bit_anywhere_is_another_tensor():
    x = ordinary((4, 32))
    q = quantize(x, "nvfp4_te", center="channel", hadamard=SIGNS)
    for name in ("codes", "scales", "tensor_scale", "center", "signs"):
        other = np.array(getattr(q, name))
        other.reshape(-1).view(np.uint8)[-1] ^= 1
        assert not q.same_bits(replace(q, **{name: other})), name
        assert q.same_bits(replace(q, **{name: np.array(getattr(q, name))})), name
    for change in (
        {"layout": Layout.PACKED_LOW_FIRST}, {"shape": (32, 4)}, {"axis": 0}, {"center_per_block": True},
        {"recipe": qsim.get_scale_recipe("nvfp4_exact")}, {"signs": None}, {"scales": q.scales.astype(np.float32)},
        {"codes": q.codes.reshape(2, 64)},
    ):  # fmt: skip
        assert not q.same_bits(replace(q, **change)), change
    zero = replace(q, center=np.zeros((1, 32), np.float32))
    assert not zero.same_bits(replace(q, center=-zero.center))
    with pytest.raises(UsageError, match="same_bits with ndarray"):
        q.same_bits(q.codes)


def test_stateful_tensors_are_the_same_where_they_decode_alike():
    recipe, backend = qsim.make_recipe("delayed", fmt=qsim.get_format("e4m3")), qsim.get_backend("numba")
    live, x = recipe.initial(StateKey()), ordinary((2, 4))
    first, second = (
        qsim.quantize_with_snapshot(
            x, qsim.begin_logical_quantization(live, op=qsim.OpId(logical_step=n), recipe=recipe), backend=backend
        )
        for n in (0, 1)
    )
    assert first.same_bits(second)
    scaled = replace(second.snapshot, descale=np.float32(2) * second.snapshot.descale)
    assert not first.same_bits(replace(second, snapshot=scaled))
    assert not first.same_bits(replace(second, snapshot=None))


# ---- degenerate tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_zeros_decode_to_zeros_and_have_a_finite_scale(name):
    x = np.zeros((4, 32), np.float32)
    q = quantize(x, name, counts=True)
    assert x.tobytes() == dequantize(q).tobytes()
    if q.scales.dtype == np.float32:
        assert np.isfinite(q.scales).all()
    assert q.counts.zero_scale == q.scales.size
    x[2, 5] = 1
    back = dequantize(quantize(x, name))
    assert not back[[0, 1, 3]].any()
    assert back[2, 5] == pytest.approx(1)


def test_a_tiny_amax_has_the_largest_scale_and_a_finite_code():
    q = quantize(np.full((1, 4), 1e-38, np.float32), "e4m3")
    assert np.finfo(np.float32).max == q.scales
    assert (q.codes < 0x7F).all()


def test_a_nan_spoils_its_own_block_only():
    x = ordinary((2, 64))
    x[0, 3] = np.nan
    for name, width in (("mxfp8_rceil", 32), ("nvfp4_te", 16)):
        back = dequantize(quantize(x, name))
        assert np.isnan(back[0, :width]).all()
        assert not np.isnan(back[0, width:]).any()
        assert not np.isnan(back[1]).any()


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"recipe": "nvfp4_tee"}, FormatError, "did you mean 'nvfp4_te'"),
        ({"axis": 2}, UsageError, "axis 2 does not exist"),
        ({"center": "row"}, UsageError, "center 'row' is unknown; known: tensor, channel, token, block"),
        ({"center": np.zeros(3)}, UsageError, "does not broadcast"),
        ({"center": np.zeros((1, 32)), "axis": 0}, UsageError, r"x of shape \(2, 32\) with its axis 0 last: \(32, 2\)"),
        (
            {"center": np.zeros(3), "x": np.zeros((4, 5, 6)), "axis": 1},
            UsageError,
            r"x of shape \(4, 5, 6\) with its axis 1",
        ),
        ({"hadamard": SIGNS, "axis": 0}, UsageError, r"\(2, 32\) .* blocks of 16 along axis 0, which has 2 elements: "),
        ({"center": "block", "recipe": "nvfp4_te_16x16"}, UsageError, "needs blocks of one row"),
        ({"packed": True, "recipe": "e4m3"}, FormatError, "packed=True needs 4-bit codes"),
        ({"packed": True, "order": "middle"}, FormatError, "middle"),
        ({"rounding": "stochastic"}, UsageError, "no stream was given"),
        ({"rounding": "sideways"}, FormatError, "sideways"),
        ({"hadamard": np.ones(8, np.float32)}, UsageError, "8"),
        ({"hadamard": qsim.hadamard_signs(1, size=32), "x": np.zeros((2, 40), np.float32)}, UsageError, "32"),
        ({"x": np.array(["a"])}, FormatError, "cannot be quantized"),
        ({"x": np.zeros(4, np.complex64)}, FormatError, "cannot be quantized"),
        ({"tensor_amax": -1.0}, UsageError, "tensor_amax"),
        ({"tensor_amax": 0.0, "x": np.ones((2, 32), np.float32)}, UsageError, "tensor_amax 0"),
        ({"tensor_amax": "a"}, UsageError, "tensor_amax 'a' is no number"),
        ({"tensor_amax": 1.0, "recipe": "e4m3"}, UsageError, "only for a two-level recipe"),
        ({"center": np.nan}, UsageError, "center holds NaN"),
        ({"center": {}}, UsageError, "center of type dict holds no real numbers"),
        ({"center": 1j}, UsageError, "center of type complex holds no real numbers"),
        ({"center": ["1.5"]}, UsageError, "center of type list holds no real numbers"),
        ({"center": np.array(["1.5"], object)}, UsageError, "center of type ndarray holds no real numbers"),
        ({"center": 10**400}, UsageError, "center holds NaN or Inf, or leaves float32"),
        ({"tensor_amax": 10**400}, UsageError, "tensor_amax leaves float32"),
        ({"tensor_amax": "3.5"}, UsageError, "tensor_amax '3.5' is no number"),
        ({"tensor_amax": np.complex64(1)}, UsageError, r"tensor_amax np.complex64\(1\+0j\) is no number"),
        ({"hadamard": [[1], [1, 2]]}, FormatError, "hadamard is no array"),
        ({"axis": 1.0}, UsageError, "axis 1.0 is no integer"),
        ({"x": [[1], [2, 3]]}, FormatError, "x is no array"),
        ({"x": np.ma.masked_array([1.0], [1])}, UsageError, "masked"),
        ({"rounding": "stochastic", "stream": 7}, UsageError, "stream is int"),
        ({"rounding": "stochastic", "stream": 7, "backend": "oracle"}, UsageError, "stream is int"),
        ({"recipe": "mxfp4"}, FormatError, "did you mean 'mxfp4_floor' or 'mxfp4_ceil'"),
        ({"backend": "gpu"}, UsageError, "unknown backend"),
        ({"backend": 3}, UsageError, "backend is int"),
        ({"backend": SimpleNamespace(quantize_blocks=3)}, UsageError, "backend is SimpleNamespace"),
        ({"backend": type(qsim.get_backend("numba"))}, UsageError, "backend is type"),
    ],
)
def test_a_mistake_gets_one_clear_error(options, error, words):
    arguments = {"x": np.zeros((2, 32), np.float32), "recipe": "nvfp4_te"} | options
    with pytest.raises(error, match=words):
        quantize(arguments.pop("x"), arguments.pop("recipe"), **arguments)


def test_what_quantize_did_not_make_is_not_decoded():
    with pytest.raises(UsageError, match="dequantize of ndarray"):
        dequantize(np.zeros(3, np.uint8))
    with pytest.raises(UsageError, match="backend is SimpleNamespace"):
        dequantize(quantize(np.zeros(3), "e4m3"), backend=SimpleNamespace(quantize_blocks=quantize))


def test_a_later_change_of_the_signs_changes_no_tensor():
    signs = np.array(SIGNS)
    q = quantize(ordinary((2, 32)), "nvfp4_te", hadamard=signs)
    before = dequantize(q)
    signs *= -1
    assert before.tobytes() == dequantize(q).tobytes()
    assert not q.tensor_scale.flags.writeable


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 4), (3, 0)])
def test_a_block_centre_of_nothing_is_nothing(shape):
    for name in ("mxfp4_rceil", "e4m3_row"):
        assert shape == dequantize(quantize(np.ones(shape, np.float32), name, center="block")).shape


def test_a_stateful_tensor_is_not_decoded_here():
    recipe = qsim.make_recipe("delayed", fmt=qsim.get_format("e4m3"))
    op = qsim.OpId(logical_step=0)
    snapshot = qsim.begin_logical_quantization(recipe.initial(StateKey()), op=op, recipe=recipe)
    tensor = qsim.quantize_with_snapshot(np.zeros((1, 2), np.float32), snapshot, backend=qsim.get_backend("numba"))
    with pytest.raises(UsageError, match="decode_for_consumer"):
        dequantize(tensor)
