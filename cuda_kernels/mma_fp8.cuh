// mma.sync.m16n8k32 of FP8 with float32 sums. Fragments as in mma.cuh: a byte is a code, d is float32.
//
// On sm_89 the instruction is native and its bits are those of the model ada_mma_sync; on sm_90a and newer the compiler
// lowers it to two float16 instructions and one addition, hopper_mma_sync. The emulation takes one of them by
// QSIM_EMULATED_ARCH. Needs block_fma.cuh.
#pragma once

#if defined(QSIM_EMULATED)
#define QSIM_LOWERED (QSIM_EMULATED_ARCH >= 90)

namespace qsim_fp8 {

struct Fragments {
    unsigned a[4], b[2];
    float d[4];
};

// Where product k of an instruction stands: its first step takes 16 of them, its second the others.
constexpr int place_of(int k) { return QSIM_LOWERED ? 16 * (k / 2 % 2) + k / 4 * 2 + k % 2 : k; }

inline float dot(const Code* a, const Code* b, int mantissa, float c)
{
    constexpr int FRACTION = QSIM_LOWERED ? 25 : 13, RESULT = QSIM_LOWERED ? 23 : 13;
    float sum = QSIM_LOWERED ? 0.0f : c;
    for (int half = 0; half < 32; half += 16) sum = step<FRACTION, RESULT>(a + half, b + half, 16, mantissa, sum);
    if (QSIM_LOWERED) sum = c + sum + 0.0f;
    return canonical(sum);
}

template <int A, int B>
void combine(unsigned, unsigned char (*in)[qsim_emulation::BLOB], unsigned char (*out)[qsim_emulation::BLOB])
{
    static Code left[16][32], right[8][32];
    static float sum[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        Fragments own;
        std::memcpy(&own, in[lane], sizeof own);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i)
            for (int byte = 0; byte < 4; ++byte)
                left[g + 8 * (i % 2)][place_of(16 * (i / 2) + 4 * t + byte)] =
                    decoded(own.a[i] >> (8 * byte) & 255u, A, QSIM_LOWERED);
        for (int i = 0; i < 2; ++i)
            for (int byte = 0; byte < 4; ++byte)
                right[g][place_of(16 * i + 4 * t + byte)] = decoded(own.b[i] >> (8 * byte) & 255u, B, QSIM_LOWERED);
        for (int i = 0; i < 4; ++i) sum[g + 8 * (i / 2)][2 * t + i % 2] = own.d[i];
    }
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 8; ++column)
            sum[row][column] = dot(left[row], right[column], mantissa_of(A) + mantissa_of(B), sum[row][column]);
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
