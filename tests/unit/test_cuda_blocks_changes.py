"""Tests of the tests: a CUDA kernel of scaled casts with one wrong step differs from the CPU backend somewhere."""

import numpy as np
import pytest

from cuda_kernels.blocks import BLOCKS_ENCODE, BLOCKS_FUSED, BLOCKS_MEASURE, BLOCKS_SCALE
from qsim.codec.scaled import SCALE_RECIPES, ScaleOrder
from qsim.codec.tables import decode_table
from qsim.formats import E4M3FN
from qsim.philox import RandomStream
from tests.mutants import mutant
from tests.unit.block_cases import MATRICES, NUMBA, OCP, close_calls, difference, just_below, matrix, mine, run, spread

pytestmark = pytest.mark.usefixtures("gpp")

DRAWN = OCP.with_choices(rounding="stochastic", random_bits=32)
STREAM = RandomStream(seed=7)
CALLS = mine((2, 8), order=ScaleOrder.FOUR_OVER_SIX, scale_max=256)


def quotients():
    """Blocks whose amax * 448 / 3.7 is a midpoint of E4M3, but for the rounding of that amax to float32."""
    values = np.unique(decode_table(E4M3FN)[:127].astype(np.float64))
    x = np.zeros((1, 16 * 126), np.float32)
    x[0, ::16] = ((values[1:] + values[:-1]) / 2 * np.float64(np.float32(3.7)) / 448).astype(np.float32)
    x[0, 1] = 3.7
    return x


CHANGES = [  # recipe, kernel, file, text, what stands there instead
    ("mxfp8_rceil", BLOCKS_FUSED, "scales.cuh", "(int)((seen + r.carry) >> 23)", "(int)(seen >> 23)"),
    ("mxfp8_floor", BLOCKS_FUSED, "elements.cuh", "min(magnitude, to.limit);",
     "min(magnitude, to.limit - (1u << to.shift));"),  # the largest number: nothing is beyond it
    ("mxfp4_even", BLOCKS_FUSED, "scales.cuh", "{254u, __uint_as_float(0x00400000u), 0.0}",
     "{254u, __uint_as_float(0x00800000u), 0.0}"),  # the subnormal 2^-127
    ("nvfp4_4over6", BLOCKS_FUSED, "scales.cuh", "to_four < to_six", "to_four <= to_six"),
    ("nvfp4_te", BLOCKS_FUSED, "scales.cuh", "d8 > 0.0f ? e : 0.0f", "e"),
    ("nvfp4_torchao", BLOCKS_FUSED, "elements.cuh", "return __float_as_uint(m) == QSIM_INF", "return m < 0.0f"),
    ("nvfp4_exact", BLOCKS_FUSED, "scales.cuh", "qsim_e4m3(qsim_to_odd(quotient))", "qsim_e4m3((float)quotient)"),
    ("float4_e2m1fn_1x128", BLOCKS_FUSED, "blocks.cu", "by < lanes;", "by < lanes / 2;"),
    (mine((3, 7)), BLOCKS_MEASURE, "blocks.cu", "if (row - own * block_rows == block_rows) ++own;", ""),
    ("float4_e2m1fn_col", BLOCKS_MEASURE, "blocks.cu", "walk.chunk != chunk && block_columns < columns", "false"),
    ("float8_e5m2", BLOCKS_SCALE, "scales.cuh", "return v < most ? v : most;", "return v;"),
    (mine((3, 7)), BLOCKS_ENCODE, "blocks.cu", "e == 0 || (first + e) % block_columns == 0", "e == 0"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "kernel", "file", "old", "new"), CHANGES)
def test_a_wrong_step_is_seen(monkeypatch, recipe, kernel, file, old, new):
    place = mutant(monkeypatch, kernel, file, old, new)
    recipe = SCALE_RECIPES[recipe] if isinstance(recipe, str) else recipe
    given = [*map(matrix, MATRICES), *(np.full((1, 16), 2.0**k, np.float32) for k in range(-3, 3)), quotients()]
    expected = [NUMBA.quantize_blocks(x, recipe, OCP) for x in given]
    assert any(difference(a, run(x, recipe, place=place)) for a, x in zip(expected, given, strict=True))


@pytest.mark.parametrize(
    ("recipe", "kernel", "old", "new"),
    [
        (SCALE_RECIPES["nvfp4_4over6"], BLOCKS_FUSED, "total[i] = __fadd_rn(total[i], error[e]);",
         "total[i] = __fadd_rn(total[i], error[3 - e]);"),
        (SCALE_RECIPES["nvfp4_4over6"], BLOCKS_FUSED, "if (turn == mine) {", "if (turn == lanes - 1 - mine) {"),
        (CALLS, BLOCKS_SCALE, "for (long long row = top_row; row < bottom; ++row)",
         "for (long long row = bottom - 1; row >= top_row; --row)"),
    ],
)  # fmt: skip
def test_another_order_of_a_sum_is_seen(monkeypatch, recipe, kernel, old, new):
    place = mutant(monkeypatch, kernel, "blocks.cu", old, new)
    x, amax = close_calls(), np.float32(1536)
    if recipe is CALLS:
        x = x.reshape(-1, 2, 2, 8).transpose(0, 2, 1, 3).reshape(-1, 16)
    expected = NUMBA.quantize_blocks(np.ascontiguousarray(x), recipe, OCP, tensor_amax=amax)
    assert difference(expected, run(x, recipe, place=place, tensor_amax=amax)) in ("codes", "scales")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("nvfp4_te", "if (ahead != 0u) qsim_philox(block + 1u", "if (ahead != 0u) qsim_philox(block"),
        ("nvfp4_te", "ahead & 2u ? own[i + 2]", "ahead & 2u ? own[i + 1]"),
        ("nvfp4_exact", "- (rest < 0.0 ? 1 : 0);", ";"),
        ("nvfp4_exact", "(unsigned)(fixed >> (1u + binade))", "(unsigned)(fixed >> 1u)"),
    ],
)
def test_a_wrong_draw_is_seen(monkeypatch, name, old, new):
    place, recipe = mutant(monkeypatch, BLOCKS_FUSED, "elements.cuh", old, new), SCALE_RECIPES[name]
    draws = STREAM.words(2048).astype(np.float64) / 2**32
    low = np.float64([0, 0.5, 1, 1.5, 2, 3, 4])[np.arange(2048) % 7]
    x = ((low + np.where(low < 2, 0.5, np.where(low < 4, 1, 2)) * draws) * 1.5).astype(np.float32)  # y = x / 1.5
    x = np.concatenate([np.nextafter(x, np.float32(end)) for end in (0, 9)] + [x]).reshape(3, -1)
    x[:, ::16] = 9
    seen = 0
    for y, amax in ((x, None), (spread((3, 35)), None), *just_below(STREAM)):
        expected = NUMBA.quantize_blocks(y, recipe, DRAWN, stream=STREAM, tensor_amax=amax)
        seen += difference(expected, run(y, recipe, DRAWN, place=place, stream=STREAM, tensor_amax=amax)) != ""
    assert seen
