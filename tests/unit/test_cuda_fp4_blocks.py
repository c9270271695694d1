"""Sums of FP4 products under block scales: emulated, equal to the CPU's exact_per_block, order of blocks included."""

import numpy as np
import pytest

import cuda_kernels._kernel as kernels
import qsim
from cuda_kernels import host, source
from cuda_kernels._place import HOST, Host
from cuda_kernels.fp4_blocks import BLOCKS, FP4_BLOCKS, fp4_blocks
from qsim.codec import pack
from qsim.codec.tables import decode_table
from qsim.formats import E2M1FN, E4M3FN, E8M0FNU
from qsim.gemm.exact_scaled import exact_oracle
from qsim.gemm.products import accumulate, part
from qsim.gemm.scaled import ScaledOperand
from qsim.quant.products import _side
from tests.places import Given, launch, launch_at, played_device

pytestmark = pytest.mark.usefixtures("gpp")

KINDS = {E8M0FNU.name: "e8m0", E4M3FN.name: "e4m3"}
FORMATS = {"e8m0": E8M0FNU, "e4m3": E4M3FN}
PAIRS = [(a, b) for a in BLOCKS for b in BLOCKS]
RECIPES = [name for name in qsim.SCALE_RECIPES if name.startswith(("mxfp4", "nvfp4"))]
SHAPES = [(1, 1, 1), (3, 5, 7), (16, 8, 32), (64, 64, 64), (65, 70, 129), (130, 20, 96), (2, 150, 31), (66, 3, 160)]


def on_device(a, b, place=None):
    return launch_at(
        place, fp4_blocks, pack(a.codes), pack(b.codes), a.codes.shape[1], a.scale_codes, b.scale_codes,
        kinds=(KINDS[a.scale_format], KINDS[b.scale_format]), extents=(a.extent[0], b.extent[0]),
    )  # fmt: skip


def on_cpu(a, b):
    return accumulate(a, b, "exact_per_block").acc


def agree(a, b, place=None):
    expected, got = on_cpu(a, b), on_device(a, b, place)
    assert got.dtype == np.float32
    return expected.tobytes() == got.tobytes()


def operand(codes, scales, kind, rows=1):
    """The operand of codes [M, K] and scale codes [ceil(M / rows), blocks]."""
    scales = np.ascontiguousarray(scales, np.uint8)
    fmt = FORMATS[kind]
    return ScaledOperand(
        codes=np.asarray(codes, np.uint8), fmt=E2M1FN, row=np.ones(len(codes)),
        block=decode_table(fmt)[scales].astype(np.float64), extent=(rows, BLOCKS[kind]), scale_codes=scales,
        scale_format=fmt.name,
    )  # fmt: skip


def drawn(shape, kinds, scales, rows=(1, 1), seed=0):
    """Random codes; scale codes of a and b drawn from ``scales``."""
    rng = np.random.default_rng(seed + sum(shape))
    made = []
    for count, kind, own, extent in zip(shape[:2], kinds, scales, rows, strict=True):
        grid = (-(-count // extent), -(-shape[2] // BLOCKS[kind]))
        made.append(operand(rng.integers(0, 16, (count, shape[2])), rng.choice(own, grid), kind, extent))
    return made


def quantized(shape, names, seed=0):
    rng = np.random.default_rng(seed + sum(shape))
    x, w = ((rng.standard_normal((n, shape[2])) * np.exp(2 * rng.standard_normal((n, 1)))) for n in shape[:2])
    if shape[2] > 40:
        w[:, -1] = -w[:, 0]  # products that cancel
        x[:, -1] = x[:, 0]
        x[0] = 0
        w[0, :16] = 0
    a, b = qsim.quantize(np.float32(x), names[0]), qsim.quantize(np.float32(w), names[1], axis=1)
    return _side(a, "a", -1).operand, _side(b, "b", 1).operand


# ---- equal to the CPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(5, 6, 33), (70, 40, 200)])
def test_operands_of_every_recipe_have_the_accumulator_of_the_cpu(name, shape):
    assert agree(*quantized(shape, (name, name)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "names",
    [("mxfp4_floor", "nvfp4_te"), ("nvfp4_te_16x16", "mxfp4_even"), ("nvfp4_torchao", "nvfp4_exact_16x16"),
     ("mxfp4_rceil", "mxfp4_floor")],
)  # fmt: skip
def test_mixtures_of_recipes(names, shape):
    assert agree(*quantized(shape, names))


HOSTILE = {"e8m0": [0, 1, 2, 12, 68, 69, 100, 127, 128, 185, 186, 240, 242, 243, 253, 254, 255],
           "e4m3": [0, 1, 7, 8, 0x38, 0x41, 0x7D, 0x7E, 0x7F]}  # fmt: skip


@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("nan", [False, True])
def test_hostile_scales(kinds, nan):
    """Zero, the least and largest, NaN: partials are subnormal, 0 and Inf, and Inf - Inf is NaN."""
    scales = [own if nan else own[:-1] for own in (HOSTILE[kind] for kind in kinds)]
    a, b = drawn((70, 66, 145), kinds, scales)
    expected = on_cpu(a, b)
    if kinds == ("e8m0", "e8m0") or nan:
        assert np.isnan(expected).any()
        assert set(expected[np.isnan(expected)].view(np.uint32)) == {0x7FC00000}
    assert expected.tobytes() == on_device(a, b).tobytes()


@pytest.mark.parametrize("kinds", PAIRS)
def test_every_pair_of_scale_codes_has_its_partial(kinds):
    """One block under each pair; at full scale, half scale and as random numbers."""
    codes = np.random.default_rng(3).integers(0, 16, (256, 16))
    codes[::3] = 7
    codes[1::3, 1:] = 0
    sides = [operand(codes, np.arange(256)[:, None], kind) for kind in kinds]
    assert agree(*sides)


def test_scales_that_float32_products_hold_take_the_plain_path_with_the_same_bits():
    rng = np.random.default_rng(4)
    codes = np.concatenate([rng.integers(0, 16, (58, 128)), np.full((59, 128), 7)])
    scales = rng.permutation(np.repeat(np.arange(69, 186), 4)).reshape(117, 4)
    scales[60:64], scales[64:70] = 185, 69  # the largest and the least that are plain, at full scale
    assert agree(operand(codes, scales, "e8m0"), operand(codes[::-1], scales[::-1], "e8m0"))


@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("rows", [(16, 1), (1, 16), (16, 16), (7, 200), (130, 3)])
def test_rows_that_share_scales(kinds, rows):
    plain = {"e8m0": np.arange(120, 134), "e4m3": np.arange(0x20, 0x50)}
    assert agree(*drawn((130, 67, 81), kinds, [plain[kind] for kind in kinds], rows))


@pytest.mark.parametrize("kinds", PAIRS)
def test_the_definition_in_rationals(kinds):
    a, b = drawn((4, 3, 70), kinds, [HOSTILE[kind] for kind in kinds], seed=9)
    width = min(BLOCKS[kind] for kind in kinds)
    acc = np.zeros((4, 3), np.float32)
    for start in range(0, 70, width):
        partial = exact_oracle(*(part(x, start, min(start + width, 70)) for x in (a, b)))
        with np.errstate(all="ignore"):
            acc = (acc + partial).astype(np.float32)
    acc[np.isnan(acc)] = np.uint32(0x7FC00000).view(np.float32)
    assert acc.tobytes() == on_device(a, b).tobytes()


def test_public_mistakes():
    """facts: E8M0 7F is 1; 00 is 2^-127, not 0; each block has its own scale; 128 x 0.5 x 2."""
    ones = np.full((1, 64), 2)
    cases = [([127, 127], [127, 127], 64), ([0, 0], [254, 254], 64), ([127, 128], [127, 127], 96)]
    for left, right, value in cases:
        assert on_device(operand(ones, [left], "e8m0"), operand(ones, [right], "e8m0"))[0, 0] == value
    assert on_device(operand(ones, [[0x38, 0x40, 0x30, 0]], "e4m3"), operand(ones, [[127, 128]], "e8m0")) == 64


@pytest.mark.parametrize("kinds", PAIRS)
def test_strides_addresses_padding_and_the_grid_do_not_matter(kinds):
    a, b = drawn((130, 70, 127), kinds, [HOSTILE[kind][:-1] for kind in kinds])
    expected = on_cpu(a, b).tobytes()
    for blocks in (1, 4, 20):
        assert expected == on_device(a, b, Host(blocks=(blocks, 1))).tobytes()
    left, right = pack(a.codes), pack(b.codes)
    left[:, -1] |= 0x70  # the nibble behind an odd depth
    shifted = np.zeros(left.size + 1, np.uint8)[1:].reshape(left.shape)
    shifted[...] = left
    for codes in (shifted, np.asfortranarray(left)):
        got = launch(
            fp4_blocks, codes, right, 127, np.asfortranarray(a.scale_codes), b.scale_codes[::-1][::-1], kinds=kinds
        )
        assert expected == got.tobytes()


def test_the_device_launcher_passes_the_right_arguments(monkeypatch):
    for kinds in PAIRS:
        a, b = drawn((70, 20, 47), kinds, [HOSTILE[kind] for kind in kinds], (16, 1))
        assert agree(a, b, played_device(monkeypatch))


# ---- what would be seen ---------------------------------------------------------------------------------------------


def ordered(kind):
    """Four blocks whose partials are 0, u, u 2^-24, -u: 0 where they are added in ascending k, else u 2^-24."""
    width = BLOCKS[kind]
    codes = np.zeros((1, 4 * width), np.uint8)
    codes[0, [width, 2 * width, 3 * width]] = 2, 2, 10  # 1, 1, -1
    scales = {"e8m0": [127, 139, 127, 139], "e4m3": [0x38, 0x78, 0x18, 0x78]}[kind]
    return operand(codes, [scales], kind), operand(np.where(codes != 0, 2, 0), [scales], kind)


def changed(monkeypatch, kinds, file, *pairs):
    """The place of a kernel whose text was changed."""
    text = source(file)
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    kernel = FP4_BLOCKS[kinds]
    monkeypatch.setattr(kernels, "source", lambda name: text if name == file else source(name))
    kept = [x for x in kernel.text.split("\n") if not x.startswith("QSIM_FP4_ENTRY(") or f"({kernel.entry}," in x]
    return Given(
        made=host.build("\n".join(kept), kernel.entry)
    )  # without the other entries: it builds in half the time


@pytest.mark.parametrize(("kind", "other"), [("e8m0", 1.0), ("e4m3", 2.0**-8)])
def test_blocks_are_added_in_ascending_k(kind, other):
    a, b = ordered(kind)
    assert on_device(a, b)[0, 0] == 0
    backwards = [operand(x.codes[:, ::-1], x.scale_codes[:, ::-1], kind) for x in (a, b)]
    assert on_device(*backwards)[0, 0] == other == on_cpu(*backwards)[0, 0]


HALVES = ("for (int half = 0; half < SHARE; ++half)", "for (int half = SHARE - 1; half >= 0; --half)")
FRAGMENTS = ("for (int k = 0; k < 2; ++k)", "for (int k = 1; k >= 0; --k)")
STAGES = ("    qsim_fetch(side.codes, row,", "    first = depth / 2 - 32 - first / 32 * 32 + first % 32;\n"
          "    qsim_fetch(side.codes, row,")  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [("e8m0", (FRAGMENTS,)), ("e8m0", (STAGES,)), ("e4m3", (HALVES,)), ("e4m3", (HALVES, FRAGMENTS))],
)
def test_a_text_that_adds_in_another_order_is_seen(monkeypatch, kind, pairs):
    a, b = ordered(kind)
    other = changed(monkeypatch, (kind, kind), "fp4_blocks.cu", *pairs)
    assert on_device(a, b, other)[0, 0] != 0
    few = drawn((16, 16, 4 * BLOCKS[kind]), (kind, kind), [[127]] * 2 if kind == "e8m0" else [[0x38]] * 2)
    assert agree(*few, other)  # where every sum is exact the order does not show


SAME = [[*range(120, 134)]] * 2
NEAR = [[*range(0x20, 0x50)]] * 2
FAR = [[0, 1, 30, 127, 200, 253, 254]] * 2


@pytest.mark.parametrize(
    ("kinds", "scales", "file", "old", "new"),
    [
        (("e4m3", "e4m3"), NEAR, "mma.cuh", "left[g + 8 * (i % 2)][16 * (i / 2)", "left[g + 8 * (i / 2)][16 * (i % 2)"),
        (("e4m3", "e4m3"), NEAR, "mma.cuh", "right[16 * i + 4 * t + byte][g]", "right[4 * t + 3 - byte][g]"),
        (("e4m3", "e4m3"), NEAR, "fp4_blocks.cu", "[2 * half], rows_of_a[m][2 * half + 1]",
         "[half], rows_of_a[m][half + 2]"),
        (("e4m3", "e4m3"), NEAR, "fp4_blocks.cu", "columns_of_b[n][half]", "columns_of_b[n][1 - half]"),
        (("e4m3", "e4m3"), NEAR, "fp4_blocks.cu", "(SHARE * k + half)", "(SHARE * k)"),  # the scale of a neighbour
        (("e4m3", "e4m3"), NEAR, "fp4_blocks.cu", "scales_a[16 * m + 8]", "scales_a[16 * m]"),
        (("e4m3", "e4m3"), NEAR, "fp4_blocks.cu", "scales_b[8 * n + i % 2]", "scales_b[8 * n + i / 2]"),
        (("e4m3", "e4m3"), NEAR, "fp4_blocks.cu", "true, A, B>(left, right, left_scales, right_scales",
         "true, A, B>(left, right, right_scales, left_scales"),  # sides
        (("e4m3", "e4m3"), NEAR, "fp4_blocks.cu", "<< 20), 0x1p120f", "<< 20), 0x1p121f"),
        (("e8m0", "e8m0"), SAME, "fp4_blocks.cu", "own[k / QSIM_BLOCK<KIND>]", "own[k / 64]"),
        (("e8m0", "e8m0"), FAR, "fp4_blocks.cu", "code == 0u ? 0x00400000u", "code == 0u ? 0u"),
        (("e8m0", "e8m0"), FAR, "fp4_blocks.cu", "__fadd_rn(acc, __fmul_rn(exact, b_first ? quarter_a : scale_b))",
         "__fmaf_rn(exact, b_first ? quarter_a : scale_b, acc)"),  # a partial that is not rounded
        (("e8m0", "e8m0"), FAR, "fp4_blocks.cu", "quarter_a > 0x1p113f", "false"),
        (("e8m0", "e8m0"), FAR, "fp4_blocks.cu", "- 69u > 116u", "- 69u > 0xFFFFFFFFu"),  # all plain
        (("e8m0", "e8m0"), FAR, "fp4_blocks.cu", "y == y ? y :", "y == y || true ? y :"),  # NaN as the processor has it
    ],
)  # fmt: skip
def test_a_wrong_text_is_seen(monkeypatch, kinds, scales, file, old, new):
    a, b = drawn((40, 40, 128), kinds, scales)
    assert agree(a, b)
    assert not agree(a, b, changed(monkeypatch, kinds, file, (old, new)))


def test_a_wrong_row_of_shared_scales_is_seen(monkeypatch):
    a, b = drawn((40, 40, 64), ("e4m3", "e4m3"), NEAR, (16, 1))
    pair = ("row / a.extent * blocks_a", "row / 64 * blocks_a")
    wrong = changed(monkeypatch, ("e4m3", "e4m3"), "fp4_blocks.cu", pair)
    assert agree(a, b)
    assert not agree(a, b, wrong)


def test_nothing_to_add_is_zero():
    no, scales = np.zeros((2, 0), np.uint8), np.zeros((2, 0), np.uint8)
    assert launch(fp4_blocks, no, no, 0, scales, scales, kinds=("e8m0", "e4m3")).tobytes() == bytes(16)
    none = np.zeros((0, 4), np.uint8)
    got = launch(fp4_blocks, none, none, 8, none[:, :1], none[:, :1], kinds=("e4m3", "e4m3"))
    assert got.shape == (0, 0)
    assert got.dtype == np.float32


def test_wrong_arguments_are_named():
    a, scales = np.zeros((2, 8), np.uint8), np.zeros((2, 1), np.uint8)
    with pytest.raises(ValueError, match=r"kinds \('mx', 'e4m3'\); scale codes are pairs of e8m0, e4m3"):
        fp4_blocks(HOST, a, a, 16, scales, scales, kinds=("mx", "e4m3"))
    with pytest.raises(TypeError, match=r"b_scales is numpy\.ndarray of int8"):
        fp4_blocks(HOST, a, a, 16, scales, scales.astype(np.int8), kinds=("e8m0", "e4m3"))
    with pytest.raises(ValueError, match=r"a of shape \(2, 8\); depth 18 is \[rows, 9\] bytes"):
        fp4_blocks(HOST, a, a, 18, scales, scales, kinds=("e8m0", "e4m3"))
    with pytest.raises(ValueError, match=r"b_scales of shape \(2, 1\); e4m3 of these codes is \(1, 1\)"):
        fp4_blocks(HOST, a, a, 16, scales, scales, kinds=("e8m0", "e4m3"), extents=(1, 16))
    with pytest.raises(ValueError, match=r"extents \(0, 1\) at least 1"):
        fp4_blocks(HOST, a, a, 16, scales, scales, kinds=("e8m0", "e4m3"), extents=(0, 1))
