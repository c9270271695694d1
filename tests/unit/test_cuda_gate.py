"""The compile gate: each kernel, for each of its targets, is IEEE arithmetic that spills nothing, as its row says."""

import re
from importlib.resources import files

import pytest

from cuda_kernels import KernelBuildError
from cuda_kernels._kernel import ARCHES, Kernel
from cuda_kernels._nvrtc import compile_cubin, nvrtc_version
from cuda_kernels.epilogue import EPILOGUE
from cuda_kernels.footprint import KERNELS, compiled, footprint_of, kept
from cuda_kernels.fp4_blocks import FP4_BLOCKS
from cuda_kernels.fp4_sums import FP4_SUMS
from cuda_kernels.fp8_mma import FP8_MMA
from cuda_kernels.fp8_wgmma import FP8_WGMMA
from tests.oracles import unavailable

PAIRS = [pytest.param(kernel, arch, id=f"{kernel.entry}-{arch}") for kernel in KERNELS for arch in kernel.arches]
FLOATING = re.compile(r"\b(?:add|sub|mul|div|mad|fma|sqrt|rcp|rsqrt|ex2|lg2)[.\w]*\.f\d+\b")
ARITHMETIC = {  # of a whole text: what may round, and nothing else
    "encode.cu": {"sub.rn.f32", "mul.rn.f32"},
    "decode.cu": {"mul.rn.f32", "add.rn.f32"},
    "cast.cu": {"sub.rn.f32", "mul.rn.f32"},
    "pack.cu": set(),
    "blocks.cu": {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sub.rn.f64", "mul.rn.f64", "div.rn.f64"},
    "unblocks.cu": {"mul.rn.f32", "div.rn.f32", "mul.rn.f64", "div.rn.f64"},
    "hadamard.cu": {"add.rn.f32", "sub.rn.f32", "mul.rn.f32"},
    "swizzle.cu": set(),
    "fp4_sums.cu": set(),
    "fp4_blocks.cu": {"fma.rn.f32", "mul.rn.f32", "add.rn.f32", "sub.rn.f32"},
    "epilogue.cu": {"fma.rn.f32", "mul.rn.f32", "add.rn.f32"},
    "fp8_mma.cu": {"add.rn.f32", "mul.rn.f32", "fma.rn.f32"},
    "fp8_wgmma.cu": {"add.rn.f32", "mul.rn.f32", "fma.rn.f32"},
    "reduce.cu": {"sub.rn.f32", "mul.rn.f64", "add.rn.f64"},
    # one rounding of a product and a sum, on purpose: the proof counts on it, and what a product lost is found by it
    "exact.cu": {"add.rn.f32", "add.rn.f64", "mul.rn.f64", "div.rn.f64", "sqrt.rn.f64", "fma.rn.f64"},
}
FOLDED = {  # what the compiler makes of an operation whose operand it knows
    ("exact.cu", "sm_100a"): {"sub.rn.f64"},  # of fma by a factor that is 1: the same rounding of the same number
}
STACK = {  # bytes a thread, of an entry that may have some
    "qsim_exact_settle": 368,  # 46 digits of an accumulator for the whole range of float32; seldom any is summed
}


def complaints(ptx, log, arithmetic):
    """What is wrong with a compiled text."""
    found = set(FLOATING.findall(ptx)) - arithmetic
    fused = () if any(name.startswith("fma.") for name in arithmetic) else ("fma.",)  # a text that means it names it
    found |= {word for word in (".ftz", ".approx", *fused) if word in ptx}
    return found | set(re.findall(r"C75\d\d", log))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("kernel", "arch"), PAIRS)
def test_the_text_rounds_only_where_it_says(kernel, arch):
    built = compiled(kernel.text, kernel.file, arch)
    assert built.cubin[:4] == b"\x7fELF"
    assert re.search(rf"^\.target {arch}\b", built.ptx, re.MULTILINE)
    assert f".visible .entry {kernel.entry}(" in built.ptx
    arithmetic = ARITHMETIC[kernel.file] | FOLDED.get((kernel.file, arch), set())
    assert not complaints(built.ptx, built.log, arithmetic)
    assert set(FLOATING.findall(built.ptx)) == arithmetic


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("kernel", "arch"), PAIRS)
def test_registers_and_spills_are_those_of_the_table(kernel, arch):
    table = {(row.kernel, row.arch): row for row in kept()}
    row = table[kernel.entry, arch]
    if row.nvrtc != nvrtc_version():
        unavailable(f"the table is of NVRTC {row.nvrtc}, this is {nvrtc_version()}: registers differ between them")
    assert footprint_of(kernel, arch) == row, "measure again: python -m cuda_kernels.footprint"
    assert (row.stack_bytes, row.spill_bytes) == (STACK.get(kernel.entry, 0), 0)


def test_the_table_has_a_row_for_each_kernel_and_target_and_no_other():
    assert [(row.kernel, row.arch) for row in kept()] == [(k.entry, arch) for k in KERNELS for arch in k.arches]
    texts = {path.name for path in files("cuda_kernels").iterdir() if path.name.endswith(".cu")}
    assert texts == {kernel.file for kernel in KERNELS} == set(ARITHMETIC)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", FP4_SUMS.arches)
def test_fp4_goes_through_the_int8_tensor_cores(arch):
    ptx = compiled(FP4_SUMS.text, FP4_SUMS.file, arch).ptx
    # 2 x 4 tiles of a warp, twice 32 of a step of 64
    assert ptx.count("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32") == 16
    assert "ld.global.v4.u32" in ptx or "ld.global.v4.b32" in ptx


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHES)
def test_fp4_blocks_go_through_the_int8_tensor_cores(arch):
    kernel = FP4_BLOCKS["e8m0", "e4m3"]
    ptx = compiled(kernel.text, kernel.file, arch).ptx
    # 2 x 4 tiles of a warp; MX alone: 32 k, the plain path in two copies and the careful one; others: 16 k, twice each
    assert ptx.count("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32") == 8 * 3
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32") == 16 * (3 + 3 + 2)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_100a"])
def test_fp8_is_multiplied_by_mma_sync_and_absent_before_sm_89(arch):
    kernel = FP8_MMA["float8_e4m3fn", "float8_e5m2"]
    ptx = compiled(kernel.text, kernel.file, arch).ptx
    for pair in ("e4m3.e4m3", "e4m3.e5m2", "e5m2.e4m3", "e5m2.e5m2"):
        # 2 x 4 fragments of a warp, twice 32 of a stage of 64; one chain, and promoted chains
        assert ptx.count(f"mma.sync.aligned.m16n8k32.row.col.f32.{pair}.f32") == 32
    with pytest.raises(KernelBuildError, match="sm_89"):
        compile_cubin(kernel.text, "sm_80", name=kernel.file)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHES)
def test_the_epilogue_loads_and_stores_four_numbers_at_once(arch):
    ptx = compiled(EPILOGUE.text, EPILOGUE.file, arch).ptx
    assert re.search(r"ld\.global\.v4\.[bfu]32", ptx)
    assert re.search(r"st\.global\.v4\.[bfu]32", ptx)


@pytest.mark.usefixtures("nvrtc")
def test_hopper_multiplies_by_wgmma_what_tma_loads():
    kernel = FP8_WGMMA["float8_e4m3fn", "float8_e5m2"]
    built = compiled(kernel.text, kernel.file, "sm_90a")
    for pair in ("e4m3.e4m3", "e4m3.e5m2", "e5m2.e4m3", "e5m2.e5m2"):
        # the four 32 k of a stage
        assert built.ptx.count(f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{pair} ") == 4
    words = {
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes": 2,
        "mbarrier.arrive.expect_tx.shared::cta.b64": 1,
        "mbarrier.try_wait.parity.shared::cta.b64": 2,  # of the producer and of the consumers
        "setmaxnreg.inc.sync.aligned.u32 232": 1,
        "setmaxnreg.dec.sync.aligned.u32 40": 1,
        "wgmma.fence.sync.aligned": 1,
        "wgmma.wait_group.sync.aligned 0": 1,
    }
    assert {word: 4 * count for word, count in words.items()} == {word: built.ptx.count(word) for word in words}
    assert built.ptx.count(".param .align 64 .b8") == 4 * 2  # two tensor maps, by value
    assert not re.findall(r"C75\d\d|warning", built.log)
    assert 256 * 232 + 128 * 40 <= 65536
    with pytest.raises(KernelBuildError, match="wgmma exists on sm_90a alone"):
        compile_cubin(kernel.text, "sm_100a", name=kernel.file)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("file", sorted(ARITHMETIC))
def test_every_entry_of_a_text_is_a_kernel(file):
    own = [kernel for kernel in KERNELS if kernel.file == file]
    ptx = compiled(own[0].text, file, "sm_90a").ptx  # every text has this target
    assert sorted(re.findall(r"\.visible \.entry (\w+)\(", ptx)) == sorted(kernel.entry for kernel in own)


@pytest.mark.usefixtures("nvrtc")
def test_the_gate_can_fail():
    plain = 'extern "C" __global__ void f(float* x, float y) { x[0] = x[1] * y + x[2]; }'
    good = compile_cubin(plain, "sm_90a", ptx=True)
    assert not complaints(good.ptx, good.log, {"mul.rn.f32", "add.rn.f32"} | set(FLOATING.findall(good.ptx)))
    bad = compile_cubin(plain, "sm_90a", ptx=True, options=("--fmad=true", "--ftz=true"))
    assert {".ftz", "fma."} <= complaints(bad.ptx, bad.log, set())
    fused = compile_cubin(plain, "sm_90a", ptx=True, options=("--fmad=true",))
    assert {"fma.", "fma.rn.f32"} <= complaints(fused.ptx, fused.log, {"mul.rn.f32", "add.rn.f32"})
    assert not complaints(fused.ptx, fused.log, {"fma.rn.f32"})
    assert complaints(fused.ptx, fused.log, {"fma.rn.f64"}) == {"fma.rn.f32"}
    assert complaints(fused.ptx, fused.log, ARITHMETIC["exact.cu"]) == {"fma.rn.f32"}  # the one of float64 is named
    assert complaints(fused.ptx, fused.log, ARITHMETIC["reduce.cu"]) == {"fma.rn.f32", "fma."}
    assert "C7510" in complaints("", "ptxas info (C7510): Potential Performance Loss", set())


@pytest.mark.usefixtures("nvrtc")
def test_a_spill_is_counted_and_an_unknown_kernel_is_named(monkeypatch):
    text = """extern "C" __global__ void __launch_bounds__(1024) spills(const int* in, int* out) {
        int v[96];
        for (int i = 0; i < 96; i++) v[i] = in[i * blockDim.x + threadIdx.x];
        __syncthreads();
        for (int r = 0; r < 96; r++) { int s = 0;
            #pragma unroll
            for (int i = 0; i < 96; i++) s += v[i] * in[i + r];
            out[r * blockDim.x + threadIdx.x] = s; } }"""
    monkeypatch.setattr(Kernel, "text", property(lambda self: text))
    row = footprint_of(Kernel("spills.cu", "spills"), "sm_90a")
    assert row.stack_bytes > 0
    assert row.registers <= 64
    with pytest.raises(KernelBuildError, match="nothing of other for sm_90a"):
        footprint_of(Kernel("spills.cu", "other"), "sm_90a")
