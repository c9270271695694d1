// qsim_unblocks: codes of a matrix and the scales of its blocks, back to float32; NaN is always 7fc00000.
//
// Contract
//   Each float operation is correctly rounded, subnormals kept. codes, out [rows, columns], contiguous; blocks as in
//   blocks.cu; scales [down, across] of QSIM_FLOAT32, scale_codes of the other rules: the other is null. table [size]
//   of at most 256 float32, any other code is NaN. tensor [1]: the amax g of a two-level scale, else null.
//   With v = table[code]:
//     QSIM_FLOAT32  v * (1 / scale)                     QSIM_POWER          v * 2^e
//     QSIM_EXACT    v * d8 * g / F, rounded once        QSIM_TE             (v * d8) * s_dec
//     QSIM_TORCHAO  v * (pt * d8)                       QSIM_FOUR_OVER_SIX  ((v * d8) * g) / F
//   Grid: x strides over chunks; one-dimensional blocks, a multiple of 32 threads. Shared memory: the table.

// What an element of a block is multiplied with first.
__device__ __forceinline__ float qsim_gain(
    const float* scales, const unsigned char* scale_codes, long long block, int rule, const QsimLevels& l)
{
    if (rule == QSIM_FLOAT32) return __fdiv_rn(1.0f, scales[block]);
    const unsigned code = scale_codes[block];
    if (rule == QSIM_POWER) return qsim_e8m0_value(code);
    const float d8 = qsim_e4m3_value(code);
    return rule == QSIM_TORCHAO ? __fmul_rn(l.pt, d8) : d8;
}

__device__ __forceinline__ float qsim_unscaled(float v, float gain, int rule, float full_range, const QsimLevels& l)
{
    float y = __fmul_rn(v, gain);
    if (rule == QSIM_TE) y = __fmul_rn(y, l.s_dec);
    if (rule == QSIM_FOUR_OVER_SIX) y = __fdiv_rn(__fmul_rn(y, l.g), full_range);
    if (rule == QSIM_EXACT) {
        // The product has at most 2 + 4 + 24 bits: exact. The quotient is a tie between two float32 numbers (25 bits)
        // or 2^-31 of it or more away from one; float64 keeps either apart.
        const double product = __dmul_rn(__dmul_rn((double)v, (double)gain), (double)l.g);
        y = __double2float_rn(__ddiv_rn(product, (double)full_range));
    }
    return y == y ? y : __uint_as_float(QSIM_NAN);
}

extern "C" __global__ void qsim_unblocks(
    const unsigned char* codes, const float* scales, const unsigned char* scale_codes, const float* table,
    const float* tensor, float* out, long long rows, long long columns, long long block_rows, long long block_columns,
    int size, int rule, float full_range)
{
    __shared__ float values[256];
    for (int code = threadIdx.x; code < 256; code += blockDim.x)
        values[code] = code < size ? table[code] : __uint_as_float(QSIM_NAN);
    __syncthreads();
    const QsimLevels levels = qsim_levels(full_range, tensor ? *tensor : 0.0f);
    const long long across = (columns + block_columns - 1) / block_columns;
    const bool whole = columns % 4 == 0 && qsim_aligned(codes);

    for (QsimWalk walk(rows, columns); walk.inside(); walk.step()) {
        const long long first = walk.first(), line = walk.row / block_rows * across;
        if (first >= columns) continue;
        const unsigned char* own = codes + walk.row * columns + first;
        float* target = out + walk.row * columns + first;
        unsigned code[4] = {0, 0, 0, 0};
        if (whole) {
            const unsigned four = *reinterpret_cast<const unsigned*>(own);
            #pragma unroll
            for (int e = 0; e < 4; ++e) code[e] = four >> (8 * e) & 0xFFu;
        } else {
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                if (first + e < columns) code[e] = own[e];
        }
        float gain = 0.0f, y[4];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (first + e < columns && (e == 0 || (first + e) % block_columns == 0))
                gain = qsim_gain(scales, scale_codes, line + (first + e) / block_columns, rule, levels);
            y[e] = qsim_unscaled(values[code[e]], gain, rule, full_range, levels);
        }
        if (whole) {
            // By an address of its own: the compiler merges this store with those below, and loses its alignment.
            const long long at = (walk.row * columns + first) / 4;
            reinterpret_cast<float4*>(out)[at] = make_float4(y[0], y[1], y[2], y[3]);
        } else {
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                if (first + e < columns) target[e] = y[e];
        }
    }
}
