"""Promotion and block scales behind mma.sync: the partials of chains and parts join in float32 as the models say."""

import pytest

from cuda_kernels._place import Host
from cuda_kernels.fp8_mma import FP8_MMA_PROMOTED, MODELS, fp8_mma
from tests.mutants import mutant
from tests.unit import test_cuda_fp8_wgmma as wgmma

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FMA = "__fmaf_rn(partial, __fmul_rn(a, b), sum)"


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)])
def test_partials_are_promoted_and_parts_added_as_the_model_says(formats, arch):
    step = 16 if arch == "sm_89" else 32
    cuts = {"every": 128}, {"every": step}, {"every": 3 * step}, {"split_k": 2}, {"every": 2 * step, "split_k": 5}
    for shape in [(70, 5, 300), (3, 66, 96), (2, 2, 17)]:
        a, b = wgmma.drawn(shape, hostile=shape[0] == 3)
        for own in cuts:
            cut = {"promote_every": own.get("every"), "split_k": own.get("split_k", 1)}
            want = wgmma.expected(a, b, formats, model=MODELS[arch], **cut)
            wgmma.same(want, fp8_mma(Host(arch), a, b, formats=formats, **cut))


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize("extents", [*wgmma.BLOCKS, ((1, 32), (7, 32), None)])
def test_block_scales_join_each_partial_in_one_rounding(extents, arch):
    *extents, promote = extents
    for at, shape in enumerate([(66, 7, 300), (3, 70, 256), (6, 5, 40)]):
        a, b = wgmma.drawn(shape, hostile=at == 2)
        scales = wgmma.blocks_of(shape, extents, at)
        cut = {"promote_every": promote, "split_k": 1 + at}
        want = wgmma.expected(a, b, (E4M3, E4M3), scales, model=MODELS[arch], **cut)
        wgmma.same(want, fp8_mma(Host(arch), a, b, formats=(E4M3, E4M3), scales=scales, **cut))


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("fp8_mma.cu", "min(first + run, end)", "end"),  # one chain
        ("fp8_mma.cu", "qsim_promoted(\n                            sums[m][n][i]", "qsim_promoted(\n0.0f"),
        ("fp8_mma.cu", "by_row[m][i / 2]", "by_row[m][i % 2]"),
        ("fp8_mma.cu", "by_column[n][i % 2]", "by_column[n][i / 2]"),
        ("fp8_mma.cu", "(int)first / scale_a.depth", "(int)begin / scale_a.depth"),
        ("fp8_mma.cu", "lane.row + 8 * j + lane.g", "lane.row + 8 * j"),
        ("promote.cuh", FMA, "__fadd_rn(__fmul_rn(partial, __fmul_rn(a, b)), sum)"),
        ("promote.cuh", FMA, "__fmaf_rn(__fmul_rn(partial, a), b, sum)"),
        ("promote.cuh", "more ? __fadd_rn(*out, sum) : sum", "sum"),
    ],
)  # fmt: skip
def test_a_wrong_promotion_is_seen(monkeypatch, file, old, new):
    kernel, options = FP8_MMA_PROMOTED[E4M3, E4M3], ("-DQSIM_EMULATED_ARCH=89",)
    changed = mutant(monkeypatch, kernel, file, old, new, drop=r"\nQSIM_FP8_ENTRIES\(.*E5M2.*", options=options)
    shape = 40, 20, 300
    a, b = wgmma.drawn(shape)
    scales = wgmma.blocks_of(shape, ((1, 64), (1, 64)), 1)
    cut = {"promote_every": 32, "split_k": 2}
    want = wgmma.expected(a, b, (E4M3, E4M3), scales, model="ada_mma_sync", **cut)
    assert want.tobytes() != fp8_mma(changed, a, b, formats=(E4M3, E4M3), scales=scales, **cut).tobytes()
