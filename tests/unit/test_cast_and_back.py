"""A cast and its way back in one pass against the two passes, bit by bit."""

import numpy as np
import pytest

from qsim.arrays import FLT_MAX, same_bits
from qsim.backends import CastSpec
from qsim.backends.numba_backend import NumbaBackend
from qsim.backends.oracle import OracleBackend
from qsim.codec.rows_kernels import SPAN
from qsim.codec.scaled import SCALE_RECIPES
from qsim.codec.threads import threads
from qsim.conformance.compare import assert_bits_equal
from qsim.errors import FormatError, UsageError
from qsim.formats import E2M1FN, E4M3FN, E5M2, FORMATS, POLICIES
from qsim.philox import RandomStream
from qsim.quant import (
    CenterAxis,
    OpId,
    StateKey,
    decode_for_consumer,
    make_recipe,
    observe_for_future_state,
    quantize_and_decode,
    quantize_with_snapshot,
)
from qsim.quant.operations import freeze
from tests.backends import EACH
from tests.unit.test_kernel_spans import CENTERS, EXTREME, NEGATIVE_NAN, SHAPES, center_of, same

ORACLE, NUMBA = OracleBackend(), NumbaBackend()
ELEMENTS = {name: fmt for name, fmt in FORMATS.items() if fmt.signed}


def assert_one_pass_is_two(backend, x, scale, descale, center, spec, *, by=None):
    """The one pass of ``backend`` has the bits of the two passes of ``by``, by default its own."""
    by = backend if by is None else by
    expected = by.quantize(x, scale, center, spec)
    cast, values = backend.quantize_and_decode(x, scale, descale, center, spec)
    same(expected, cast)
    assert_bits_equal(by.decode(expected.codes, descale, center, spec), values)


@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("poison", "place"), [(None, 0), (np.nan, 0), (np.inf, -1)])
def test_spans_and_short_rows_equal_the_oracle(shape, center, poison, place):
    rng = np.random.default_rng(8)
    x = rng.standard_normal(shape).astype(np.float32)
    if poison is not None:
        x.reshape(-1)[place] = poison
    scale = (rng.random(shape[0]) * 50 + 200).astype(np.float32)
    spec, c = CastSpec(fmt=E4M3FN, policy=POLICIES["ocp"]), center_of(center, shape, rng)
    assert_one_pass_is_two(NUMBA, x, scale, np.float32(1) / scale, c, spec, by=ORACLE)


@pytest.mark.parametrize("fmt", [*ELEMENTS.values(), EXTREME["large in float32"]], ids=lambda fmt: fmt.name)
def test_every_binade_rounds_to_the_value_of_its_code(fmt):
    """2^18 patterns: every sign and exponent, the high bits of the mantissa, and low bits on both sides of each tie."""
    patterns = np.arange(1 << 18, dtype=np.uint32)
    low = np.array([0, 1, (1 << 14) - 1, 1 << 13], np.uint32)[patterns & 3]
    finite = ((patterns >> 2 << 16) | low).view(np.float32)
    finite = finite[np.isfinite(finite)]
    for policy in POLICIES:
        spec = CastSpec(fmt=fmt, policy=POLICIES[policy])
        assert_one_pass_is_two(NUMBA, finite, np.asarray(np.float32(1)), np.asarray(np.float32(1)), None, spec)


@pytest.mark.parametrize("scale", [1.0, -3.0, FLT_MAX, 2.0**-149, 0.0, np.inf, NEGATIVE_NAN])
@pytest.mark.parametrize("descale", [1.0, -0.3, FLT_MAX, 2.0**-149, 0.0, np.inf, NEGATIVE_NAN])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1FN], ids=lambda fmt: fmt.name)
def test_extreme_scales_and_centres_in_one_pass(fmt, descale, scale):
    rng = np.random.default_rng(9)
    patterns = rng.integers(0, 2**32, SPAN, np.uint32).view(np.float32)
    x = np.concatenate([rng.standard_normal(SPAN, np.float32), patterns])
    spec = CastSpec(fmt=fmt, policy=POLICIES["ocp"])
    some = rng.standard_normal(x.size).astype(np.float32)
    centers = (None, *(np.array([c], np.float32) for c in (0.0, 0.3, -FLT_MAX, np.inf, NEGATIVE_NAN)), some)
    for center in centers:
        assert_one_pass_is_two(NUMBA, x, np.asarray(np.float32(scale)), np.asarray(np.float32(descale)), center, spec)


@EACH
def test_one_pass_on_every_backend(backend):
    x = np.array([[1, -0.0, 3e4, np.nan], [0.1, 1e-9, -np.inf, 7]], np.float32)
    for fmt, policy in ((E4M3FN, POLICIES["ml_dtypes"]), (E2M1FN, POLICIES["ocp"].with_choices(rounding="up"))):
        for center in (None, np.array([[0.5]], np.float32)):
            spec, scale = CastSpec(fmt=fmt, policy=policy), np.array([3, 7], np.float32)
            assert_one_pass_is_two(backend, x, scale, np.float32(1) / scale, center, spec, by=ORACLE)


def test_two_passes_where_one_does_not_serve(monkeypatch):
    rng = np.random.default_rng(10)
    x, scale = rng.standard_normal((2, 300)).astype(np.float32), np.array([3, 7], np.float32)
    drawn = CastSpec(
        fmt=E4M3FN,
        policy=POLICIES["ocp"].with_choices(rounding="stochastic"),
        streams=tuple(RandomStream(5, step=replica) for replica in range(2)),
    )
    assert_one_pass_is_two(NUMBA, x, scale, scale, None, drawn)
    plain = CastSpec(fmt=E4M3FN, policy=POLICIES["ocp"])
    assert_one_pass_is_two(NUMBA, x, scale, np.asarray(np.float32(2)), None, plain)  # one descale for all replicas
    assert_one_pass_is_two(NUMBA, np.asfortranarray(x)[:, ::2], scale[::-1], scale[::-1], None, plain)
    monkeypatch.setattr("qsim.backends.parts.GRAIN", 64)
    with threads(2):
        assert_one_pass_is_two(NUMBA, x, scale, scale, None, plain)


@EACH
def test_mistakes_of_one_pass_are_named(backend):
    spec, x, one = CastSpec(fmt=E4M3FN, policy=POLICIES["ocp"]), np.zeros((2, 3), np.float32), np.ones((), np.float32)
    with pytest.raises(FormatError, match="x is float64"):
        backend.quantize_and_decode(x.astype(float), one, one, None, spec)
    with pytest.raises(FormatError, match="descale is float64"):
        backend.quantize_and_decode(x, one, np.ones(()), None, spec)
    with pytest.raises(UsageError, match=r"center of shape \(2,\) does not broadcast to x of shape \(2, 3\)"):
        backend.quantize_and_decode(x, one, one, np.ones(2, np.float32), spec)


@pytest.mark.parametrize("elements", [None, "mxfp4_rceil"])
@pytest.mark.parametrize("axis", [None, *CenterAxis])
def test_a_snapshot_casts_and_decodes_in_one_call(axis, elements):
    if axis is None:
        recipe = make_recipe("delayed", fmt=E2M1FN)
    else:
        chosen = None if elements is None else SCALE_RECIPES[elements]
        recipe = make_recipe("centred", fmt=E2M1FN, axis=axis, elements=chosen)
    x = np.random.default_rng(11).standard_normal((2, 8, 32)).astype(np.float32) + np.float32(1)
    live = recipe.initial(StateKey(0, 0, 0), (2,))
    first = freeze(live, op=OpId(0), recipe=recipe, observation=None)
    live = recipe.advance(live, observe_for_future_state(x, snapshot=first, recipe=recipe, backend=NUMBA))
    snapshot = freeze(live, op=OpId(1), recipe=recipe, observation=None)
    expected = quantize_with_snapshot(x, snapshot, backend=NUMBA)
    tensor, values = quantize_and_decode(x, snapshot, backend=NUMBA)
    assert_bits_equal(decode_for_consumer(expected, op=OpId(1), backend=NUMBA), values)
    assert expected.same_bits(tensor)
    assert same_bits(expected.amax, tensor.amax)
    same(expected.counts, tensor.counts)
    assert tensor.snapshot is snapshot
    assert not any(a.flags.writeable for a in (tensor.codes, tensor.amax, tensor.counts.nan, values))
