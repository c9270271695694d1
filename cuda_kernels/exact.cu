// qsim_exact, qsim_exact_of_sums, qsim_exact_settle: products of matrices whose every output is the exact sum, rounded once to float32.
//
// Contract
//   out float32 [replicas, rows, columns] = RN32(sum over k of a[r, i, k] * b[r, j, k] * row[i] * column[j] / divisor),
//   ties to even, subnormals kept; an exact 0 is +0, what rounds to 0 keeps its sign; NaN is 7fc00000. Operands as in
//   QsimSide, with any strides; depth 1 to 2^28; divisor an odd integer below 2^53. With width > 0 the factors are 1,
//   and the sum of every ``width`` k is rounded to float32 and added in float32 to the sum so far, in ascending k from
//   +0.
//   open uint8 [replicas, rows, columns]: qsim_exact writes 1 where it has no proof; qsim_exact_settle, which has the
//   same parameters, sums those again without any error.
//   qsim_exact_of_sums: the same of sums int32 [rows, columns] that are known already, in units of ``unit``, a power of
//   two; factors of rows and columns float64, or null: 1. It leaves open what its three roundings cannot decide.
//   Grid: qsim_exact_of_sums: x strides over outputs; qsim_exact: x strides over tiles, blocks of QSIM_THREADS; qsim_exact_settle: x strides over the outputs of a
//   replica, y over replicas, one-dimensional blocks of whole warps, no shared memory, its accumulator on the stack.
//
// The proof, with u = 2^-53. Elements are float64 without error and nothing leaves the range of normal numbers (see the
// accumulator in exact.cuh), so a chain of n FMA has an error of at most n u / (1 - n u) * |a| |b| (Cauchy-Schwarz;
// each FMA rounds once, its product is exact). d = (n + 3) u (1 + 2^-20) |a| |b| also pays for the roundings of the
// norms, of d and of the ends S - d and S + d, for n <= 2^28 (qsim/gemm/exact.py counts them). Where all of a row are
// multiples of 2^p, all of a column of 2^q, and |a| |b| < 2^(53 + p + q), every partial sum is a float64: S is the sum,
// and ties are rounded as they must be. Bits depend on no tile and no grid: what has no proof is summed exactly.

#define QSIM_THREADS 256
#define QSIM_TILE 64
#define QSIM_STEP 16
#define QSIM_PITCH 66  // doubles a k: threads that store four rows of a stage use all banks, and pairs stay aligned
#define QSIM_NO_BIT 300  // above the lowest bit of any element: a row of zeros has none

#define QSIM_PARAMETERS                                                                                                \
    const void *a_data, const float *a_table, const float *a_block, const double *a_factor, long long a_lead,          \
        long long a_down, long long a_along, long long a_band, int a_width, int a_columns, const void *b_data,         \
        const float *b_table, const float *b_block, const double *b_factor, long long b_lead, long long b_down,        \
        long long b_along, long long b_band, int b_width, int b_columns, float *out, unsigned char *open,              \
        long long replicas, long long rows, long long columns, int depth, int width, double divisor
#define QSIM_SIDES                                                                                                     \
    const QsimSide a{a_data, a_table, a_block, a_factor, a_lead, a_down, a_along, a_band, a_width, a_columns};         \
    const QsimSide b{b_data, b_table, b_block, b_factor, b_lead, b_down, b_along, b_band, b_width, b_columns}

// What a thread that fetches a row knows of it, over the k of one sum.
struct QsimSpread {
    double squares;
    int low;  // exponent of the lowest bit

    __device__ __forceinline__ void see(double x)
    {
        squares = __fma_rn(x, x, squares);
        if (x != 0.0) low = min(low, qsim_lowest_bit(x));
    }
};

// Four elements from ``k`` on; zero from ``stop`` on and outside the operand.
__device__ __forceinline__ void qsim_fetch(
    const QsimSide& x, const float* table, const QsimRow& row, bool inside, int k, int stop, double (&values)[4],
    QsimSpread& spread)
{
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[i] = inside && k + i < stop ? qsim_element(x, table, row, k + i) : 0.0;
        spread.see(values[i]);
    }
}

// Norm and lowest bit of a row that four neighbouring lanes fetched.
__device__ __forceinline__ void qsim_note(QsimSpread spread, double* norm, int* low)
{
    #pragma unroll
    for (int by = 1; by < 4; by *= 2) {
        spread.squares = __dadd_rn(spread.squares, __shfl_xor_sync(0xFFFFFFFFu, spread.squares, by));
        spread.low = min(spread.low, __shfl_xor_sync(0xFFFFFFFFu, spread.low, by));
    }
    if (threadIdx.x % 4 == 0) {
        *norm = __dsqrt_rn(spread.squares);
        *low = spread.low;
    }
}

// The rows (or columns) of a tile that a thread makes: pairs, so that it reads 16 bytes at once.
__device__ __forceinline__ int qsim_own(int first, int apart, int i) { return first + i / 2 * apart + i % 2; }

extern "C" __global__ void __launch_bounds__(QSIM_THREADS, 2) qsim_exact(QSIM_PARAMETERS)
{
    __shared__ __align__(16) double left[QSIM_STEP * QSIM_PITCH], right[QSIM_STEP * QSIM_PITCH];
    __shared__ double norms[2][QSIM_TILE];
    __shared__ int lows[2][QSIM_TILE];
    __shared__ float tables[2][256];
    QSIM_SIDES;
    if (a.table) tables[0][threadIdx.x] = a.table[threadIdx.x];
    if (b.table) tables[1][threadIdx.x] = b.table[threadIdx.x];
    __syncthreads();
    const long long across = (columns + QSIM_TILE - 1) / QSIM_TILE, down = (rows + QSIM_TILE - 1) / QSIM_TILE;
    const int fetched = threadIdx.x / 4, quarter = threadIdx.x % 4, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = warp / 2 * 16 + lane / 8 * 2, first_column = warp % 2 * 32 + lane % 8 * 2;
    const int part = width ? width : depth;

    for (long long tile = blockIdx.x; tile < replicas * down * across; tile += gridDim.x) {
        const long long replica = tile / (down * across);
        const long long top = tile / across % down * QSIM_TILE, start = tile % across * QSIM_TILE;
        const bool row_inside = top + fetched < rows, column_inside = start + fetched < columns;
        const QsimRow row = qsim_row(a, replica, row_inside ? top + fetched : 0);
        const QsimRow column = qsim_row(b, replica, column_inside ? start + fetched : 0);
        const bool mine = top + first_row < rows && start + first_column < columns;
        for (int begin = 0; begin < depth; begin += part) {
            const int stop = min(begin + part, depth);
            double sums[4][4] = {};
            QsimSpread of_row{0.0, QSIM_NO_BIT}, of_column{0.0, QSIM_NO_BIT};
            for (int step = begin; step < stop; step += QSIM_STEP) {
                double from_a[4], from_b[4];
                qsim_fetch(a, tables[0], row, row_inside, step + 4 * quarter, stop, from_a, of_row);
                qsim_fetch(b, tables[1], column, column_inside, step + 4 * quarter, stop, from_b, of_column);
                __syncthreads();  // the last step has been read
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    left[(4 * quarter + i) * QSIM_PITCH + fetched] = from_a[i];
                    right[(4 * quarter + i) * QSIM_PITCH + fetched] = from_b[i];
                }
                __syncthreads();
                if (!mine) continue;
                #pragma unroll
                for (int k = 0; k < QSIM_STEP; ++k) {
                    double x[4], y[4];
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        x[i] = left[k * QSIM_PITCH + qsim_own(first_row, 8, i)];
                        y[i] = right[k * QSIM_PITCH + qsim_own(first_column, 16, i)];
                    }
                    #pragma unroll
                    for (int i = 0; i < 4; ++i)
                        #pragma unroll
                        for (int j = 0; j < 4; ++j) sums[i][j] = __fma_rn(x[i], y[j], sums[i][j]);
                }
            }
            qsim_note(of_row, &norms[0][fetched], &lows[0][fetched]);
            qsim_note(of_column, &norms[1][fetched], &lows[1][fetched]);
            __syncthreads();
            if (!mine) continue;
            const double unit = __dmul_rn((double)(stop - begin + 3), 0x1.00001p-53);
            #pragma unroll 1
            for (int output = 0; output < 16; ++output) {
                const double sum = sums[0][0];
                #pragma unroll
                for (int i = 0; i < 15; ++i)  // on to the next: a loop that is rolled, and so short, has no other index
                    sums[i / 4][i % 4] = sums[(i + 1) / 4][(i + 1) % 4];
                const int m = qsim_own(first_row, 8, output / 4), n = qsim_own(first_column, 16, output % 4);
                if (top + m >= rows || start + n >= columns) continue;
                const double reach = __dmul_rn(norms[0][m], norms[1][n]);
                const bool on_grid = __dmul_rn(reach, 0x1.00001p0) < qsim_power(53 + lows[0][m] + lows[1][n]);
                const QsimFactors by{a.factor ? a.factor[top + m] : 1.0, b.factor ? b.factor[start + n] : 1.0, divisor,
                                     a.factor || b.factor || divisor != 1.0};
                float rounded;
                const bool decided = qsim_decided(sum, on_grid ? 0.0 : __dmul_rn(unit, reach), by, rounded);
                const long long at = (replica * rows + top + m) * columns + start + n;
                const float before = begin ? out[at] : 0.0f;
                out[at] = width ? qsim_float(__fadd_rn(before, rounded)) : rounded;
                open[at] = (begin ? open[at] : 0) | (decided ? 0 : 1);
            }
        }
    }
}

extern "C" __global__ void qsim_exact_of_sums(
    const int* sums, const double* row, const double* column, float* out, unsigned char* open, long long rows,
    long long columns, double unit, double divisor)
{
    const long long outputs = rows * columns, stride = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < outputs; at += stride) {
        const QsimFactors by{row ? row[at / columns] : 1.0, column ? column[at % columns] : 1.0, divisor,
                             row || column || divisor != 1.0};
        // 1.5 * 2^52 and an integer, less 1.5 * 2^52: the conversion, by the same operation on every target.
        const double sum = __dadd_rn(__longlong_as_double(0x4338000000000000ll + sums[at]), -6755399441055744.0);
        float rounded = 0.0f;
        open[at] = qsim_decided(__dmul_rn(sum, unit), 0.0, by, rounded) ? 0 : 1;
        out[at] = rounded;
    }
}

extern "C" __global__ void qsim_exact_settle(QSIM_PARAMETERS)
{
    QSIM_SIDES;
    const long long outputs = rows * columns, stride = (long long)gridDim.x * blockDim.x;
    const int part = width ? width : depth, lane = threadIdx.x % 32;
    for (long long replica = blockIdx.y; replica < replicas; replica += gridDim.y)
        for (long long near = (long long)blockIdx.x * blockDim.x + threadIdx.x - lane; near < outputs; near += stride) {
            // A warp looks at 32 outputs, then makes those that wait one after another, each with all of its lanes.
            const bool mine = near + lane < outputs && open[replica * outputs + near + lane];
            for (unsigned wait = __ballot_sync(0xFFFFFFFFu, mine); wait != 0; wait &= wait - 1) {
                const long long at = near + __ffs((int)wait) - 1;
                const QsimRow row = qsim_row(a, replica, at / columns), column = qsim_row(b, replica, at % columns);
                const QsimFactors by{row.factor, column.factor, divisor, a.factor || b.factor || divisor != 1.0};
                float total = 0.0f;
                for (int begin = 0; begin < depth; begin += part) {
                    const float rounded = qsim_settled(a, b, row, column, begin, min(begin + part, depth), by);
                    total = width ? __fadd_rn(total, rounded) : rounded;
                }
                if (lane == 0) out[replica * outputs + at] = qsim_float(total);
            }
        }
}
