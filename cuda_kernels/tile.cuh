// A tile of 64 x 64 outputs made by four warps with m16n8k32 instructions, from two stages of 64 bytes of K in shared
// memory. Each warp makes 32 x 32: two fragments down, four across. Rows of a stage are 20 words, so that the 32 words
// of a fragment lie in 32 banks. Fragments as in mma.cuh.
#pragma once

#define QSIM_THREADS 128
#define QSIM_TILE 64
#define QSIM_PITCH 20

struct QsimLane {
    int row, column, g, t;  // of its warp in the tile; of the lane in a fragment
};

__device__ __forceinline__ QsimLane qsim_lane()
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return {warp / 2 * 32, warp % 2 * 32, lane / 4, lane % 4};
}

// The fragments of one instruction's K, from word ``k`` of each row of the stages.
__device__ __forceinline__ void qsim_fragments(
    const unsigned* left, const unsigned* right, int k, const QsimLane& at, unsigned (&a)[2][4], unsigned (&b)[4][2])
{
    #pragma unroll
    for (int m = 0; m < 2; ++m)
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            a[m][i] = left[(at.row + 16 * m + at.g + 8 * (i % 2)) * QSIM_PITCH + k + at.t + 4 * (i / 2)];
    #pragma unroll
    for (int n = 0; n < 4; ++n)
        #pragma unroll
        for (int i = 0; i < 2; ++i) b[n][i] = right[(at.column + 8 * n + at.g) * QSIM_PITCH + k + at.t + 4 * i];
}

// each(m, n, i, index) of every output of this lane inside [rows, columns]; the tile begins at (top, start).
template <typename Each>
__device__ __forceinline__ void qsim_outputs(
    long long top, long long start, long long rows, long long columns, const QsimLane& at, Each each)
{
    #pragma unroll
    for (int m = 0; m < 2; ++m)
        #pragma unroll
        for (int n = 0; n < 4; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const long long row = top + at.row + 16 * m + at.g + 8 * (i / 2);
                const long long column = start + at.column + 8 * n + 2 * at.t + i % 2;
                if (row < rows && column < columns) each(m, n, i, row * columns + column);
            }
}
