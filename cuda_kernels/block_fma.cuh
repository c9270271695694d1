// One block-FMA step on FP8 codes, as tensor cores add: the arithmetic behind the emulated matrix instructions.
//
// qsim/gemm/block_fma.py is the definition, qsim/gemm/models.py the list of models; this is its fast twin in integers.
// A step takes ``count`` products and one accumulator c: products are exact and not normalised, each term is cut
// toward zero to a multiple of 2^(E - FRACTION), E the largest exponent, and the sum to RESULT fraction bits of its own
// binade.
#pragma once

enum { QSIM_E4M3 = 0, QSIM_E5M2 = 1 };

#if defined(QSIM_EMULATED)
namespace qsim_fp8 {

constexpr float INFINITE = __builtin_inff();

// Exponents that say what a code is: of zero so low, of Inf and NaN so high, that the largest of a step shows it.
constexpr int NOTHING = -4000, SPECIAL = 20000;

// value = n * 2^(exponent - mantissa bits of the format), or ``special`` where exponent is SPECIAL.
struct Code {
    int n, exponent;
    float special;
};

constexpr int mantissa_of(int format) { return format == QSIM_E4M3 ? 3 : 2; }

// normal: subnormals are written as a conversion to float16 leaves them, with their leading bit first.
inline Code decoded(unsigned code, int format, bool normal)
{
    const int mantissa = mantissa_of(format), bias = format == QSIM_E4M3 ? 7 : 15;
    const int field = static_cast<int>(code >> mantissa & (format == QSIM_E4M3 ? 15u : 31u));
    const int low = static_cast<int>(code & ((1u << mantissa) - 1));
    const bool negative = code >> 7 & 1u;
    if (format == QSIM_E4M3 ? (code & 0x7Fu) == 0x7Fu : (field == 31 && low != 0))
        return {0, SPECIAL, __builtin_nanf("")};
    if (format == QSIM_E5M2 && field == 31) return {0, SPECIAL, negative ? -INFINITE : INFINITE};
    int n = field == 0 ? low : low + (1 << mantissa), exponent = (field == 0 ? 1 : field) - bias;
    if (n == 0) return {0, NOTHING, 0.0f};
    while (normal && n < 1 << mantissa && exponent > -14) {
        n *= 2;
        --exponent;
    }
    return {negative ? -n : n, exponent, 0.0f};
}

// n * 2^shift toward zero.
inline long long cut(long long n, int shift)
{
    const long long magnitude = n < 0 ? -n : n;
    const long long moved = shift >= 0 ? magnitude << shift : magnitude >> (shift > -63 ? -shift : 63);
    return n < 0 ? -moved : moved;
}

// What IEEE gives where c or a factor is Inf or NaN: only such terms count.
inline float not_finite(const Code* a, const Code* b, int count, float c)
{
    bool any = !std::isfinite(c);
    float sum = c;
    for (int k = 0; k < count; ++k) {
        if (a[k].exponent != SPECIAL && b[k].exponent != SPECIAL) continue;
        const float left = a[k].exponent == SPECIAL ? a[k].special : static_cast<float>((a[k].n > 0) - (a[k].n < 0));
        const float right = b[k].exponent == SPECIAL ? b[k].special : static_cast<float>((b[k].n > 0) - (b[k].n < 0));
        sum = any ? sum + left * right : left * right;
        any = true;
    }
    return sum;
}

// mantissa: the sum of both formats' mantissa bits.
template <int FRACTION, int RESULT>
inline float step(const Code* a, const Code* b, int count, int mantissa, float c)
{
    int top = NOTHING;
    for (int k = 0; k < count; ++k) {
        const int exponent = a[k].exponent + b[k].exponent;
        top = exponent > top ? exponent : top;
    }
    if (top > SPECIAL / 2 || !std::isfinite(c)) return not_finite(a, b, count, c);
    const unsigned bits = __float_as_uint(c);
    const int field = static_cast<int>(bits >> 23 & 255u), low = static_cast<int>(bits & 0x7FFFFFu);
    const int own = field == 0 ? low : low + (1 << 23), at = (field == 0 ? 1 : field) - 127;
    if (own != 0 && at > top) top = at;
    if (top < NOTHING / 2) return 0.0f;

    long long total = cut(bits >> 31 ? -own : own, at - 23 - top + FRACTION);
    for (int k = 0; k < count; ++k) {
        const int n = a[k].n * b[k].n, down = top - a[k].exponent - b[k].exponent;
        const long long magnitude = static_cast<long long>(n < 0 ? -n : n) << (FRACTION - mantissa);
        const long long moved = magnitude >> (down < 63 ? down : 63);
        total += n < 0 ? -moved : moved;
    }
    if (total == 0) return 0.0f;
    unsigned long long magnitude = static_cast<unsigned long long>(total < 0 ? -total : total);
    int unit = top - FRACTION;
    const int exponent = 63 - __builtin_clzll(magnitude) + unit;
    if (exponent > 127) return total < 0 ? -INFINITE : INFINITE;
    const int last = exponent - RESULT > -149 ? exponent - RESULT : -149;
    if (last > unit) {
        magnitude >>= last - unit < 63 ? last - unit : 63;
        unit = last;
    }
    const float size = std::ldexp(static_cast<float>(magnitude), unit);
    return (total < 0 ? -size : size) + 0.0f;
}

inline float canonical(float x) { return x == x ? x : __uint_as_float(0x7FFFFFFFu); }

}  // namespace qsim_fp8
#endif
