// qsim_fp4_blocks_*: sums of packed E2M1 products with a scale a block of k, the exact sum of each block rounded to
// float32 and added in ascending k. Through the INT8 tensor cores.
//
// Contract
//   a [rows, bytes], b [columns, bytes] as in fp4_sums.cu. Scales, contiguous: a_scales [ceil(rows / a_extent), blocks
//   of a], b_scales alike; of MX blocks of 32 k in E8M0, of NV blocks of 16 k in E4M3FN. out float32 [rows, columns]:
//   acc = +0, then for each block of the narrower width, ascending, acc = RN(acc + RN(sum of a b s_a s_b)), the sum in
//   the bracket exact. A scale that is NaN makes its partials NaN; every NaN is 7fc00000.
//   Grid: x strides over tiles; blocks of QSIM_THREADS.
// Tiles as in tile.cuh; a stage of 64 bytes holds 64 elements, two or four blocks.
//
// Why the bits are these. S, the sum of a block in units of 1/4, is an integer up to 32 * 144 = 4608: 13 bits. The
// instruction adds it to the bits of QSIM_MAGIC = 1.5 * 2^23, so its result is the float32 QSIM_MAGIC + S.
//   Plain: E4M3 scales, and E8M0 scales within 2^-58..2^58. Then QSIM_MAGIC s_a / 4 and t = S s_a / 4 (13 + 4 bits) are
//   float32 numbers, t = fma(QSIM_MAGIC + S, s_a / 4, -QSIM_MAGIC s_a / 4) is exact, and so would t s_b be (21 bits,
//   within 2^-120..2^127): RN(t s_b) = t s_b, and acc = fma(t, s_b, acc) rounds what is left to round.
//   Careful: any E8M0. S times the one factor, then the other: the first product is exact, the second rounds once, an
//   addition follows. The first factor is one of E4M3 where there is one; else s_a / 4, a multiple of 2^-129, but s_b
//   where s_a > 2^115: that product may overflow, where s_b > 2^115 too and the partial leaves float32 with it.
// A partial of -0 does not show: acc begins at +0 and is never -0.

enum { QSIM_MX = 0, QSIM_NV = 1 };

#define QSIM_MAGIC 0x4B400000
#define QSIM_SCALE_PITCH (QSIM_TILE + 8)  // the two blocks that a warp writes begin 16 banks apart

// Elements that share a scale code, and the code of 1.
template <int KIND> constexpr int QSIM_BLOCK = KIND == QSIM_MX ? 32 : 16;
template <int KIND> constexpr unsigned QSIM_ONE = KIND == QSIM_MX ? 0x7Fu : 0x38u;
// k of a partial, and how many of them a stage holds.
template <int A, int B> constexpr int QSIM_WIDTH = A == QSIM_MX && B == QSIM_MX ? 32 : 16;
template <int A, int B> constexpr int QSIM_PARTIALS = QSIM_TILE / QSIM_WIDTH<A, B>;

template <int KIND>
__device__ __forceinline__ float qsim_scale(unsigned code)
{
    if (KIND == QSIM_MX)
        return __uint_as_float(code == 0u ? 0x00400000u : code == 0xFFu ? 0x7FC00000u : code << 23);
    if ((code & 0x7Fu) == 0x7Fu) return __uint_as_float(0x7FC00000u);
    // Exponent and fraction where float32 has them; its bias is 120 more. A subnormal stays one until it is scaled.
    return __fmul_rn(__uint_as_float((code & 0x80u) << 24 | (code & 0x7Fu) << 20), 0x1p120f);
}

struct QsimSide {
    const unsigned char *codes, *scales;
    long long rows, extent;  // of its matrix; of a block of scales
};

// What one thread holds of a stage of one side: 32 codes of a row, and their scale codes.
template <int COUNT>
struct QsimHeld {
    unsigned words[4], scales[COUNT];
};

// ``own``: the scales of this row, or null past the last one. ``first``: byte of the row.
template <int KIND, int COUNT>
__device__ __forceinline__ void qsim_hold(
    const QsimSide& side, const unsigned char* own, long long row, long long first, long long depth,
    QsimHeld<COUNT>& held)
{
    qsim_fetch(side.codes, row, side.rows, (depth + 1) / 2, first, depth % 2 != 0, held.words);
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const long long k = 2 * first + 32 / COUNT * i;
        held.scales[i] = own && k < depth ? own[k / QSIM_BLOCK<KIND>] : QSIM_ONE<KIND>;
    }
}

template <int COUNT>
__device__ __forceinline__ void qsim_put(const QsimHeld<COUNT>& held, unsigned* words)
{
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[2 * i] = qsim_twice(held.words[i]);
        words[2 * i + 1] = qsim_twice(held.words[i] >> 16);
    }
}

// Whether a scale is too far from 1 for the plain path.
template <int KIND, int COUNT>
__device__ __forceinline__ bool qsim_far(const QsimHeld<COUNT>& held)
{
    bool far = false;
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) far = far || (KIND == QSIM_MX && held.scales[i] - 69u > 116u);
    return far;
}

// Adds one partial; ``sum``: QSIM_MAGIC + S as float32; offset: -QSIM_MAGIC s_a / 4.
template <bool PLAIN, int A, int B>
__device__ __forceinline__ float qsim_promoted(float acc, float sum, float quarter_a, float offset, float scale_b)
{
    if (PLAIN) return __fmaf_rn(__fmaf_rn(sum, quarter_a, offset), scale_b, acc);
    const bool b_first = A == QSIM_MX && (B == QSIM_NV || quarter_a > 0x1p113f);
    const float exact = __fmul_rn(__fsub_rn(sum, __int_as_float(QSIM_MAGIC)), b_first ? scale_b : quarter_a);
    return __fadd_rn(acc, __fmul_rn(exact, b_first ? quarter_a : scale_b));
}

// Every partial of a stage, in ascending k.
template <bool PLAIN, int A, int B>
__device__ __forceinline__ void qsim_promote_stage(
    const unsigned* left, const unsigned* right, const float* left_scales, const float* right_scales,
    const QsimLane& lane, float (&acc)[2][4][4])
{
    constexpr int SHARE = 32 / QSIM_WIDTH<A, B>;  // partials of a fragment of 32 k
    #pragma unroll(PLAIN ? 2 : 1)  // rolled where it is rare: fewer registers
    for (int k = 0; k < 2; ++k) {
        unsigned rows_of_a[2][4], columns_of_b[4][2];
        qsim_fragments(left, right, 8 * k, lane, rows_of_a, columns_of_b);
        #pragma unroll
        for (int half = 0; half < SHARE; ++half) {
            const int at = (SHARE * k + half) * QSIM_SCALE_PITCH;
            const float* scales_a = left_scales + at + lane.row + lane.g;
            const float* scales_b = right_scales + at + lane.column + 2 * lane.t;
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float quarters[2] = {scales_a[16 * m], scales_a[16 * m + 8]};
                const float offsets[2] = {__fmul_rn(quarters[0], -__int_as_float(QSIM_MAGIC)),
                                          __fmul_rn(quarters[1], -__int_as_float(QSIM_MAGIC))};
                #pragma unroll
                for (int n = 0; n < 4; ++n) {
                    int sums[4];
                    if (SHARE == 1)
                        qsim_mma_s8_32(sums, rows_of_a[m], columns_of_b[n], QSIM_MAGIC);
                    else
                        qsim_mma_s8_16(sums, rows_of_a[m][2 * half], rows_of_a[m][2 * half + 1],
                                       columns_of_b[n][half], QSIM_MAGIC);
                    #pragma unroll
                    for (int i = 0; i < 4; ++i)
                        acc[m][n][i] =
                            qsim_promoted<PLAIN, A, B>(acc[m][n][i], __int_as_float(sums[i]), quarters[i / 2],
                                                       offsets[i / 2], scales_b[8 * n + i % 2]);
                }
            }
        }
    }
}

template <int A, int B>
__device__ __forceinline__ void qsim_fp4_blocks(
    const QsimSide& a, const QsimSide& b, float* out, long long depth, unsigned* left, unsigned* right,
    float* left_scales, float* right_scales)
{
    constexpr int COUNT = QSIM_PARTIALS<A, B> / 2;  // of one thread in a stage
    const long long across = (b.rows + QSIM_TILE - 1) / QSIM_TILE, down = (a.rows + QSIM_TILE - 1) / QSIM_TILE;
    const long long blocks_a = (depth + QSIM_BLOCK<A> - 1) / QSIM_BLOCK<A>;
    const long long blocks_b = (depth + QSIM_BLOCK<B> - 1) / QSIM_BLOCK<B>;
    const QsimLane lane = qsim_lane();
    const int fetched = threadIdx.x / 2, half = threadIdx.x % 2;
    const int word = fetched * QSIM_PITCH + 8 * half;

    for (long long tile = blockIdx.x; tile < across * down; tile += gridDim.x) {
        const long long top = tile / across * QSIM_TILE, start = tile % across * QSIM_TILE;
        const long long row = top + fetched, column = start + fetched;
        const unsigned char* own_a = row < a.rows ? a.scales + row / a.extent * blocks_a : nullptr;
        const unsigned char* own_b = column < b.rows ? b.scales + column / b.extent * blocks_b : nullptr;
        float acc[2][4][4] = {};
        QsimHeld<COUNT> from_a, from_b;
        qsim_hold<A>(a, own_a, row, 16 * half, depth, from_a);
        qsim_hold<B>(b, own_b, column, 16 * half, depth, from_b);
        for (long long k = 0; k < depth; k += QSIM_TILE) {
            __syncthreads();  // the last stage has been read
            qsim_put(from_a, left + word);
            qsim_put(from_b, right + word);
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int at = (COUNT * half + i) * QSIM_SCALE_PITCH + fetched;
                left_scales[at] = __fmul_rn(qsim_scale<A>(from_a.scales[i]), 0.25f);
                right_scales[at] = qsim_scale<B>(from_b.scales[i]);
            }
            const bool careful = __syncthreads_or(qsim_far<A>(from_a) || qsim_far<B>(from_b));
            if (k + QSIM_TILE < depth) {  // on their way while this stage is multiplied
                qsim_hold<A>(a, own_a, row, (k + QSIM_TILE) / 2 + 16 * half, depth, from_a);
                qsim_hold<B>(b, own_b, column, (k + QSIM_TILE) / 2 + 16 * half, depth, from_b);
            }
            if (careful && (A == QSIM_MX || B == QSIM_MX))
                qsim_promote_stage<false, A, B>(left, right, left_scales, right_scales, lane, acc);
            else
                qsim_promote_stage<true, A, B>(left, right, left_scales, right_scales, lane, acc);
        }
        qsim_outputs(top, start, a.rows, b.rows, lane, [&](int m, int n, int i, long long at) {
            const float y = acc[m][n][i];
            out[at] = y == y ? y : __uint_as_float(0x7FC00000u);
        });
    }
}

#define QSIM_FP4_ENTRY(name, A, B)                                                                                  \
    extern "C" __global__ void __launch_bounds__(QSIM_THREADS) name(                                                \
        const unsigned char* a, const unsigned char* b, const unsigned char* a_scales, const unsigned char* b_scales, \
        float* out, long long rows, long long columns, long long depth, long long a_extent, long long b_extent)     \
    {                                                                                                               \
        __shared__ unsigned left[QSIM_TILE * QSIM_PITCH], right[QSIM_TILE * QSIM_PITCH];                            \
        __shared__ float left_scales[QSIM_PARTIALS<A, B> * QSIM_SCALE_PITCH];                                       \
        __shared__ float right_scales[QSIM_PARTIALS<A, B> * QSIM_SCALE_PITCH];                                      \
        const QsimSide own_a{a, a_scales, rows, a_extent}, own_b{b, b_scales, columns, b_extent};                   \
        qsim_fp4_blocks<A, B>(own_a, own_b, out, depth, left, right, left_scales, right_scales);                    \
    }

QSIM_FP4_ENTRY(qsim_fp4_blocks_mx_mx, QSIM_MX, QSIM_MX)
QSIM_FP4_ENTRY(qsim_fp4_blocks_mx_nv, QSIM_MX, QSIM_NV)
QSIM_FP4_ENTRY(qsim_fp4_blocks_nv_mx, QSIM_NV, QSIM_MX)
QSIM_FP4_ENTRY(qsim_fp4_blocks_nv_nv, QSIM_NV, QSIM_NV)
