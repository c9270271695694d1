// Matrix instructions of a warp, by their PTX names; emulated from the fragment layout of the PTX ISA ("Matrix
// fragments for mma.m16n8k32" and "for mma.m16n8k16" of .s8). With g = lane / 4 and t = lane % 4:
//   a[0..3]  rows g, g+8, g, g+8 of A [16, 32]; four bytes each at columns 4t, 4t, 4t+16, 4t+16
//   b[0..1]  column g of B [32, 8]; four bytes each at rows 4t, 4t+16
//   d[0..3]  rows g, g, g+8, g+8 of D [16, 8]; columns 2t, 2t+1, 2t, 2t+1
// Of 16 k there are a[0..1] and b[0] alone.
#pragma once

#if defined(QSIM_EMULATED)
struct QsimFragments {
    unsigned a[4], b[2];
    int d[4];
};

// d += A B of 16 or 32 k.
template <int DEPTH>
inline void qsim_mma_emulated(int (&d)[4], const unsigned* a, const unsigned* b)
{
    using qsim_emulation::BLOB;
    QsimFragments mine{};
    std::memcpy(mine.a, a, sizeof(unsigned) * (DEPTH / 8));
    std::memcpy(mine.b, b, sizeof(unsigned) * (DEPTH / 16));
    std::memcpy(mine.d, d, sizeof d);
    const auto combine = [](unsigned, unsigned char (*in)[BLOB], unsigned char (*out)[BLOB]) {
        static signed char left[16][DEPTH], right[DEPTH][8];
        static int sum[16][8];
        QsimFragments all[32];
        for (int lane = 0; lane < 32; ++lane) {
            std::memcpy(&all[lane], in[lane], sizeof all[lane]);
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < DEPTH / 8; ++i)
                for (int byte = 0; byte < 4; ++byte)
                    left[g + 8 * (i % 2)][16 * (i / 2) + 4 * t + byte] =
                        static_cast<signed char>(all[lane].a[i] >> (8 * byte));
            for (int i = 0; i < DEPTH / 16; ++i)
                for (int byte = 0; byte < 4; ++byte)
                    right[16 * i + 4 * t + byte][g] = static_cast<signed char>(all[lane].b[i] >> (8 * byte));
            for (int i = 0; i < 4; ++i) sum[g + 8 * (i / 2)][2 * t + i % 2] = all[lane].d[i];
        }
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < 8; ++column)
                for (int k = 0; k < DEPTH; ++k)
                    sum[row][column] = static_cast<int>(static_cast<unsigned>(sum[row][column]) +
                                                        static_cast<unsigned>(left[row][k] * right[k][column]));
        for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) all[lane].d[i] = sum[g + 8 * (i / 2)][2 * t + i % 2];
            std::memcpy(out[lane], all[lane].d, sizeof all[lane].d);
        }
    };
    struct Sums {
        int d[4];
    };
    const Sums result = qsim_emulation::meet<QsimFragments, Sums>(0xFFFFFFFFu, __LINE__, mine, combine);
    std::memcpy(d, result.d, sizeof d);
}

inline void qsim_mma_s8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    qsim_mma_emulated<32>(d, a, b);
}

inline void qsim_mma_s8_32(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int c)
{
    d[0] = d[1] = d[2] = d[3] = c;
    qsim_mma_emulated<32>(d, a, b);
}

inline void qsim_mma_s8_16(int (&d)[4], unsigned a0, unsigned a1, unsigned b0, int c)
{
    const unsigned a[2] = {a0, a1};
    d[0] = d[1] = d[2] = d[3] = c;
    qsim_mma_emulated<16>(d, a, &b0);
}
#else
// d += A B in int32, wrapping; A and B of int8.
__device__ __forceinline__ void qsim_mma_s8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d = A B + c, the same c for every element: it may stay in registers, where d += A B would set d again and again.
__device__ __forceinline__ void qsim_mma_s8_32(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int c)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %10, %10, %10};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c));
}

// The same of 16 k.
__device__ __forceinline__ void qsim_mma_s8_16(int (&d)[4], unsigned a0, unsigned a1, unsigned b0, int c)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                 "{%7, %7, %7, %7};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a0), "r"(a1), "r"(b0), "r"(c));
}
#endif
