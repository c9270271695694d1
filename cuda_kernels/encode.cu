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
//   Any grid and block of x and y size: thread x strides over elements, y over replicas. No shared memory.

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

extern "C" __global__ void qsim_encode(
    const float* x, const float* scale, const float* center, unsigned char* codes,
    long long replicas, long long per_replica, long long center_period, long long center_stride,
    int mantissa_bits, int bias, unsigned max_code, unsigned sign_bit, unsigned negative_zero,
    unsigned overflow_code, unsigned nan_code, unsigned negative_nan_code)
{
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long stride = (long long)gridDim.x * blockDim.x;

    for (long long r = (long long)blockIdx.y * blockDim.y + threadIdx.y; r < replicas;
         r += (long long)gridDim.y * blockDim.y) {
        const float s = scale ? scale[r] : 1.0f;
        for (long long j = first; j < per_replica; j += stride) {
            const long long i = r * per_replica + j;
            const float c = center ? center[r * center_stride + j % center_period] : 0.0f;
            const float value = x[i];
            const float y = __fmul_rn(__fsub_rn(value, c), s);

            const unsigned bits = __float_as_uint(y);
            const unsigned magnitude = bits & 0x7FFFFFFFu;
            const unsigned code = qsim_magnitude_code(magnitude, mantissa_bits, bias);
            const unsigned limited = code > max_code ? overflow_code : code;
            const unsigned sign = (bits >> 31) & ((limited | negative_zero) != 0u ? 1u : 0u);
            const unsigned number = limited | (sign != 0u ? sign_bit : 0u);

            const bool negative = __float_as_uint(value) > 0xFF800000u;  // x is a NaN with its sign set
            codes[i] = (unsigned char)(magnitude > 0x7F800000u ? (negative ? negative_nan_code : nan_code) : number);
        }
    }
}
