// Just enough of CUDA for g++ to compile a kernel and run it one thread at a time.
// No shared memory, no barriers, no warps: a kernel that needs them does not compile here.
// Compile with -std=c++17 -ffp-contract=off; then + - * are the _rn operations, subnormals included.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>

#define __global__
#define __device__

namespace qsim_host {

struct Index {
    unsigned x, y, z;
};

}  // namespace qsim_host

static thread_local qsim_host::Index gridDim, blockDim, blockIdx, threadIdx;

inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }

inline unsigned __float_as_uint(float x)
{
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

namespace qsim_host {

template <typename... A, std::size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>)
{
    kernel(*static_cast<A*>(args[I])...);
}

// As cudaLaunchKernel: args[i] points to the i-th argument. Blocks and threads run in ascending order.
template <typename... A>
void launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block, void** args)
{
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
                for (threadIdx.z = 0; threadIdx.z < blockDim.z; ++threadIdx.z)
                    for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
                        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
                            call(kernel, args, std::index_sequence_for<A...>{});
}

}  // namespace qsim_host
