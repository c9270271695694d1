// qsim_encode: float32 -> codes of a sign-magnitude format of at most 8 bits, one code a byte.
//
// Contract
//   y = RN(RN(x - c) * s), each a correctly rounded float32 operation: subnormals kept, nothing contracted
//   (compile with --fmad=false -ftz=false; on a host with -ffp-contract=off).
//   code(y): to nearest, ties to even. A magnitude that rounds beyond max_code, Inf included, gets overflow_code.
//   A NaN y gets nan_code, or negative_nan_code where x itself is a NaN with its sign set: the sign of a NaN that
//   arithmetic makes differs between processors, so it has no say.
//   A negative y that rounds to zero gets the code of -0 where the format has one (negative_zero = 1), else 0.
//
//   x, codes       [replicas, per_replica], contiguous
//   scale          [replicas], or null: s = 1
//   center         element r * center_stride + j % center_period for x[r, j], or null: c = +0 (x - (+0) is x in
//                  every bit). A centre is never -0.
//   mantissa_bits  1..22 explicit bits
//   bias           at most 127; exponent field f > 0 stands for 2^(f - bias)
//   max_code       code of the largest finite value
//   sign_bit       the code with only the sign set
//   overflow_code  code of a positive overflow; a negative one adds the sign bit
//   nan_code, negative_nan_code: whole codes
//
//   x at an address that 4 divides; whole groups of four elements that lie at one that 16 divides are read at once.
//   Any grid and block of x and y size: thread x strides over groups of four elements, y over replicas. No shared memory.

// The code of a magnitude given by its float32 bits, not yet limited to max_code; NaN and Inf come out above it.
__device__ unsigned qsim_magnitude_code(unsigned magnitude, int mantissa_bits, int bias)
{
    // The magnitude is significand * 2^(exponent - 23); float32 subnormals have the lowest exponent, no hidden bit
    // (bias <= 127: they lie below the format's normal numbers too).
    const unsigned field = magnitude >> 23;
    const unsigned significand = (magnitude & 0x7FFFFFu) | (field != 0u ? 0x800000u : 0u);
    const int exponent = (field != 0u ? (int)field : 1) - 127;

    // The last bit kept weighs 2^(binade - mantissa_bits); below the lowest binade the weight stays (subnormals).
    const int lowest = 1 - bias;
    const int binade = exponent > lowest ? exponent : lowest;
    const int wanted = 23 - mantissa_bits + (binade - exponent);
    // From 25 on nothing changes: significand < 2^24 is below half of 2^25, and the result is 0.
    const int drop = wanted < 25 ? wanted : 25;

    // Half the dropped part, less one, plus the last kept bit: carries exactly when above half, or half and odd.
    const unsigned odd = (significand >> drop) & 1u;
    const unsigned rounded = (significand + ((1u << (drop - 1)) - 1u) + odd) >> drop;

    // The hidden bit in `rounded` adds 1 to the field, which is why binades count from 0 here; so does a carry out
    // of the mantissa, and that is the rounding we want (of a subnormal too: it becomes the smallest normal).
    return ((unsigned)(binade - lowest) << mantissa_bits) + rounded;
}

struct QsimFormat {
    int mantissa_bits, bias;
    unsigned max_code, sign_bit, negative_zero, overflow_code, nan_code, negative_nan_code;
};

__device__ __forceinline__ unsigned char qsim_encode_one(float value, float c, float s, const QsimFormat& k)
{
    const unsigned bits = __float_as_uint(__fmul_rn(__fsub_rn(value, c), s));
    const unsigned magnitude = bits & 0x7FFFFFFFu;
    const unsigned code = qsim_magnitude_code(magnitude, k.mantissa_bits, k.bias);
    const unsigned limited = code > k.max_code ? k.overflow_code : code;
    const unsigned sign = (bits >> 31) & ((limited | k.negative_zero) != 0u ? 1u : 0u);
    const unsigned number = limited | (sign != 0u ? k.sign_bit : 0u);

    const bool negative = __float_as_uint(value) > 0xFF800000u;  // x is a NaN with its sign set
    return (unsigned char)(magnitude > 0x7F800000u ? (negative ? k.negative_nan_code : k.nan_code) : number);
}

extern "C" __global__ void qsim_encode(
    const float* x, const float* scale, const float* center, unsigned char* codes,
    long long replicas, long long per_replica, long long center_period, long long center_stride,
    int mantissa_bits, int bias, unsigned max_code, unsigned sign_bit, unsigned negative_zero,
    unsigned overflow_code, unsigned nan_code, unsigned negative_nan_code)
{
    const QsimFormat k = {mantissa_bits, bias, max_code, sign_bit, negative_zero, overflow_code, nan_code,
                          negative_nan_code};
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long stride = (long long)gridDim.x * blockDim.x;

    for (long long r = (long long)blockIdx.y * blockDim.y + threadIdx.y; r < replicas;
         r += (long long)gridDim.y * blockDim.y) {
        const float* row = x + r * per_replica;
        const float s = scale ? scale[r] : 1.0f;
        QsimCenters centers = {center ? center + r * center_stride : nullptr, center_period, 0};
        for (long long j = 4 * first - qsim_offset(row, 4); j < per_replica; j += 4 * stride) {
            float values[4];
            unsigned char four[4];
            qsim_load4(row, j, per_replica, values);
            centers.begin(j);
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                four[e] = qsim_encode_one(values[e], centers.of(j + e, per_replica), s, k);
            qsim_store4(codes + r * per_replica, j, per_replica, four);
        }
    }
}
