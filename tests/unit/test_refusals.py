"""What a scaled cast refuses: the element to blame, by its place in the caller's tensor, alike on both backends."""

import pickle

import ml_dtypes
import numpy as np
import pytest

import qsim
from qsim.codec.scaled import quantize_oracle
from qsim.codec.scaled.fast import quantize_matrix
from qsim.codec.scaled.refusals import RefusedError
from qsim.errors import FormatError, UsageError
from qsim.formats import POLICIES
from qsim.philox import RandomStream
from qsim.quant import (
    CenterAxis,
    CentredDelayedScaling,
    OpId,
    StateKey,
    begin_logical_quantization,
    quantize_with_snapshot,
)

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
TWO_LEVEL = ("nvfp4_exact", "nvfp4_te", "nvfp4_torchao", "nvfp4_4over6", "nvfp4_te_16x16")
OTHERS = ("e4m3", "e5m2_row", "e4m3_col", "e2m1_128x128", "mxfp8_rceil", "mxfp4_floor")
EVERY = pytest.mark.parametrize("name", [*TWO_LEVEL, *OTHERS])


def message(x, name, **options):
    """What both backends say of a refused cast; None where neither refuses."""
    said, kinds = [], set()
    for backend in ("numba", "oracle"):
        try:
            qsim.quantize(x, name, backend=backend, **options)
            said.append(None)
        except FormatError as error:
            said.append(str(error))
            kinds.add(type(error))
    assert said[0] == said[1]
    assert kinds <= {FormatError}  # what knows only the matrix is named anew
    return said[0]


def with_values(places, x=X):
    x = x.copy()
    for place, value in places.items():
        x[place] = value
    return x


# ---- which element -----------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("axis", [0, 1])
def test_a_refused_nan_is_the_first_of_the_tensor_in_its_own_shape(name, axis):
    """Blocks of either axis hold finite elements before the NaN, and another NaN comes first with the axis last."""
    x = with_values({(1, 37): np.nan, (3, 5): np.nan})
    assert message(x, name, axis=axis, nan="raise").startswith("x[1, 37] is NaN and the policy refuses it in float")
    cube = x.reshape(4, 8, 8)
    for along in (0, 1, 2):
        assert message(cube, name, axis=along, nan="raise").startswith("x[1, 4, 5] is NaN")
    assert message(x[1], name, nan="raise").startswith("x[37] is NaN")
    assert message(np.float32(np.nan), name, nan="raise").startswith("x is NaN")


@EVERY
@pytest.mark.parametrize("axis", [0, 1])
def test_a_refused_inf_is_named_in_every_recipe(name, axis):
    x = with_values({(1, 37): -np.inf, (3, 5): np.inf}, np.ones((4, 64), np.float32))
    fmt = qsim.get_scale_recipe(name).fmt
    said = message(x, name, axis=axis, overflow="raise")
    assert said.startswith(f"x[1, 37] is -inf: it {'is' if name in TWO_LEVEL else 'rounds'} beyond {fmt.max:g}, the ")
    assert f"largest {fmt.name}, and the policy refuses overflow; clean the input" in said


@pytest.mark.parametrize("name", TWO_LEVEL)
def test_an_inf_makes_a_two_level_block_nan_and_is_never_called_nan_itself(name):
    x = with_values({(2, 40): np.inf})
    for options in ({"nan": "raise"}, {"missing_nan": "raise"}):
        said = message(x, name, **options)
        assert said.startswith("x[2, 40] is inf, so its whole block is NaN and the policy refuses it in float4_e2m1fn")
    assert message(with_values({(2, 39): np.nan}, x), name, nan="raise").startswith("x[2, 39] is NaN")
    assert message(with_values({(2, 39): np.nan}, x), name, overflow="raise").startswith(
        "x[2, 40] is inf: it is beyond"
    )


@pytest.mark.parametrize("name", OTHERS)
def test_where_an_inf_makes_no_nan_the_nan_rule_lets_it_pass(name):
    assert message(with_values({(2, 40): np.inf}), name, nan="raise") is None


def test_an_inf_in_a_block_that_a_nan_spoils_is_refused_too():
    x = with_values({(2, 33): np.nan, (2, 40): np.inf})
    assert message(x, "mxfp8_rceil", overflow="raise").startswith("x[2, 40] is inf: it rounds beyond 448")


def test_a_finite_element_that_clips_is_named_by_its_own_number():
    """MX floor: a block whose amax is 7 has scale 1, and 7 is a tie that goes to 8."""
    x = np.ones((2, 3, 64), np.float32)
    x[1, 0, 50], x[1, 2, 9] = 7, -7.5
    words = (
        "scaled, it rounds beyond 6, the largest float4_e2m1fn, and the policy refuses overflow; take a recipe that "
    )
    assert f"x[1, 0, 50] is 7.0: {words}" in message(x, "mxfp4_floor", overflow="raise")
    assert f"x[1, 0, 50] is 7.0: {words}" in message(x, "mxfp4_floor", overflow="raise", axis=1)
    assert f"x[1, 2, 9] is -7.5: {words}" in message(x, "mxfp4_floor", overflow="raise", rounding="down")[:200]
    x[0, 1, 1] = np.nan
    assert message(x, "mxfp4_floor", overflow="raise", nan="raise").startswith("x[0, 1, 1] is NaN")
    assert message(np.ones((2, 64)), "mxfp4_floor", overflow="raise", nan="raise") is None


@pytest.mark.parametrize(
    ("bits", "dtype"), [(0x7F81, ml_dtypes.bfloat16), (0x7F800001, np.float32), (2047 << 52 | 1, float)]
)
def test_a_signalling_nan_is_a_nan_without_a_warning(bits, dtype):
    x = np.ones((2, 32), dtype)
    word = np.dtype(f"u{x.itemsize}")
    x.view(word)[1, 3] = bits
    for name in ("e4m3", "nvfp4_te", "mxfp8_rceil"):
        assert message(x, name, nan="raise").startswith("x[1, 3] is NaN")
        quiet = qsim.quantize(np.where(x.view(word) == bits, np.nan, 1.0), name).codes.tobytes()
        assert [quiet, quiet] == [qsim.quantize(x, name, backend=b).codes.tobytes() for b in ("numba", "oracle")]
    with pytest.raises(UsageError, match="tensor_amax 0 for a tensor that is not zero"):
        qsim.quantize(x, "nvfp4_te", tensor_amax=0)


def test_a_float32_number_is_written_as_one():
    x = np.array([[1.9, 1.0]], np.float32)
    assert message(x, "mxfp4_floor", overflow="raise").startswith("x[0, 0] is 1.9: scaled, it rounds beyond 6")
    with pytest.raises(FormatError, match=r"^x\[0\] is 464\.1: it rounds beyond 448"):
        qsim.encode(np.array([464.1], np.float32), "e4m3", overflow="raise")


def test_only_rules_that_the_format_has_are_advised():
    inf = with_values({(0, 0): np.inf})
    assert message(inf, "e4m3", overflow="raise").endswith("clean the input, or choose overflow 'saturate' or 'ieee'")
    assert message(inf, "e2m1", overflow="raise").endswith("clean the input, or choose overflow 'saturate'")
    assert message(inf, "nvfp4_te", overflow="raise").endswith("overflow 'saturate', with which its block becomes NaN")


# ---- what came before the cast -----------------------------------------------------------------------------------


def test_with_a_centre_the_element_is_of_x_and_its_residual_is_called_that():
    x = with_values({(1, 37): np.nan, (3, 5): np.inf})
    assert message(x, "nvfp4_te", center="channel", nan="raise").startswith("x[1, 37] is NaN")
    assert message(x, "mxfp4_rceil", center="channel", overflow="raise", axis=0).startswith("x[3, 5] is inf: it")
    huge = np.float32(3e38)
    x = with_values({(1, 37): huge})
    said = message(x, "nvfp4_te", center=-huge, overflow="raise")
    assert said.startswith("x[1, 37] less its centre is inf: it is beyond 6")


@pytest.mark.parametrize("name", ["nvfp4_te", "mxfp8_rceil", "e4m3"])
def test_a_rotation_spreads_a_nan_and_the_element_of_x_is_named_all_the_same(name):
    signs = qsim.hadamard_signs(3)
    x = with_values({(1, 37): np.nan})
    assert message(x, name, hadamard=signs, nan="raise").startswith("x[1, 37] is NaN")
    for places in ([37], [37, 38], [32, 33, 34, 35]):  # four may cancel: every rotated element of the block is NaN
        x = with_values({(1, place): np.inf for place in places})
        said = message(x, name, hadamard=signs, center="token", overflow="raise")
        assert said.startswith(f"x[1, {places[0]}] is inf: it")
    said = message(np.full((1, 16), 3e38, np.float32) * signs, name, hadamard=signs, overflow="raise")
    assert said.startswith("x[0, 0] after the rotation is inf: it")


def test_what_left_float32_is_not_said_of_x_itself():
    x = np.array([1.0, 1e300, 2.0])
    assert message(x, "e4m3", overflow="raise").startswith("x[1] as float32 is inf: it rounds beyond 448")


def test_replicas_and_rows_of_a_stateful_cast_are_told_apart():
    elements = qsim.get_scale_recipe("nvfp4_te")
    recipe = CentredDelayedScaling(fmt=elements.fmt, elements=elements, axis=CenterAxis.CHANNEL)
    op, live = OpId(0), recipe.initial(StateKey(0, 0, 0), (2,), rest_ndim=2)
    snapshot = begin_logical_quantization(live, op=op, recipe=recipe)
    x = with_values({(1, 2, 30): np.nan}, np.ones((2, 3, 40), np.float32))
    policy = POLICIES["ocp"].with_choices(nan="raise")
    for backend in ("numba", "oracle"):
        with pytest.raises(FormatError, match=r"^x\[1, 2, 30\] is NaN"):
            quantize_with_snapshot(x, snapshot, backend=qsim.get_backend(backend), policy=policy)


# ---- the fast cast against the oracle ----------------------------------------------------------------------------


def refused(cast, *args, **options):
    """The elements that a cast refuses, all of them; none where it goes through."""
    try:
        cast(*args, **options)
    except RefusedError as error:
        return error.refused.elements, str(error)
    return np.zeros(args[0].shape, np.bool_), ""


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero", "up", "down", "odd", "stochastic"])
@EVERY
def test_the_same_elements_are_refused_as_by_the_oracle(name, rounding):
    """Ties and gaps beyond the largest value of blocks that clip, NaN and Inf beside them."""
    recipe, rng = qsim.get_scale_recipe(name), np.random.default_rng(3)
    steps = rng.choice([5.0, 6.0, 6.5, 6.999, 7.0, 7.001, 7.5, 8.0, 448.0, 463.9, 464.0, 464.1, 479.9, 480.0], (3, 50))
    x = (steps * rng.choice([-1.0, 1.0], (3, 50))).astype(np.float32)
    x[0, 5], x[1, 40], x[2, 48], x[2, 49] = np.nan, np.inf, -np.inf, np.nan
    stream = RandomStream(seed=2) if rounding == "stochastic" else None
    policy = POLICIES["ocp"].with_choices(rounding=rounding, overflow="raise", nan="raise")
    for amax in (None, np.float32(100)) if name in TWO_LEVEL else (None,):  # 100: most two-level elements clip
        expected, said = refused(quantize_oracle, x, recipe, policy=policy, stream=stream, tensor_amax=amax)
        actual = refused(quantize_matrix, x, recipe, policy=policy, stream=stream, tensor_amax=amax)
        assert expected.tolist() == actual[0].tolist()
        assert said == actual[1]
        assert expected[[0, 1, 2, 2], [5, 40, 48, 49]].all()
        counts = quantize_oracle(x, recipe, policy=POLICIES["ocp"].with_choices(rounding=rounding), stream=stream,
                                 tensor_amax=amax).counts  # fmt: skip
        assert counts.saturated + 4 == int(expected.sum())


def test_a_refusal_survives_the_way_between_processes():
    with pytest.raises(RefusedError) as caught:
        quantize_oracle(with_values({(1, 2): np.nan}), "e4m3", policy=POLICIES["ocp"].with_choices(nan="raise"))
    back = pickle.loads(pickle.dumps(caught.value))
    assert str(caught.value) == str(back)
    assert str(back).startswith("x[1, 2] is NaN")
