// qsim_epilogue*: from an accumulator to D: scales, alpha, beta, a correction, a bias, amax, the output format.
//
// Contract, RN float32 to nearest even, subnormals kept (--fmad=false -ftz=false); fma where the contract says so
//   acc [rows, columns], contiguous. row [rows], column [columns]: factors, or null: 1. c, correction, bias: element
//   r * down + j * across, or null. z = RN(beta c), 0 without c.
//     product        m = RN(row column), or RN(m alpha) where alpha is not 1; y = RN(acc m + z), one rounding
//     others         y = acc; rows_first RN(RN(y row) column), columns_first RN(RN(y column) row);
//                    then y = RN(y alpha + z), one rounding, where alpha is not 1 or there is c
//     y = RN(y + correction), of RN(correction alpha) where alpha is not 1; y = RN(y + bias); a NaN becomes ``nan``
//   top is raised to the bits of the largest finite |y|; 0 beforehand.
//   qsim_epilogue: out float32, float16 (uint16), or values of bfloat16 in float32 whose NaN is 7fc00000.
//   qsim_epilogue_codes: out uint8, the code of RN(y scale) by rules [21] (QsimRules), a NaN of the product positive;
//   refused, 0 beforehand, grows by the elements that the policy refuses.
//   Grid: x strides over groups of four columns, y over rows; blocks of whole warps.
// fma(a, b, +0) is RN(a b) but for an exact 0 of negative sign, which becomes +0, as in the CPU's fma32.

enum { QSIM_EXACT = 0, QSIM_PRODUCT = 1, QSIM_ROWS_FIRST = 2, QSIM_COLUMNS_FIRST = 3 };
enum { QSIM_FLOAT32 = 0, QSIM_FLOAT16 = 1, QSIM_BFLOAT16 = 2 };

struct QsimPlane {
    const float* at;  // or null
    long long down, across;
};

struct QsimSteps {
    int order;
    float alpha, beta;
    unsigned nan;
};

// ``count`` numbers that lie ``across`` apart, or ``otherwise`` without an address; 0 behind them.
__device__ __forceinline__ void qsim_four(
    const float* at, long long across, int count, float otherwise, float (&four)[4])
{
    if (at && across == 1 && count == 4 && reinterpret_cast<unsigned long long>(at) % 16 == 0) {
        const float4 all = *reinterpret_cast<const float4*>(at);
        four[0] = all.x;
        four[1] = all.y;
        four[2] = all.z;
        four[3] = all.w;
        return;
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = !at ? otherwise : i < count ? at[i * across] : 0.0f;
}

__device__ __forceinline__ void qsim_four_of(
    const QsimPlane& plane, long long r, long long j, int count, float (&four)[4])
{
    const float* at = plane.at ? plane.at + r * plane.down + j * plane.across : nullptr;
    qsim_four(at, plane.across, count, 0.0f, four);
}

__device__ __forceinline__ float qsim_finished(
    float acc, float row, float column, float c, bool has_c, const QsimSteps& steps)
{
    const bool scales = steps.alpha != 1.0f;
    const float z = has_c ? __fmul_rn(c, steps.beta) : 0.0f;
    if (steps.order == QSIM_PRODUCT) {
        const float m = __fmul_rn(row, column);
        return __fmaf_rn(acc, scales ? __fmul_rn(m, steps.alpha) : m, z);
    }
    float y = acc;
    if (steps.order == QSIM_ROWS_FIRST) y = __fmul_rn(__fmul_rn(y, row), column);
    if (steps.order == QSIM_COLUMNS_FIRST) y = __fmul_rn(__fmul_rn(y, column), row);
    return scales || has_c ? __fmaf_rn(y, steps.alpha, z) : y;
}

// float16, ties to even. Below 2^-14 its last place is 2^-24, that of float32 at 0.5: the addition rounds.
__device__ __forceinline__ unsigned qsim_half(unsigned bits)
{
    const unsigned sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7C00u | (magnitude >> 13 & 0x3FFu);
    if (magnitude < 0x38800000u)
        return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3F000000u);
    const unsigned rounded = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    return sign | (rounded < 0x7C00u ? rounded : 0x7C00u);
}

__device__ __forceinline__ unsigned qsim_bfloat16(unsigned bits)
{
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC00000u;
    return (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
}

__device__ __forceinline__ void qsim_put(float* at, int count, const unsigned (&bits)[4])
{
    if (count == 4 && reinterpret_cast<unsigned long long>(at) % 16 == 0) {
        *reinterpret_cast<uint4*>(at) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        return;
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < count) at[i] = __uint_as_float(bits[i]);
}

__device__ __forceinline__ void qsim_put(unsigned short* at, int count, const unsigned (&bits)[4])
{
    if (count == 4 && reinterpret_cast<unsigned long long>(at) % 8 == 0) {
        *reinterpret_cast<uint2*>(at) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
        return;
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < count) at[i] = (unsigned short)bits[i];
}

__device__ __forceinline__ void qsim_put(unsigned char* at, int count, const unsigned (&bits)[4])
{
    if (count == 4 && reinterpret_cast<unsigned long long>(at) % 4 == 0) {
        *reinterpret_cast<unsigned*>(at) = bits[0] | bits[1] << 8 | bits[2] << 16 | bits[3] << 24;
        return;
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < count) at[i] = (unsigned char)bits[i];
}

// The bits of y, four at a time, to put(index, count, bits); then top.
template <typename Put>
__device__ __forceinline__ void qsim_epilogue_of(
    const float* acc, const float* row, const float* column, const QsimPlane& c, const QsimPlane& correction,
    const QsimPlane& bias, const QsimSteps& steps, long long rows, long long columns, unsigned* top, Put put)
{
    const long long groups = (columns + 3) / 4, stride = (long long)gridDim.x * blockDim.x;
    unsigned best = 0;
    for (long long r = blockIdx.y; r < rows; r += gridDim.y) {
        const float own = row ? row[r] : 1.0f;
        for (long long group = (long long)blockIdx.x * blockDim.x + threadIdx.x; group < groups; group += stride) {
            const long long j = 4 * group, at = r * columns + j;
            const int count = columns - j < 4 ? (int)(columns - j) : 4;
            float sums[4], factors[4], added[4], corrections[4], biases[4];
            qsim_four(acc + at, 1, count, 0.0f, sums);
            qsim_four(column ? column + j : nullptr, 1, count, 1.0f, factors);
            qsim_four_of(c, r, j, count, added);
            qsim_four_of(correction, r, j, count, corrections);
            qsim_four_of(bias, r, j, count, biases);
            unsigned bits[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                float y = qsim_finished(sums[i], own, factors[i], added[i], c.at != nullptr, steps);
                if (correction.at)
                    y = __fadd_rn(y, steps.alpha != 1.0f ? __fmul_rn(corrections[i], steps.alpha) : corrections[i]);
                if (bias.at) y = __fadd_rn(y, biases[i]);
                bits[i] = y == y ? __float_as_uint(y) : steps.nan;
                const unsigned magnitude = bits[i] & 0x7FFFFFFFu;
                if (i < count && magnitude < 0x7F800000u) best = max(best, magnitude);
            }
            put(at, count, bits);
        }
    }
    __shared__ unsigned bests[32];
    #pragma unroll
    for (int other = 16; other > 0; other /= 2) best = max(best, __shfl_xor_sync(0xFFFFFFFFu, best, other));
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) best = max(best, bests[warp]);
        if (best) atomicMax(top, best);
    }
}

extern "C" __global__ void qsim_epilogue(
    const float* acc, const float* row, const float* column, const float* c, const float* correction,
    const float* bias, void* out, unsigned* top, long long rows, long long columns, long long c_down,
    long long c_across, long long correction_down, long long correction_across, long long bias_down,
    long long bias_across, int order, float alpha, float beta, unsigned nan, int kind)
{
    const QsimSteps steps{order, alpha, beta, nan};
    qsim_epilogue_of(
        acc, row, column, {c, c_down, c_across}, {correction, correction_down, correction_across},
        {bias, bias_down, bias_across}, steps, rows, columns, top,
        [&](long long at, int count, const unsigned (&bits)[4]) {
            unsigned given[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                given[i] = kind == QSIM_FLOAT16 ? qsim_half(bits[i])
                         : kind == QSIM_BFLOAT16 ? qsim_bfloat16(bits[i]) : bits[i];
            if (kind == QSIM_FLOAT16)
                qsim_put(static_cast<unsigned short*>(out) + at, count, given);
            else
                qsim_put(static_cast<float*>(out) + at, count, given);
        });
}

extern "C" __global__ void qsim_epilogue_codes(
    const float* acc, const float* row, const float* column, const float* c, const float* correction,
    const float* bias, unsigned char* out, unsigned* top, long long rows, long long columns, long long c_down,
    long long c_across, long long correction_down, long long correction_across, long long bias_down,
    long long bias_across, int order, float alpha, float beta, unsigned nan, float scale, const unsigned* rules,
    unsigned long long* refused)
{
    const QsimSteps steps{order, alpha, beta, nan};
    QsimRules k;
    unsigned* fields = &k.mantissa_bits;
    for (int i = 0; i < 21; ++i) fields[i] = rules[i];
    unsigned no = 0;
    qsim_epilogue_of(
        acc, row, column, {c, c_down, c_across}, {correction, correction_down, correction_across},
        {bias, bias_down, bias_across}, steps, rows, columns, top,
        [&](long long at, int count, const unsigned (&bits)[4]) {
            unsigned codes[4];
            for (int i = 0; i < 4; ++i) {
                const float y = __fmul_rn(__uint_as_float(bits[i]), scale);
                const QsimCode code = qsim_cast_one(y == y ? __float_as_uint(y) : 0x7FC00000u, 0, false, k);
                codes[i] = code.code;
                no += i < count ? code.refused : 0u;
            }
            qsim_put(out + at, count, codes);
        });
    if (no) atomicAdd(refused, (unsigned long long)no);
}
