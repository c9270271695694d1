"""Residuals about a stateful centre, encoded by a block recipe: the codec's own bits, replica by replica."""

import dataclasses

import numpy as np
import pytest

from qsim.arrays import same_bits
from qsim.backends.oracle import OracleBackend
from qsim.codec.scaled import dequantize_oracle, get_scale_recipe, quantize_oracle
from qsim.errors import ProtocolViolation, UsageError
from qsim.formats import E2M1FN, POLICIES, RoundMode
from qsim.quant import (
    CenterAxis,
    CenterSource,
    CentredDelayedScaling,
    Layout,
    NonFiniteRule,
    OpId,
    ScaleSource,
    begin_logical_quantization,
    decode_for_consumer,
    quantize_with_snapshot,
)
from qsim.quant.plain import dequantize, quantize
from qsim.sim import Env, ScheduleSpec, check, run
from tests.unit.centred_cases import NUMBA, OWNER, step
from tests.unit.sim_cases import WITH_GRADIENTS, case_of, env_of

ORACLE = OracleBackend()
ELEMENTS = [
    "nvfp4_te",
    "nvfp4_exact",
    "nvfp4_te_16x16",
    "mxfp4_rceil",
    "mxfp8_floor",
    "float4_e2m1fn",
    "float4_e2m1fn_row",
    "float4_e2m1fn_col",
    "float8_e4m3fn_128x128",
]


def recipe_of(elements, **options):
    elements = get_scale_recipe(elements)
    return CentredDelayedScaling(
        **({"fmt": elements.fmt, "elements": elements, "axis": CenterAxis.CHANNEL, "window": 2} | options)
    )


def tensor(n, shape=(2, 3, 40)):
    x = np.random.default_rng(n).standard_normal(shape) * 2.0**n + 3 * n
    x[..., 0, 1] = -0.0
    return x.astype(np.float32)


def grid_of(name, rest):
    """Where the scales of a tensor [rest] lie."""
    block = get_scale_recipe(name).block
    rows, columns = block.grid((int(np.prod(rest[:-1])), rest[-1]))
    if name == "float4_e2m1fn":
        return ()
    return (*rest[:-1], columns) if block.rows == 1 else (rows, columns)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rest", [(3, 40), (2, 2, 33), (5,)])
def test_codes_scales_and_decode_are_the_codecs_of_each_residual(name, rest):
    recipe, live = recipe_of(name), None
    live = recipe.initial(OWNER, (2,), len(rest))
    for n in range(2):
        x = np.random.default_rng(n).standard_normal((2, *rest)).astype(np.float32) + n
        snapshot, codes, decoded, live = step(recipe, live, x, n)
        r = x - snapshot.center
        assert (recipe.elements, x.shape, Layout.ONE_PER_BYTE) == (codes.recipe, codes.shape, codes.layout)
        assert (2, *grid_of(name, rest)) == codes.scales.shape
        for i in range(2):
            matrix = np.ascontiguousarray(r[i]).reshape(-1, rest[-1])
            expected = quantize_oracle(matrix, name)
            assert same_bits(expected.codes.reshape(rest), codes.codes[i])
            assert same_bits(expected.scales.reshape(codes.scales.shape[1:]), np.asarray(codes.scales[i]))
            assert same_bits(expected.amax, np.asarray(codes.amax[i]))
            if expected.tensor_scale is not None:
                assert same_bits(expected.tensor_scale, np.asarray(codes.tensor_scale[i]))
            assert (expected.counts.saturated, expected.counts.flushed) == (
                codes.counts.saturated[i], codes.counts.flushed[i],
            )  # fmt: skip
            back = dequantize_oracle(expected, name).reshape(rest)
            assert same_bits(back + np.broadcast_to(snapshot.center[i], rest), decoded[i])


@pytest.mark.parametrize("source", list(CenterSource), ids=lambda s: s.name)
@pytest.mark.parametrize("axis", list(CenterAxis))
def test_both_backends_and_any_number_of_replicas_give_the_same_bits(source, axis):
    recipe = recipe_of("nvfp4_te", source=source, axis=axis)
    together, oracle = (recipe.initial(OWNER, (2,)) for _ in range(2))
    alone = [recipe.initial(OWNER) for _ in range(2)]
    for n in range(2):
        x = tensor(n, (2, 2, 20))
        _, codes, decoded, together = step(recipe, together, x, n)
        _, theirs, back, oracle = step(recipe, oracle, x, n, ORACLE)
        assert same_bits(theirs.codes, codes.codes)
        assert same_bits(theirs.scales, codes.scales)
        assert same_bits(back, decoded)
        for i in range(2):
            _, one, single, alone[i] = step(recipe, alone[i], x[i], n)
            assert same_bits(one.codes, codes.codes[i])
            assert same_bits(one.scales, codes.scales[i])
            assert same_bits(one.tensor_scale, np.asarray(codes.tensor_scale[i]))
            assert same_bits(single, decoded[i])
            assert same_bits(alone[i].center, together.center[i])


def test_the_states_own_scale_touches_no_code_and_its_window_rolls():
    x = [tensor(n, (3, 40)) for n in range(3)]
    lives = {s: recipe_of("nvfp4_te", initial_scale=s).initial(OWNER) for s in (1.0, 64.0)}
    for n in range(3):
        found = {}
        for scale, live in lives.items():
            recipe = recipe_of("nvfp4_te", initial_scale=scale)
            _, codes, decoded, lives[scale] = step(recipe, live, x[n], n)
            found[scale] = (codes.codes, codes.scales, decoded, codes.amax)
        assert all(same_bits(a, b) for a, b in zip(found[1.0], found[64.0], strict=True))
        assert float(found[1.0][3]) == lives[1.0].amax_history[-1]
        assert same_bits(np.float32(6) / lives[1.0].amax_history.max(), lives[1.0].scale[()])


@pytest.mark.parametrize("lead", [(), (2,)], ids=["single", "replicas"])
@pytest.mark.parametrize("source", list(CenterSource), ids=lambda s: s.name)
def test_nothing_that_comes_out_can_be_written(source, lead):
    recipe = recipe_of("nvfp4_te", source=source, axis=CenterAxis.BLOCK)
    live = recipe.initial(OWNER, lead)
    snapshot, codes, _, after = step(recipe, live, tensor(0, (*lead, 3, 40)), 0)
    found = []
    for value in (live, snapshot, codes, codes.counts, after):
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            assert not isinstance(held, np.generic), field.name
            if isinstance(held, np.ndarray):
                found.append(field.name)
                assert not held.flags.writeable, field.name
    assert {"codes", "scales", "tensor_scale", "center", "amax"} <= set(found)
    assert (source is CenterSource.EMA) == ("center_seen" in found)


@pytest.mark.parametrize("center", list(CenterAxis))
@pytest.mark.parametrize("name", ["nvfp4_te", "mxfp4_rceil"])
def test_a_centre_in_hand_gives_the_bits_of_a_stateless_cast(name, center):
    x = tensor(1, (4, 50))
    width = get_scale_recipe(name).block.cols
    recipe = recipe_of(name, axis=center, source=CenterSource.CURRENT, block=width)
    snapshot, codes, decoded, _ = step(recipe, recipe.initial(OWNER), x, 0)
    plain = quantize(x, name, center=center.value)
    assert same_bits(plain.center, snapshot.center)
    assert same_bits(plain.codes, codes.codes)
    assert same_bits(plain.scales, codes.scales)
    assert same_bits(dequantize(plain), decoded)


def test_recompute_with_the_snapshot_gives_the_forwards_bits():
    recipe = recipe_of("nvfp4_te", source=CenterSource.EMA)
    live = recipe.initial(OWNER)
    kept = []
    for n in range(3):
        snapshot, codes, decoded, live = step(recipe, live, tensor(n, (3, 40)), n)
        kept.append((snapshot, codes, decoded))
    for n, (snapshot, codes, decoded) in enumerate(kept):
        again = quantize_with_snapshot(tensor(n, (3, 40)), snapshot, backend=NUMBA)
        assert same_bits(codes.codes, again.codes)
        assert same_bits(codes.scales, again.scales)
        assert same_bits(decoded, decode_for_consumer(again, op=OpId(n), backend=NUMBA))
        with pytest.raises(ProtocolViolation, match="given codes of step"):
            decode_for_consumer(again, op=OpId(n + 1), backend=NUMBA)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("axis", list(CenterAxis))
def test_a_constant_tensor_leaves_codes_0_and_decodes_to_itself(name, axis):
    """A thousand times 0.1: a mean by float32 sums would leave residuals, and blocks of full-range noise."""
    recipe = recipe_of(name, axis=axis, source=CenterSource.CURRENT)
    x = np.full((10, 100), 0.1, np.float32)
    _, codes, decoded, _ = step(recipe, recipe.initial(OWNER), x, 0)
    assert not codes.codes.any()
    assert 0 == codes.amax
    assert same_bits(x, decoded)


@pytest.mark.parametrize(("name", "code"), [("nvfp4_te", 0x7), ("mxfp8_floor", 0xFF)])
def test_nan_poisons_its_own_block_and_keeps_its_sign(name, code):
    """The block with a NaN decodes to NaN; the rest of its row, and its channel's centre, do not. E2M1 has no NaN."""
    recipe = recipe_of(name, source=CenterSource.CURRENT, nonfinite_rule=NonFiniteRule.FINITE)
    x = tensor(1, (3, 80))
    x[1, 40] = -np.float32("nan")
    snapshot, codes, decoded, _ = step(recipe, recipe.initial(OWNER), x, 0)
    bad = np.zeros((3, 80), bool)
    bad[1, 32 : 32 + recipe.elements.block.cols] = True
    assert bad.tolist() == np.isnan(decoded).tolist()
    assert {0x7FC00000} == set(decoded.view(np.uint32)[bad].tolist())
    assert np.isfinite(snapshot.center).all()
    assert (1, 0) == (codes.counts.nan, codes.counts.inf)
    assert code == codes.codes[1, 40]
    assert same_bits(quantize_oracle(np.where(np.isnan(x), x, x - snapshot.center), name).codes, codes.codes)


def test_a_channel_of_nan_leaves_the_others_as_they_are():
    recipe = recipe_of("float8_e4m3fn_col", source=CenterSource.CURRENT, nonfinite_rule=NonFiniteRule.FINITE)
    x = tensor(1, (6, 3))
    whole = step(recipe, recipe.initial(OWNER), x, 0)[2]
    x[:, 1] = np.nan
    snapshot, _, decoded, live = step(recipe, recipe.initial(OWNER), x, 0)
    assert same_bits(whole[:, [0, 2]], decoded[:, [0, 2]])
    assert np.isnan(decoded[:, 1]).all()
    assert 0 == snapshot.center[0, 1] == live.center[0, 1]


def test_a_tensor_without_columns_is_refused():
    recipe = recipe_of("nvfp4_te", axis=CenterAxis.TENSOR)
    snapshot = begin_logical_quantization(recipe.initial(OWNER, (2,), 0), op=OpId(0), recipe=recipe)
    with pytest.raises(UsageError, match=r"elements nvfp4_te of step 0 .* tensor \[2\] has no columns"):
        quantize_with_snapshot(np.ones(2, np.float32), snapshot, backend=NUMBA)


def test_the_policy_reaches_the_elements():
    """Scale 1 (amax 6): 0.75 and 1.75 are ties, to even 1 and 2; towards zero 0.5 and 1.5."""
    recipe = recipe_of("float4_e2m1fn", axis=CenterAxis.TENSOR)
    snapshot = begin_logical_quantization(recipe.initial(OWNER), op=OpId(0), recipe=recipe)
    x = np.array([[6, 1.75, 0.75]], np.float32)
    down = POLICIES["ocp"].with_choices(rounding=RoundMode.TOWARD_ZERO)
    assert [[7, 4, 2]] == quantize_with_snapshot(x, snapshot, backend=NUMBA).codes.tolist()
    assert [[7, 3, 1]] == quantize_with_snapshot(x, snapshot, backend=NUMBA, policy=down).codes.tolist()


# ---- simulation -----------------------------------------------------------------------------------------


def test_the_simulator_refuses_what_it_cannot_decode():
    options = {"load": lambda op: None, "backend": NUMBA, "policy": POLICIES["ocp"], "lead": (1,)}
    with pytest.raises(UsageError, match="recipe centred with elements nvfp4_te: the simulator decodes by one scale"):
        Env(recipe=recipe_of("nvfp4_te"), **options)
    with pytest.raises(UsageError, match="no event observes about a live centre"):
        Env(recipe=CentredDelayedScaling(fmt=E2M1FN, scale_source=ScaleSource.CURRENT), **options)


SIMULATED = [
    {"axis": axis, "source": source, "scale_source": scale, "block": 4}
    for axis in CenterAxis
    for source, scale in (
        (CenterSource.LAST, ScaleSource.DELAYED),
        (CenterSource.EMA, ScaleSource.DELAYED),
        (CenterSource.CURRENT, ScaleSource.DELAYED),
        (CenterSource.CURRENT, ScaleSource.CURRENT),
    )
]


@pytest.mark.parametrize("options", SIMULATED, ids=lambda o: f"{o['axis']} {o['source'].name} {o['scale_source'].name}")
def test_a_centred_recipe_of_every_axis_and_source_replays_without_a_violation(options):
    recipe = CentredDelayedScaling(fmt=E2M1FN, **options)
    case = case_of(recipe, spec=ScheduleSpec(steps=2, layers=2), body=WITH_GRADIENTS)
    trace = run(case, env_of(case))
    assert () == check(trace.records, scope=case.context.scope, unit=case.context.unit)
    casts = {}
    for seq, codes in trace.casts.items():
        assert same_bits(casts.setdefault(trace.records[seq].op, codes).codes, codes.codes)
    assert len(casts) < len(trace.casts)  # recompute's are among them
    first = min(trace.outputs)
    left, right = (trace.casts[used.cast] for used in trace.used[first])
    x, w = (decode_for_consumer(codes, op=codes.snapshot.op, backend=NUMBA) for codes in (left, right))
    assert same_bits(NUMBA.matmul(x, w), trace.outputs[first])
