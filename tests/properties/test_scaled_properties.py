"""Properties of scaled casts: layouts change no bit, errors stay within what the element's steps allow."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import qsim
from qsim.codec.scaled import SCALE_RECIPES

NEVER_CLIPS = ("float4_e2m1fn", "float8_e4m3fn_1x128", "float8_e5m2_row", "mxfp4_rceil", "mxfp8_rceil", "nvfp4_exact",
               "nvfp4_te", "nvfp4_torchao")  # fmt: skip
CENTERS = st.sampled_from([None, "tensor", "channel", "token"])
ULP = 2.0**-23


@st.composite
def matrices(draw):
    """Ordinary numbers of one scale about an offset that may be far larger; float32 [rows, columns]."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    seed, offset, size = draw(st.integers(0, 2**32 - 1)), draw(st.integers(-12, 12)), draw(st.integers(-20, 20))
    x = np.random.default_rng(seed).standard_normal((rows, columns)) + 2.0**offset
    return (x * 2.0**size).astype(np.float32)


def largest_step(fmt):
    values = [fmt.magnitude(code) for code in range(fmt.max_code + 1)]
    return max(b - a for a, b in itertools.pairwise(values))


def decode_scales(q):
    """What one unit of the element format stands for, per element."""
    recipe, rows = q.recipe, q.shape[0]
    if q.scales.dtype == np.float32:
        unit = 1 / q.scales.astype(np.float64)
    elif recipe.name.startswith("mx"):
        unit = qsim.decode(q.scales, "e8m0").astype(np.float64)
    else:
        unit = qsim.decode(q.scales, "e4m3").astype(np.float64) * float(q.tensor_scale) / 2688
    unit = unit.reshape(rows if recipe.block.rows == 1 else 1, -1)
    width = recipe.block.cols or q.shape[1]
    return np.repeat(unit, width, axis=1)[:, : q.shape[1]]


@pytest.mark.parametrize("name", NEVER_CLIPS)
@given(x=matrices(), center=CENTERS)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_a_centred_tensor_decodes_within_half_a_step_and_the_roundings_of_its_centre(name, x, center):
    """|decode - x| <= half the largest step of the elements, scaled, plus one rounding each of x - c and v + c.

    An NVFP4 scale may round down by 1/16 of itself: the largest element then saturates, which costs less than half
    the step from 4 to 6. Its own float32 chain adds a few parts in 2^23 of the residual.
    """
    q = qsim.quantize(x, name, center=center)
    back = qsim.dequantize(q).astype(np.float64)
    c = 0.0 if q.center is None else q.center.astype(np.float64)
    residual = np.abs(x - c)
    bound = largest_step(q.recipe.fmt) / 2 * decode_scales(q) + ULP * (4 * residual + np.abs(x) + np.abs(c))
    assert (np.abs(back - x) <= bound).all()


@pytest.mark.parametrize("name", ["float8_e4m3fn_col", "mxfp8_even", "nvfp4_te", "nvfp4_exact_16x16"])
@given(x=matrices(), center=CENTERS, packed=st.booleans())
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_strides_signs_of_strides_and_read_only_memory_change_no_bit(name, x, center, packed):
    packed = packed and "fp4" in name
    expected = qsim.quantize(x, name, center=center, packed=packed)
    wide = np.zeros((x.shape[0] * 2, x.shape[1] * 3), np.float32)
    wide[::2, ::-3] = x
    wide.setflags(write=False)
    for same in (np.asfortranarray(x), wide[::2, ::-3], x[::-1][::-1]):
        actual = qsim.quantize(same, name, center=center, packed=packed)
        assert expected.codes.tobytes() == actual.codes.tobytes()
        assert expected.scales.tobytes() == actual.scales.tobytes()


@pytest.mark.parametrize("name", ["float8_e5m2", "mxfp4_floor", "nvfp4_torchao", "nvfp4_4over6"])
@given(x=matrices())
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_the_axis_is_only_a_view(name, x):
    down = qsim.quantize(x.T, name, axis=0)
    along = qsim.quantize(x, name)
    assert along.codes.T.tobytes() == down.codes.tobytes()
    assert along.scales.tobytes() == down.scales.tobytes()
    assert qsim.dequantize(along).T.tobytes() == qsim.dequantize(down).tobytes()


@pytest.mark.parametrize("name", ["mxfp4_rceil", "mxfp8_rceil", "mxfp6_e3m2_rceil"])
@given(x=matrices())
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_a_decoded_tensor_quantizes_to_values_it_already_has(name, x):
    """Power-of-two scales never move a value that is on the grid: a second cast decodes to the same numbers."""
    once = qsim.dequantize(qsim.quantize(x, name))
    assert once.tobytes() == qsim.dequantize(qsim.quantize(once, name)).tobytes()


def test_every_recipe_in_these_properties_exists():
    assert set(NEVER_CLIPS) <= set(SCALE_RECIPES)
