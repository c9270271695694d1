// qsim_fp8_mma_*: sums of products of FP8 codes by mma.sync, a chain of steps of 32 along K, as the device adds them.
//
// Contract
//   a [rows, depth], b [columns, depth], contiguous codes from 16-byte addresses; out float32 [rows, columns]: on entry
//   the accumulators, on return A B^T + them. K is padded with code 0 to whole steps, which adds nothing.
//   Bits: ada_mma_sync on sm_89, hopper_mma_sync on sm_90a and newer; each output is one chain in ascending k, whatever
//   the grid. Grid: x strides over tiles; blocks of QSIM_THREADS.
//
// qsim_fp8_mma_promoted_*: the same over k of [begin, end), in chains of ``run`` k that each begin with +0, multiples
// of what the device adds in one go (16 on sm_89, 32 on later ones); where a chain ends, its partial joins the sum as
// promote.cuh says, scaled by the block scales of the chain's first k. more: the sum joins what out holds.
//
// Tiles as in tile.cuh; a stage of 64 bytes holds 64 codes, of one chain alone: zeros behind its end.

// Operands as in the contract.
struct QsimProduct {
    const unsigned char *a, *b;
    long long rows, columns, depth;
};

// Thirty-two codes of one row of ``depth`` from ``first`` on; zero from ``last`` on.
__device__ __forceinline__ void qsim_fetch(
    const unsigned char* codes, long long row, long long rows, long long depth, long long first, long long last,
    unsigned (&words)[8])
{
    #pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = 0;
    if (row >= rows) return;
    const unsigned char* own = codes + row * depth;
    if (depth % 16 == 0) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (first + 16 * half >= last) continue;
            const uint4 four = *reinterpret_cast<const uint4*>(own + first + 16 * half);
            words[4 * half] = four.x;
            words[4 * half + 1] = four.y;
            words[4 * half + 2] = four.z;
            words[4 * half + 3] = four.w;
        }
        return;
    }
    #pragma unroll
    for (int i = 0; i < 32; ++i)
        if (first + i < last) words[i / 4] |= (unsigned)own[first + i] << (8 * (i % 4));
}

// Adds the products of k in [first, last) to the sums of this thread's warp.
template <int A, int B>
__device__ __forceinline__ void qsim_fp8_chain(
    const QsimProduct& of, long long top, long long start, long long first, long long last, const QsimLane& lane,
    unsigned* left, unsigned* right, float (&sums)[2][4][4])
{
    const int fetched = threadIdx.x / 2, half = threadIdx.x % 2;
    for (long long stage = first; stage < last; stage += QSIM_TILE) {
        unsigned from_a[8], from_b[8];
        qsim_fetch(of.a, top + fetched, of.rows, of.depth, stage + 32 * half, last, from_a);
        qsim_fetch(of.b, start + fetched, of.columns, of.depth, stage + 32 * half, last, from_b);
        __syncthreads();  // the last stage has been read
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            left[fetched * QSIM_PITCH + 8 * half + i] = from_a[i];
            right[fetched * QSIM_PITCH + 8 * half + i] = from_b[i];
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < 16; k += 8) {
            unsigned rows_of_a[2][4], columns_of_b[4][2];
            qsim_fragments(left, right, k, lane, rows_of_a, columns_of_b);
            if (stage + 4 * k >= last) continue;  // no step of padding alone: an accumulator of -0 or NaN stays
            #pragma unroll
            for (int m = 0; m < 2; ++m)
                #pragma unroll
                for (int n = 0; n < 4; ++n) qsim_mma_fp8<A, B>(sums[m][n], rows_of_a[m], columns_of_b[n]);
        }
    }
}

// each(top, start) of every tile of this block.
template <typename Each>
__device__ __forceinline__ void qsim_tiles(const QsimProduct& of, Each each)
{
    const long long across = (of.columns + QSIM_TILE - 1) / QSIM_TILE, down = (of.rows + QSIM_TILE - 1) / QSIM_TILE;
    for (long long tile = blockIdx.x; tile < across * down; tile += gridDim.x)
        each(tile / across * QSIM_TILE, tile % across * QSIM_TILE);
}

template <int A, int B>
__device__ __forceinline__ void qsim_fp8_product(const QsimProduct& of, float* out, unsigned* left, unsigned* right)
{
    const QsimLane lane = qsim_lane();
    qsim_tiles(of, [&](long long top, long long start) {
        float sums[2][4][4] = {};
        qsim_outputs(top, start, of.rows, of.columns, lane,
                     [&](int m, int n, int i, long long at) { sums[m][n][i] = out[at]; });
        qsim_fp8_chain<A, B>(of, top, start, 0, of.depth, lane, left, right, sums);
        qsim_outputs(top, start, of.rows, of.columns, lane,
                     [&](int m, int n, int i, long long at) { out[at] = sums[m][n][i]; });
    });
}

template <int A, int B>
__device__ __forceinline__ void qsim_fp8_promoted(
    const QsimProduct& of, float* out, long long begin, long long end, long long run, bool more,
    const QsimScale& scale_a, const QsimScale& scale_b, unsigned* left, unsigned* right)
{
    const QsimLane lane = qsim_lane();
    const bool scaled = scale_a.values != nullptr || scale_b.values != nullptr;
    qsim_tiles(of, [&](long long top, long long start) {
        float sums[2][4][4] = {};
        for (long long first = begin; first < end; first += run) {
            float partial[2][4][4] = {};
            qsim_fp8_chain<A, B>(of, top, start, first, min(first + run, end), lane, left, right, partial);
            const int block_a = (int)first / scale_a.depth, block_b = (int)first / scale_b.depth;
            float by_row[2][2], by_column[4][2];
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = (int)top + lane.row + 8 * j + lane.g;
                by_row[j / 2][j % 2] = qsim_scale_at(scale_a, qsim_scale_row(scale_a, row, (int)of.rows), block_a);
                #pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = (int)start + lane.column + 8 * j + 2 * lane.t + i;
                    by_column[j][i] =
                        qsim_scale_at(scale_b, qsim_scale_row(scale_b, column, (int)of.columns), block_b);
                }
            }
            #pragma unroll
            for (int m = 0; m < 2; ++m)
                #pragma unroll
                for (int n = 0; n < 4; ++n)
                    #pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sums[m][n][i] = qsim_promoted(
                            sums[m][n][i], partial[m][n][i], scaled, by_row[m][i / 2], by_column[n][i % 2]);
        }
        qsim_outputs(top, start, of.rows, of.columns, lane,
                     [&](int m, int n, int i, long long at) { qsim_store_part(out + at, sums[m][n][i], more); });
    });
}

#define QSIM_FP8_ENTRIES(pair, A, B)                                                                               \
    extern "C" __global__ void __launch_bounds__(QSIM_THREADS) qsim_fp8_mma_##pair(                                \
        const unsigned char* a, const unsigned char* b, float* out, long long rows, long long columns,             \
        long long depth)                                                                                           \
    {                                                                                                              \
        __shared__ unsigned left[QSIM_TILE * QSIM_PITCH], right[QSIM_TILE * QSIM_PITCH];                           \
        qsim_fp8_product<A, B>({a, b, rows, columns, depth}, out, left, right);                                    \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(QSIM_THREADS) qsim_fp8_mma_promoted_##pair(                       \
        const unsigned char* a, const unsigned char* b, float* out, long long rows, long long columns,             \
        long long depth, long long begin, long long end, long long run, int more, const float* scale_a,            \
        int rows_a, int depth_a, int blocks_a, const float* scale_b, int rows_b, int depth_b, int blocks_b)        \
    {                                                                                                              \
        __shared__ unsigned left[QSIM_TILE * QSIM_PITCH], right[QSIM_TILE * QSIM_PITCH];                           \
        qsim_fp8_promoted<A, B>({a, b, rows, columns, depth}, out, begin, end, run, more != 0,                     \
                                {scale_a, rows_a, depth_a, blocks_a}, {scale_b, rows_b, depth_b, blocks_b}, left,  \
                                right);                                                                            \
    }

QSIM_FP8_ENTRIES(e4m3_e4m3, QSIM_E4M3, QSIM_E4M3)
QSIM_FP8_ENTRIES(e4m3_e5m2, QSIM_E4M3, QSIM_E5M2)
QSIM_FP8_ENTRIES(e5m2_e4m3, QSIM_E5M2, QSIM_E4M3)
QSIM_FP8_ENTRIES(e5m2_e5m2, QSIM_E5M2, QSIM_E5M2)
