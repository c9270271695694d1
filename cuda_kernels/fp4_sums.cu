// qsim_fp4_sums: exact sums of products of packed E2M1 codes, in units of 1/4, through the INT8 tensor cores.
//
// Contract
//   a [rows, bytes], b [columns, bytes], bytes = ceil(depth / 2), contiguous, the even element in the low nibble; the
//   high nibble behind an odd depth is not read. out int32 [rows, columns] = sum over k of 2 a[i, k] * 2 b[j, k]. Twice
//   a value of E2M1 is an integer up to 12, so an int32 holds every sum of depth <= 14,913,080.
//   Grid: x strides over tiles; blocks of QSIM_THREADS.
// Tiles as in tile.cuh; a stage of 64 bytes holds 64 elements.

extern "C" __global__ void __launch_bounds__(QSIM_THREADS) qsim_fp4_sums(
    const unsigned char* a, const unsigned char* b, int* out, long long rows, long long columns, long long depth)
{
    __shared__ unsigned left[QSIM_TILE * QSIM_PITCH], right[QSIM_TILE * QSIM_PITCH];
    const long long bytes = (depth + 1) / 2;
    const bool odd = depth % 2 != 0;
    const long long across = (columns + QSIM_TILE - 1) / QSIM_TILE, down = (rows + QSIM_TILE - 1) / QSIM_TILE;
    const QsimLane lane = qsim_lane();
    const int fetched = threadIdx.x / 2, half = threadIdx.x % 2;

    for (long long tile = blockIdx.x; tile < across * down; tile += gridDim.x) {
        const long long top = tile / across * QSIM_TILE, start = tile % across * QSIM_TILE;
        int sums[2][4][4] = {};
        for (long long step = 0; step < bytes; step += QSIM_TILE / 2) {
            unsigned from_a[4], from_b[4];
            qsim_fetch(a, top + fetched, rows, bytes, step + 16 * half, odd, from_a);
            qsim_fetch(b, start + fetched, columns, bytes, step + 16 * half, odd, from_b);
            __syncthreads();  // the last step has been read
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = fetched * QSIM_PITCH + 8 * half + 2 * i;
                left[at] = qsim_twice(from_a[i]);
                left[at + 1] = qsim_twice(from_a[i] >> 16);
                right[at] = qsim_twice(from_b[i]);
                right[at + 1] = qsim_twice(from_b[i] >> 16);
            }
            __syncthreads();
            #pragma unroll
            for (int k = 0; k < 16; k += 8) {
                unsigned rows_of_a[2][4], columns_of_b[4][2];
                qsim_fragments(left, right, k, lane, rows_of_a, columns_of_b);
                #pragma unroll
                for (int m = 0; m < 2; ++m)
                    #pragma unroll
                    for (int n = 0; n < 4; ++n) qsim_mma_s8(sums[m][n], rows_of_a[m], columns_of_b[n]);
            }
        }
        qsim_outputs(top, start, rows, columns, lane,
                     [&](int m, int n, int i, long long at) { out[at] = sums[m][n][i]; });
    }
}
