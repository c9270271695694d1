// qsim_fp8_mma_*: sums of products of FP8 codes by mma.sync, a chain of steps of 32 along K, as the device adds them.
//
// Contract
//   a [rows, depth], b [columns, depth], contiguous codes from 16-byte addresses; out float32 [rows, columns]: on entry
//   the accumulators, on return A B^T + them. K is padded with code 0 to whole steps, which adds nothing.
//   Bits: ada_mma_sync on sm_89, hopper_mma_sync on sm_90a and newer; each output is one chain in ascending k, whatever
//   the grid. Grid: x strides over tiles; blocks of QSIM_THREADS.
// Tiles as in tile.cuh; a stage of 64 bytes holds 64 codes.

// Thirty-two codes of one row from ``first`` on; zero past the end.
__device__ __forceinline__ void qsim_fetch(
    const unsigned char* codes, long long row, long long rows, long long depth, long long first, unsigned (&words)[8])
{
    #pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = 0;
    if (row >= rows) return;
    const unsigned char* own = codes + row * depth;
    if (depth % 16 == 0) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (first + 16 * half >= depth) continue;
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
        if (first + i < depth) words[i / 4] |= (unsigned)own[first + i] << (8 * (i % 4));
}

template <int A, int B>
__device__ __forceinline__ void qsim_fp8_product(
    const unsigned char* a, const unsigned char* b, float* out, long long rows, long long columns, long long depth,
    unsigned* left, unsigned* right)
{
    const long long across = (columns + QSIM_TILE - 1) / QSIM_TILE, down = (rows + QSIM_TILE - 1) / QSIM_TILE;
    const QsimLane lane = qsim_lane();
    const int fetched = threadIdx.x / 2, half = threadIdx.x % 2;

    for (long long tile = blockIdx.x; tile < across * down; tile += gridDim.x) {
        const long long top = tile / across * QSIM_TILE, start = tile % across * QSIM_TILE;
        float sums[2][4][4] = {};
        qsim_outputs(top, start, rows, columns, lane,
                     [&](int m, int n, int i, long long at) { sums[m][n][i] = out[at]; });
        for (long long stage = 0; stage < depth; stage += QSIM_TILE) {
            unsigned from_a[8], from_b[8];
            qsim_fetch(a, top + fetched, rows, depth, stage + 32 * half, from_a);
            qsim_fetch(b, start + fetched, columns, depth, stage + 32 * half, from_b);
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
                if (stage + 4 * k >= depth) continue;  // no step of padding alone: an accumulator of -0 or NaN stays
                #pragma unroll
                for (int m = 0; m < 2; ++m)
                    #pragma unroll
                    for (int n = 0; n < 4; ++n) qsim_mma_fp8<A, B>(sums[m][n], rows_of_a[m], columns_of_b[n]);
            }
        }
        qsim_outputs(top, start, rows, columns, lane,
                     [&](int m, int n, int i, long long at) { out[at] = sums[m][n][i]; });
    }
}

#define QSIM_FP8_ENTRY(name, A, B)                                                                                \
    extern "C" __global__ void __launch_bounds__(QSIM_THREADS) name(                                              \
        const unsigned char* a, const unsigned char* b, float* out, long long rows, long long columns,            \
        long long depth)                                                                                          \
    {                                                                                                             \
        __shared__ unsigned left[QSIM_TILE * QSIM_PITCH], right[QSIM_TILE * QSIM_PITCH];                          \
        qsim_fp8_product<A, B>(a, b, out, rows, columns, depth, left, right);                                     \
    }

QSIM_FP8_ENTRY(qsim_fp8_mma_e4m3_e4m3, QSIM_E4M3, QSIM_E4M3)
QSIM_FP8_ENTRY(qsim_fp8_mma_e4m3_e5m2, QSIM_E4M3, QSIM_E5M2)
QSIM_FP8_ENTRY(qsim_fp8_mma_e5m2_e4m3, QSIM_E5M2, QSIM_E4M3)
QSIM_FP8_ENTRY(qsim_fp8_mma_e5m2_e5m2, QSIM_E5M2, QSIM_E5M2)
