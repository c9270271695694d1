// Scale rules of blocks: from the largest magnitude of a block to its stored scale, and to what its elements are
// multiplied with or divided by. Put before a kernel's text by its launcher. The definition is qsim's recipes; the
// steps are those of its CPU kernels, operation by operation. Knows no policy of elements and no layout.
#pragma once

#define QSIM_MAGNITUDE 0x7FFFFFFFu
#define QSIM_INF 0x7F800000u
#define QSIM_NAN 0x7FC00000u

// Float32Scale, PowerOfTwoScale, then TwoLevelScale by order.
#define QSIM_FLOAT32 0
#define QSIM_POWER 1
#define QSIM_EXACT 2
#define QSIM_TE 3
#define QSIM_TORCHAO 4
#define QSIM_FOUR_OVER_SIX 5

// carry, offset: the two integers of an exponent rule; absolute: four over six sums absolute errors, else squared ones;
// full_range: 6 * scale_max, both 0 where there is one level.
struct QsimRecipe {
    int rule;
    unsigned carry;
    int offset, absolute;
    float fmt_max, scale_max, full_range;
};

// What depends on the amax g of the whole matrix alone.
struct QsimLevels {
    float g, s_enc, s_dec, k, pt, inverse_pt;
};

// code: the stored scale of every rule but QSIM_FLOAT32, whose stored scale is the multiplier. divisor: g * value(code)
// of QSIM_EXACT, exact in float64; its elements have no multiplier but 0, 1 or NaN.
struct QsimScale {
    unsigned code;
    float multiplier;
    double divisor;
};

// min(v, FLT_MAX) of a positive v, Inf included.
__device__ __forceinline__ float qsim_capped(float v)
{
    const float most = __uint_as_float(0x7F7FFFFFu);
    return v < most ? v : most;
}

__device__ __forceinline__ QsimLevels qsim_levels(float full_range, float g)
{
    QsimLevels own;
    const float s_enc = g > 0.0f ? qsim_capped(__fdiv_rn(full_range, g)) : 1.0f;
    own.g = g;
    own.s_enc = s_enc > 0.0f ? s_enc : 1.0f;
    own.s_dec = __fdiv_rn(1.0f, own.s_enc);
    own.k = __fmul_rn(own.s_enc, __uint_as_float(0x3E2AAAABu));  // fl(1/6)
    own.pt = __fdiv_rn(g, full_range);
    own.inverse_pt = __fdiv_rn(1.0f, own.pt);
    return own;
}

// E4M3FN code of a non-negative number, nearest even, saturating. One addition rounds: the anchor weighs 2^20 units of
// the number's binade (of the lowest one below it), so the sum counts units, hidden bit included; a carry out of the
// mantissa moves to the next binade, which is the rounding we want.
__device__ __forceinline__ unsigned qsim_e4m3(float v)
{
    const unsigned magnitude = __float_as_uint(v) & QSIM_MAGNITUDE;
    const unsigned m = min(magnitude, 0x43E00000u);  // 448
    const unsigned field = max(m & QSIM_INF, 121u << 23);  // 2^-6
    const unsigned anchor = field + (20u << 23);
    const unsigned units = __float_as_uint(__fadd_rn(__uint_as_float(m), __uint_as_float(anchor))) - anchor;
    return units + ((field - (121u << 23)) >> 20);
}

// Value of an E4M3FN code: its fields moved to those of float32, then the difference of the biases, exact.
__device__ __forceinline__ float qsim_e4m3_value(unsigned code)
{
    const unsigned bits = (code & 0x80u) << 24 | (code & 0x7Fu) << 20;
    const float value = __fmul_rn(__uint_as_float(bits), __uint_as_float(247u << 23));  // 2^120
    return (code & 0x7Fu) == 0x7Fu ? __uint_as_float(QSIM_NAN) : value;
}

// Value of an E8M0 code.
__device__ __forceinline__ float qsim_e8m0_value(unsigned code)
{
    return __uint_as_float(code == 255u ? QSIM_NAN : code == 0u ? 0x00400000u : code << 23);
}

// min(1 / (d8 * s_dec), FLT_MAX); 0 where d8 is 0.
__device__ __forceinline__ float qsim_inverse(float d8, float s_dec)
{
    const float e = qsim_capped(__fdiv_rn(1.0f, __fmul_rn(d8, s_dec)));
    return d8 > 0.0f ? e : 0.0f;
}

// A non-negative float64 as float32, rounded to odd: one rounding is left, which no earlier one spoils.
__device__ __forceinline__ float qsim_to_odd(double v)
{
    const float near = __double2float_rn(v);
    const double back = (double)near;
    const unsigned below = __float_as_uint(near) - (back > v ? 1u : 0u);
    return __uint_as_float(below | (back != v ? 1u : 0u));
}

__device__ __forceinline__ double qsim_divisor(float g, unsigned code)
{
    return __dmul_rn((double)g, (double)qsim_e4m3_value(code));
}

// Whether a block counts as one of scale zero; seen as in qsim_scale.
__device__ __forceinline__ bool qsim_is_zero(unsigned seen, float multiplier)
{
    return seen == 0u || multiplier == 0.0f;
}

// The scale of a block with a NaN or an Inf in it.
__device__ __forceinline__ QsimScale qsim_bad_scale(int rule, unsigned seen)
{
    const float nan = __uint_as_float(QSIM_NAN);
    if (rule == QSIM_FLOAT32) return {0u, 1.0f, 0.0};
    if (rule != QSIM_POWER) return {0x7Fu, nan, (double)nan};
    if (seen > QSIM_INF) return {255u, nan, 0.0};
    return {254u, __uint_as_float(0x00400000u), 0.0};  // 2^-127
}

// The scale of a block of any rule but four over six. seen: bits of the largest magnitude of all, NaN and Inf included.
__device__ __forceinline__ QsimScale qsim_scale(const QsimRecipe& r, const QsimLevels& l, unsigned seen)
{
    const float amax = __uint_as_float(seen);
    if (seen >= QSIM_INF) return qsim_bad_scale(r.rule, seen);
    if (r.rule == QSIM_FLOAT32) return {0u, seen > 0u ? qsim_capped(__fdiv_rn(r.fmt_max, amax)) : 1.0f, 0.0};
    if (r.rule == QSIM_POWER) {
        const int carried = (int)((seen + r.carry) >> 23) + r.offset;
        const unsigned code = (unsigned)max(0, min(254, carried));
        const unsigned field = 254u - code;  // 2^(127 - code); 2^-127 is a subnormal
        return {code, __uint_as_float(field != 0u ? field << 23 : 0x00400000u), 0.0};
    }
    if (r.rule == QSIM_EXACT) {
        const double quotient = __ddiv_rn(__dmul_rn((double)amax, (double)r.scale_max), (double)l.g);
        const unsigned code = seen > 0u && l.g > 0.0f ? qsim_e4m3(qsim_to_odd(quotient)) : 0u;
        return {code, code > 0u ? 1.0f : 0.0f, qsim_divisor(l.g, code)};
    }
    if (r.rule == QSIM_TE) {
        const unsigned code = qsim_e4m3(__fmul_rn(amax, l.k));
        return {code, qsim_inverse(qsim_e4m3_value(code), l.s_dec), 0.0};
    }
    const float least = __uint_as_float(121u << 23);  // 2^-6
    const float ratio = __fdiv_rn(__fdiv_rn(amax, 6.0f), l.pt);
    const unsigned code = qsim_e4m3(seen > 0u && ratio > least ? ratio : least);
    return {code, seen > 0u ? __fdiv_rn(l.inverse_pt, qsim_e4m3_value(code)) : 1.0f, 0.0};
}

// The two maps of four over six, [0] of amax to 6 and [1] to 4: scale codes, their values, multipliers.
struct QsimMaps {
    unsigned code[2];
    float d8[2], e[2];
};

__device__ __forceinline__ QsimMaps qsim_maps(const QsimLevels& l, unsigned seen)
{
    const float base = __fmul_rn(__fdiv_rn(__uint_as_float(seen), 6.0f), l.s_enc);
    QsimMaps own;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        own.code[i] = qsim_e4m3(i == 0 ? base : __fmul_rn(base, 1.5f));
        own.d8[i] = qsim_e4m3_value(own.code[i]);
        own.e[i] = qsim_inverse(own.d8[i], l.s_dec);
    }
    return own;
}

// The error of one finite number under map i.
__device__ __forceinline__ float qsim_error(
    float v, const QsimMaps& maps, int i, const QsimRecipe& r, const QsimLevels& l)
{
    const float a = fabsf(__fmul_rn(v, maps.e[i]));
    // The value of the E2M1 code: nearest even, saturating at 6; sums of halves, exact.
    float q = a > 0.25f ? 0.5f : 0.0f;
    q = a >= 0.75f ? 1.0f : q;
    q = a > 1.25f ? 1.5f : q;
    q = a >= 1.75f ? 2.0f : q;
    q = a > 2.5f ? 3.0f : q;
    q = a >= 3.5f ? 4.0f : q;
    q = a > 5.0f ? 6.0f : q;
    q = v < 0.0f ? -q : q;
    const float decoded = __fdiv_rn(__fmul_rn(__fmul_rn(q, maps.d8[i]), l.g), r.full_range);
    const float diff = __fsub_rn(decoded, v);
    return r.absolute ? fabsf(diff) : __fmul_rn(diff, diff);
}

// The map with the smaller error; a tie, or Inf against Inf, goes to 6.
__device__ __forceinline__ QsimScale qsim_chosen(const QsimMaps& maps, unsigned seen, float to_six, float to_four)
{
    if (seen >= QSIM_INF) return qsim_bad_scale(QSIM_FOUR_OVER_SIX, seen);
    const bool four = to_four < to_six;
    return {four ? maps.code[1] : maps.code[0], four ? maps.e[1] : maps.e[0], 0.0};
}
