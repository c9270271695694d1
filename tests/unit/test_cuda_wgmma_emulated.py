"""What the emulation of TMA, mbarriers and wgmma sees: wrong indices, phases and waits of the kernel."""

import functools

import numpy as np
import pytest

from cuda_kernels import _tensor_map, host, source
from cuda_kernels.fp8_wgmma import FP8_WGMMA, fp8_wgmma
from cuda_kernels.host import EmulationError
from tests.mutants import mutant
from tests.unit.test_cuda_fp8_wgmma import E4M3, drawn, expected

SHAPE = (80, 24, 720)  # both warpgroups, six stages: every slot of the ring again
KERNEL = FP8_WGMMA[E4M3, E4M3]

WRONG_BITS = [
    # the swizzle is dropped on one side, another advance along K, another distance of eight rows
    ("wgmma.cuh", "1ull << 62;", "0ull << 62;"),
    ("fp8_wgmma.cu", "left + k / 16 :", "left + k / 32 :"),
    ("wgmma.cuh", "(unsigned long long)(1024 >> 4)", "(unsigned long long)(512 >> 4)"),
    # rows and columns of the accumulators, and of the tile
    ("fp8_wgmma.cu", "own_row + 8 * (i / 2 % 2)", "own_row + 8 * (i % 2)"),
    ("fp8_wgmma.cu", "8 * (i / 4) + i % 2", "8 * (i / 4) + i / 2 % 2"),
    ("fp8_wgmma.cu", "threadIdx.x / 128 * (64 * QSIM_DEPTH)", "0 * QSIM_DEPTH"),
    ("fp8_wgmma.cu", "qsim_tma_load(b, at, start,", "qsim_tma_load(b, start, at,"),
    # products outside a chain, a chain that goes on from the last, a partial that is not added, a scale of a neighbour
    ("fp8_wgmma.cu", "const bool inside = at + k < last;", "const bool inside = true;"),
    ("fp8_wgmma.cu", "at + k > first);\n        }", "true);\n        }"),
    ("fp8_wgmma.cu", "qsim_promoted(sums[i],", "qsim_promoted(0.0f,"),
    ("promote.cuh", "values + row + block", "values + row + block / 2"),
    # waits: accumulators that are read too early, stages that are handed back or read too early
    ("fp8_wgmma.cu", "    qsim_wgmma_wait<0>(d);\n", "\n"),
    ("fp8_wgmma.cu", "            qsim_wgmma_wait<1>(d);\n", "\n"),
    ("fp8_wgmma.cu", "qsim_barrier_wait(ring.full(), ring.parity);", "\n"),
]
REPORTED = [
    ("fp8_wgmma.cu", "right + k / 16 :", "right + k / 8 :", "swizzle pattern begins elsewhere"),
    ("fp8_wgmma.cu", "ring.parity ^ 1", "ring.parity", "deadlock: thread 256"),
    ("fp8_wgmma.cu", "        parity ^= 1;\n", "\n", "deadlock: thread"),
    ("fp8_wgmma.cu", "qsim_barrier_wait(ring.empty(), ring.parity ^ 1);", "", "deadlock: thread 0 "),
    ("fp8_wgmma.cu", "ring.full(), 2 * QSIM_OPERAND)", "ring.full(), QSIM_OPERAND)", "deadlock: thread 0 "),
    ("fp8_wgmma.cu", "    if (speaks) qsim_barrier_arrive(before);\n}", "}", "deadlock: thread 256"),
    ("fp8_wgmma.cu", "const bool speaks = threadIdx.x % 32 == 0;", "const bool speaks = true;", "deadlock: thread 256"),
    ("fp8_wgmma.cu", "            qsim_barrier_init(ring.empty() + 8 * i, 8);\n", "", "was never initialised"),
    ("fp8_wgmma.cu", "        qsim_wgmma_fence(d);\n", "", "without wgmma.fence"),
    ("fp8_wgmma.cu", "qsim_wgmma_wait<1>(d)", "if (threadIdx.x < 64) qsim_wgmma_wait<1>(d)", "deadlock: thread 0 "),
    ("fp8_wgmma.cu", "ring.stage() + threadIdx.x / 128", "ring.stage() + threadIdx.x / 64", "threads 0 and 64"),
    ("fp8_wgmma.cu", "+ QSIM_PATTERN - 1) / QSIM_PATTERN * QSIM_PATTERN", "+ 127) / 128 * 128", "pattern begins"),
    ("fp8_wgmma.cu", "#define QSIM_STAGES 4", "#define QSIM_STAGES 5", "outside the dynamic shared memory"),
]  # fmt: skip


def changed(monkeypatch, file="", old="", new=""):
    """The emulation of the kernel whose text is changed in one place; of its entries the one that runs."""
    return mutant(monkeypatch, KERNEL, file, old, new, drop=r"\nQSIM_WGMMA_ENTRY\(\w+, .*E5M2.*")


@functools.cache
def case():
    """Operands, cuts and scales that tell each mistake below from the truth, and the truth."""
    a, b = drawn(SHAPE)
    rng = np.random.default_rng(1)
    scales = [np.exp(rng.standard_normal((n, 6))).astype(np.float32) for n in (80, 1)]
    scales = scales[0], (1, 128), scales[1], (128, 128)
    return a, b, scales, expected(a, b, (E4M3, E4M3)), expected(a, b, (E4M3, E4M3), scales, promote_every=64)


def runs_right(place):
    """Whether both products have the bits of the model."""
    a, b, scales, plain, scaled = case()
    one = fp8_wgmma(place, a, b, formats=(E4M3, E4M3))
    other = fp8_wgmma(place, a, b, formats=(E4M3, E4M3), scales=scales, promote_every=64)
    return plain.tobytes() == one.tobytes() and scaled.tobytes() == other.tobytes()


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize(("file", "old", "new"), WRONG_BITS)
def test_a_wrong_text_has_wrong_bits(monkeypatch, file, old, new):
    assert not runs_right(changed(monkeypatch, file, old, new))


@pytest.mark.usefixtures("gpp")
@pytest.mark.parametrize(("file", "old", "new", "message"), REPORTED)
def test_a_wait_that_cannot_end_or_a_broken_rule_is_reported(monkeypatch, capfd, file, old, new, message):
    place = changed(monkeypatch, file, old, new)
    with pytest.raises(EmulationError):
        runs_right(place)
    assert message in capfd.readouterr().err


@pytest.mark.usefixtures("gpp")
def test_the_right_text_is_right_after_a_launch_that_failed(monkeypatch):
    place = changed(monkeypatch)
    assert runs_right(place)
    with monkeypatch.context() as patch:  # the swizzle is dropped on the other side
        patch.setattr(_tensor_map, "SWIZZLE_128B", 0)
        assert not runs_right(place)
        patch.setattr(_tensor_map, "SWIZZLE_128B", 2)
        with pytest.raises(EmulationError):
            runs_right(place)
        patch.setattr(_tensor_map, "_MARK", 0)
        with pytest.raises(EmulationError):
            runs_right(place)
    assert runs_right(place)


BARRIERS = """extern "C" __global__ void turns(unsigned* out, int parity)
{
    QSIM_DYNAMIC_SHARED(dynamic);
    const unsigned barrier = (qsim_shared_address(dynamic) + 7) / 8 * 8;
    if (threadIdx.x == 0) qsim_barrier_init(barrier, 2);
    qsim_shared_visible();
    __syncthreads();
    if (threadIdx.x == 0) {
        qsim_barrier_wait(barrier, 1);  // of the phase before the first: at once
        qsim_barrier_wait(barrier, parity);
        out[0] = out[1];
        qsim_barrier_arrive(barrier);
        return;
    }
    if (threadIdx.x < 3) {
        out[1] += 1;
        qsim_barrier_arrive(barrier);
    }
    if (threadIdx.x == 1) {
        qsim_barrier_wait(barrier, 0);
        qsim_barrier_arrive(barrier);
        qsim_barrier_wait(barrier, 1);
        out[2] = out[0] + 10;
    }
}
"""


@pytest.mark.usefixtures("gpp")
def test_a_barrier_counts_arrivals_phase_by_phase(capfd):
    text = "\n".join(source(name) for name in ("block_fma.cuh", "wgmma_emulated.cuh", "wgmma.cuh")) + BARRIERS
    kernel = host.build(text, "turns")
    out = np.zeros(3, np.uint32)
    address = host.ctypes.c_void_p(out.ctypes.data)
    kernel((1,), (4,), [address, host.ctypes.c_int(0)], dynamic=64)
    assert [2, 2, 12] == out.tolist()
    out[:] = 0
    kernel((1,), (4,), [address, host.ctypes.c_int(1)], dynamic=64)  # does not wait
    assert [0, 2, 10] == out.tolist()
    with pytest.raises(EmulationError):
        kernel((1,), (2,), [address, host.ctypes.c_int(0)], dynamic=64)
    assert "deadlock: thread 0 of block (0, 0, 0)" in capfd.readouterr().err
