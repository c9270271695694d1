// mma.sync.m16n8k32 of FP8 with float32 sums. Fragments as in mma.cuh: a byte is a code, d is float32.
//
// On sm_89 the instruction is native and its bits are those of the model ada_mma_sync; on sm_90a and newer the compiler
// lowers it to two float16 instructions and one addition, hopper_mma_sync. The emulation takes one of them by
// QSIM_EMULATED_ARCH (qsim/gemm/models.py and block_fma.py are the definition).
#pragma once

enum { QSIM_E4M3 = 0, QSIM_E5M2 = 1 };

#if defined(QSIM_EMULATED)
#define QSIM_LOWERED (QSIM_EMULATED_ARCH >= 90)

namespace qsim_fp8 {

constexpr float INFINITE = __builtin_inff();

// value = n * 2^(exponent - fraction), or, where special is not 0, that.
struct Term {
    long long n;
    int exponent, fraction;
    float special;
};

inline Term decoded(unsigned code, int format)
{
    const int mantissa = format == QSIM_E4M3 ? 3 : 2, bias = format == QSIM_E4M3 ? 7 : 15;
    const int field = static_cast<int>(code >> mantissa & (format == QSIM_E4M3 ? 15u : 31u));
    const int low = static_cast<int>(code & ((1u << mantissa) - 1));
    const bool negative = code >> 7 & 1u;
    if (format == QSIM_E4M3 ? (code & 0x7Fu) == 0x7Fu : (field == 31 && low != 0)) return {0, 0, 0, __builtin_nanf("")};
    if (format == QSIM_E5M2 && field == 31) return {0, 0, 0, negative ? -INFINITE : INFINITE};
    Term term{field == 0 ? low : low + (1 << mantissa), (field == 0 ? 1 : field) - bias, mantissa, 0.0f};
    while (QSIM_LOWERED && term.n != 0 && term.n < 1 << mantissa && term.exponent > -14) {  // normal in float16
        term.n *= 2;
        --term.exponent;
    }
    if (negative) term.n = -term.n;
    return term;
}

inline Term accumulator(float c)
{
    if (!std::isfinite(c)) return {0, 0, 0, c};
    const unsigned bits = __float_as_uint(c);
    const int field = static_cast<int>(bits >> 23 & 255u), low = static_cast<int>(bits & 0x7FFFFFu);
    const long long n = field == 0 ? low : low + (1 << 23);
    return {bits >> 31 ? -n : n, (field == 0 ? 1 : field) - 127, 23, 0.0f};
}

inline Term product(const Term& a, const Term& b)
{
    if (a.special != 0 || b.special != 0) {  // NaN != 0 too
        const float left = a.special != 0 ? a.special : static_cast<float>((a.n > 0) - (a.n < 0));
        const float right = b.special != 0 ? b.special : static_cast<float>((b.n > 0) - (b.n < 0));
        return {0, 0, 0, left * right};
    }
    return {a.n * b.n, a.exponent + b.exponent, a.fraction + b.fraction, 0.0f};
}

// n * 2^shift toward zero.
inline long long shifted(long long n, int shift)
{
    if (shift >= 0) return n * (1LL << shift);
    if (shift <= -63) return 0;
    return n / (1LL << -shift);
}

inline float step(const Term* terms, int count, float c)
{
    constexpr int FRACTION = QSIM_LOWERED ? 25 : 13, RESULT = QSIM_LOWERED ? 23 : 13;
    const Term own = accumulator(c);
    bool any = own.n != 0;
    int top = own.n != 0 ? own.exponent : -1000;
    float special = own.special;
    for (int i = 0; i < count; ++i) {
        if (terms[i].special != 0) special = special != 0 ? special + terms[i].special : terms[i].special;
        if (terms[i].n != 0 && terms[i].exponent > top) top = terms[i].exponent;
        any = any || terms[i].n != 0;
    }
    if (special != 0) return special;
    if (!any) return 0.0f;
    const int unit = top - FRACTION;
    long long total = shifted(own.n, own.exponent - own.fraction - unit);
    for (int i = 0; i < count; ++i)
        total += shifted(terms[i].n, terms[i].exponent - terms[i].fraction - unit);
    if (total == 0) return 0.0f;
    const int exponent = 63 - __builtin_clzll(static_cast<unsigned long long>(total < 0 ? -total : total)) + unit;
    if (exponent > 127) return total < 0 ? -INFINITE : INFINITE;
    const int last = exponent - RESULT > -149 ? exponent - RESULT : -149;
    return static_cast<float>(std::ldexp(static_cast<double>(shifted(total, unit - last)), last)) + 0.0f;
}

inline float dot(const Term* products, float c)
{
    Term own[16];
    float sum = QSIM_LOWERED ? 0.0f : c;
    for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 16; ++i)
            own[i] = products[QSIM_LOWERED ? i / 2 * 4 + 2 * half + i % 2 : 16 * half + i];
        sum = step(own, 16, sum);
    }
    if (QSIM_LOWERED) sum = c + sum + 0.0f;
    return sum == sum ? sum : __uint_as_float(0x7FFFFFFFu);
}

struct Fragments {
    unsigned a[4], b[2];
    float d[4];
};

template <int A, int B>
void combine(unsigned, unsigned char (*in)[qsim_emulation::BLOB], unsigned char (*out)[qsim_emulation::BLOB])
{
    static Term left[16][32], right[8][32];
    static float sum[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        Fragments own;
        std::memcpy(&own, in[lane], sizeof own);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i)
            for (int byte = 0; byte < 4; ++byte)
                left[g + 8 * (i % 2)][16 * (i / 2) + 4 * t + byte] = decoded(own.a[i] >> (8 * byte) & 255u, A);
        for (int i = 0; i < 2; ++i)
            for (int byte = 0; byte < 4; ++byte)
                right[g][16 * i + 4 * t + byte] = decoded(own.b[i] >> (8 * byte) & 255u, B);
        for (int i = 0; i < 4; ++i) sum[g + 8 * (i / 2)][2 * t + i % 2] = own.d[i];
    }
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 8; ++column) {
            Term products[32];
            for (int k = 0; k < 32; ++k) products[k] = product(left[row][k], right[column][k]);
            sum[row][column] = dot(products, sum[row][column]);
        }
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        float own[4];
        for (int i = 0; i < 4; ++i) own[i] = sum[g + 8 * (i / 2)][2 * t + i % 2];
        std::memcpy(out[lane], own, sizeof own);
    }
}

}  // namespace qsim_fp8

template <int A, int B>
inline void qsim_mma_fp8(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    struct Sums {
        float d[4];
    };
    qsim_fp8::Fragments mine;
    std::memcpy(mine.a, a, sizeof a);
    std::memcpy(mine.b, b, sizeof b);
    std::memcpy(mine.d, d, sizeof d);
    const Sums result =
        qsim_emulation::meet<qsim_fp8::Fragments, Sums>(0xFFFFFFFFu, __LINE__, mine, &qsim_fp8::combine<A, B>);
    std::memcpy(d, result.d, sizeof d);
}
#else
#define QSIM_MMA_FP8(left, right)                                                                                  \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." left "." right ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                                     \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// d = A B + d as the device adds; A of format A, B of format B.
template <int A, int B>
__device__ __forceinline__ void qsim_mma_fp8(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    if constexpr (A == QSIM_E4M3 && B == QSIM_E4M3) QSIM_MMA_FP8("e4m3", "e4m3");
    if constexpr (A == QSIM_E4M3 && B == QSIM_E5M2) QSIM_MMA_FP8("e4m3", "e5m2");
    if constexpr (A == QSIM_E5M2 && B == QSIM_E4M3) QSIM_MMA_FP8("e5m2", "e4m3");
    if constexpr (A == QSIM_E5M2 && B == QSIM_E5M2) QSIM_MMA_FP8("e5m2", "e5m2");
}
#endif
