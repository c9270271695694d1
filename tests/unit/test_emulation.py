"""The emulation of CUDA blocks on a CPU: barriers, shared memory, warp operations, and what it must notice."""

import ctypes

import numpy as np
import pytest

from cuda_kernels import KernelBuildError, host

pytestmark = pytest.mark.usefixtures("gpp")


def kernel(body, parameters="int* out", extra=""):
    return host.build(f'{extra}\nextern "C" __global__ void k({parameters})\n{{\n{body}\n}}\n', "k")


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def run(built, out, grid=(1,), block=(32,), dynamic=0, more=()):
    built(grid, block, [pointer(out), *more], dynamic=dynamic)
    return out


def test_indices_of_three_dimensions():
    out = np.zeros(2 * 3 * 4 * 5, np.int32)
    body = """
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int block = blockIdx.x + gridDim.x * blockIdx.y;
    out[block * 20 + thread] = block * 1000 + threadIdx.z * 100 + threadIdx.y * 10 + threadIdx.x;
    """
    run(kernel(body), out, grid=(2, 3), block=(5, 2, 2))
    assert 5 * 1000 + 100 + 10 + 4 == out[-1]
    assert out.size == np.unique(out).size


def test_a_barrier_separates_writes_from_reads():
    body = """
    __shared__ int tile[100];
    tile[threadIdx.x] = (int)(blockIdx.x * 1000 + threadIdx.x);
    __syncthreads();
    out[blockIdx.x * 100 + threadIdx.x] = tile[99 - threadIdx.x];
    """
    out = run(kernel(body), np.zeros(300, np.int32), grid=(3,), block=(100,))
    assert (np.concatenate([b * 1000 + np.arange(99, -1, -1) for b in range(3)]) == out).all()
    without = run(kernel(body.replace("__syncthreads();", "")), np.zeros(300, np.int32), grid=(3,), block=(100,))
    assert (without != out).any()


def test_a_barrier_tells_whether_any_thread_brought_a_flag():
    body = """
    int* mine = out + threadIdx.x * 4;
    mine[0] = __syncthreads_or(threadIdx.x == 63);
    mine[1] = __syncthreads_or(false);
    mine[2] = __syncthreads_or(true);
    __syncthreads();
    mine[3] = __syncthreads_or(threadIdx.x > 64);
    """
    out = run(kernel(body), np.full(64 * 4, 9, np.int32), block=(64,)).reshape(64, 4)
    assert (out == [1, 0, 1, 0]).all()


def test_shared_memory_is_poisoned_before_every_block():
    body = """
    __shared__ unsigned once;
    QSIM_DYNAMIC_SHARED(more);
    out[blockIdx.x] = once == 0xA5A5A5A5u && more[3] == 0xA5 ? 1 : 0;
    once = 7; more[3] = 7;
    """
    assert run(kernel(body), np.zeros(4, np.int32), grid=(4,), block=(1,), dynamic=16).all()


def test_warp_operations():
    body = """
    const int lane = threadIdx.x % 32;
    int* mine = out + threadIdx.x * 5;
    mine[0] = __shfl_xor_sync(0xFFFFFFFFu, lane, 1);
    mine[1] = __shfl_sync(0xFFFFFFFFu, lane * 10, 7);
    mine[2] = __shfl_down_sync(0xFFFFFFFFu, lane, 8);
    mine[3] = (int)__ballot_sync(0xFFFFFFFFu, lane % 3 == 0);
    mine[4] = __any_sync(0xFFFFFFFFu, lane == 31) + 2 * __all_sync(0xFFFFFFFFu, lane < 31);
    """
    out = run(kernel(body), np.zeros(64 * 5, np.int32), block=(64,)).reshape(64, 5)
    lanes = np.arange(64) % 32
    assert (lanes ^ 1 == out[:, 0]).all()
    assert (out[:, 1] == 70).all()
    assert (np.where(lanes + 8 < 32, lanes + 8, lanes) == out[:, 2]).all()
    assert (out[:, 3].view(np.uint32) == sum(1 << i for i in range(0, 32, 3))).all()
    assert (out[:, 4] == 1).all()


def test_part_of_a_warp_may_meet_alone():
    body = "if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0xFFu, (int)threadIdx.x, 3);"
    assert (run(kernel(body), np.zeros(8, np.int32)) == 3).all()


def test_atomics_and_a_tree_give_the_same_sum():
    body = """
    __shared__ int sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    int v = (int)threadIdx.x;
    for (int by = 16; by > 0; by /= 2) v += __shfl_down_sync(0xFFFFFFFFu, v, by);
    if (threadIdx.x % 32 == 0) atomicAdd(&sum, v);
    __syncthreads();
    if (threadIdx.x == 0) { out[0] = sum; atomicMax(out + 1, 5); atomicOr(out + 2, 6); }
    """
    assert [128 * 127 // 2, 5, 6] == run(kernel(body), np.zeros(3, np.int32), block=(128,)).tolist()


DIVERGENT = {
    "a barrier in one branch, a warp operation in the other": (
        "if (threadIdx.x < 16) __syncthreads(); else out[0] = __shfl_sync(0xFFFFFFFFu, 1, 0);", "deadlock"
    ),
    "two barriers": ("if (threadIdx.x < 16) {\n__syncthreads();\n} else {\n__syncthreads();\n}", "barriers of lines"),
    "lanes that never come": ("if (threadIdx.x < 16) out[0] = __shfl_sync(0xFFFFFFFFu, 1, 0);", "deadlock"),
    "two warp operations": (
        "if (threadIdx.x < 16) out[0] = __shfl_sync(0xFFFFFFFFu, 1, 0);\nelse out[1] = __shfl_sync(0xFFFFFFFFu, 2, 0);",
        "meet at lines",
    ),
    "a lane outside its mask": ("out[0] = __shfl_sync(0x1u, 1, 0);", "not in the mask"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "words"), DIVERGENT.values(), ids=DIVERGENT)
def test_divergence_is_an_error_that_says_where(capfd, body, words):
    with pytest.raises(host.EmulationError, match="did not finish"):
        run(kernel(body), np.zeros(4, np.int32), block=(32,))
    assert words in capfd.readouterr().err


def test_threads_that_have_left_are_not_waited_for():
    body = "if (threadIdx.x >= 20) return;\n__syncthreads();\nout[threadIdx.x] = 1;"
    assert run(kernel(body), np.zeros(20, np.int32), block=(32,)).all()


def test_a_text_that_does_not_compile_shows_the_compilers_words():
    with pytest.raises(KernelBuildError, match="nonsense"):
        kernel("nonsense;")
