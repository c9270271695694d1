// qsim_fp8_wgmma_*: sums of products of FP8 codes by wgmma, fed by TMA: the bits of the model hopper_wgmma.
//
// Contract
//   a, b: tensor maps of codes [rows, K] and [columns, K]: boxes of 128 rows x 128 bytes, 128-byte swizzle, zero
//   outside.
//   out float32 [rows, columns]: sums over k of [begin, end), in chains of ``run`` k (both multiples of 32) that each
//   begin with +0 and take 32 products a step in ascending k; where a chain ends, its partial joins the sum as
//   promote.cuh says, scaled by the block scales of the chain's first k. more: the sum joins what out holds.
//   Grid: x strides over tiles of 128 x 128; blocks of QSIM_THREADS; QSIM_SHARED bytes of dynamic shared memory.
//
// Two warpgroups make 64 x 128 outputs each; one thread of a third keeps four stages of 128 k filled. A stage holds 128
// rows of a, then 128 of b. Its barrier ``full`` counts the producer and the bytes of both loads, ``empty`` the eight
// consuming warps. A chain begins at a new stage; what of a stage lies past the chain's end is not multiplied: zeros
// are, which lie behind the stages and add nothing to an accumulator that a step has made.
// Needs block_fma.cuh, wgmma_emulated.cuh, wgmma.cuh, promote.cuh.

#define QSIM_THREADS 384
#define QSIM_SIDE 128
#define QSIM_DEPTH 128
#define QSIM_OPERAND (QSIM_SIDE * QSIM_DEPTH)
#define QSIM_STAGES 4
// Registers of a thread after they are dealt anew; the launch gives 168 to each of 384.
#define QSIM_CONSUMER 232
#define QSIM_PRODUCER 40

// One side's place in the ring of stages; ``parity`` changes with every turn.
struct QsimRing {
    unsigned base, slot, parity;

    __device__ __forceinline__ unsigned stage() const { return base + slot * (2 * QSIM_OPERAND); }
    __device__ __forceinline__ unsigned full() const { return zeros() + QSIM_PATTERN + slot * 8; }
    __device__ __forceinline__ unsigned empty() const { return full() + QSIM_STAGES * 8; }
    __device__ __forceinline__ unsigned zeros() const { return base + QSIM_STAGES * 2 * QSIM_OPERAND; }
    __device__ __forceinline__ void advance()
    {
        if (++slot < QSIM_STAGES) return;
        slot = 0;
        parity ^= 1;
    }
};

// each(top, start) of every tile of this block.
template <typename Each>
__device__ __forceinline__ void qsim_tiles(int rows, int columns, Each each)
{
    const int across = (columns - 1) / QSIM_SIDE + 1, down = (rows - 1) / QSIM_SIDE + 1;
    for (long long tile = blockIdx.x; tile < (long long)across * down; tile += gridDim.x)
        each((int)(tile / across) * QSIM_SIDE, (int)(tile % across) * QSIM_SIDE);
}

__device__ __forceinline__ void qsim_produce(
    const QsimTensorMap& a, const QsimTensorMap& b, QsimRing ring, int rows, int columns, int begin, int end, int run)
{
    qsim_tiles(rows, columns, [&](int top, int start) {
        for (int first = begin; first < end; first += min(run, end - first)) {
            const int last = first + min(run, end - first);
            for (int at = first; at < last; at += QSIM_DEPTH) {
                qsim_barrier_wait(ring.empty(), ring.parity ^ 1);
                qsim_barrier_expect(ring.full(), 2 * QSIM_OPERAND);
                qsim_tma_load(a, at, top, ring.stage(), ring.full());
                qsim_tma_load(b, at, start, ring.stage() + QSIM_OPERAND, ring.full());
                ring.advance();
            }
        }
    });
}

// One chain, k from first to last - 1, into d.
template <int A, int B>
__device__ __forceinline__ void qsim_chain(float (&d)[64], QsimRing& ring, int first, int last)
{
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const unsigned long long nothing = qsim_descriptor(ring.zeros()) & ~(0x3FFFull << 32);  // the same 8 rows again
    unsigned before = 0;
    for (int at = first; at < last; at += QSIM_DEPTH) {
        qsim_barrier_wait(ring.full(), ring.parity);
        const unsigned long long left = qsim_descriptor(ring.stage() + threadIdx.x / 128 * (64 * QSIM_DEPTH));
        const unsigned long long right = qsim_descriptor(ring.stage() + QSIM_OPERAND);
        qsim_wgmma_fence(d);
        #pragma unroll
        for (int k = 0; k < QSIM_DEPTH; k += 32) {
            const bool inside = at + k < last;  // a branch here would make ptxas serialise the products
            qsim_wgmma<A, B>(d, inside ? left + k / 16 : nothing, inside ? right + k / 16 : nothing, at + k > first);
        }
        qsim_wgmma_commit();
        if (at > first) {
            qsim_wgmma_wait<1>(d);
            if (speaks) qsim_barrier_arrive(before);
        }
        before = ring.empty();
        ring.advance();
    }
    qsim_wgmma_wait<0>(d);
    if (speaks) qsim_barrier_arrive(before);
}

template <int A, int B>
__device__ __forceinline__ void qsim_consume(
    float* out, QsimRing ring, int rows, int columns, int begin, int end, int run, bool more, const QsimScale& scale_a,
    const QsimScale& scale_b)
{
    const bool scaled = scale_a.values != nullptr || scale_b.values != nullptr;
    const int lane = threadIdx.x % 32, own_row = threadIdx.x / 32 * 16 + lane / 4, own_column = lane % 4 * 2;
    // Output i of a thread: the fragment of m64n128, row + 8 of every second pair, two columns of every eight.
    const auto row_of = [&](int i) { return own_row + 8 * (i / 2 % 2); };
    const auto column_of = [&](int i) { return own_column + 8 * (i / 4) + i % 2; };

    qsim_tiles(rows, columns, [&](int top, int start) {
        float sums[64] = {};
        for (int first = begin; first < end; first += min(run, end - first)) {
            float d[64];
            qsim_chain<A, B>(d, ring, first, first + min(run, end - first));
            const int block_a = first / scale_a.depth, block_b = first / scale_b.depth;
            float by_row[2];
            #pragma unroll
            for (int i = 0; i < 2; ++i)
                by_row[i] = qsim_scale_at(scale_a, qsim_scale_row(scale_a, top + row_of(2 * i), rows), block_a);
            #pragma unroll
            for (int i = 0; i < 64; ++i) {
                const int column = qsim_scale_row(scale_b, start + column_of(i), columns);
                const float by_column = qsim_scale_at(scale_b, column, block_b);
                sums[i] = qsim_promoted(sums[i], d[i], scaled, by_row[i / 2 % 2], by_column);
            }
        }
        #pragma unroll
        for (int i = 0; i < 64; ++i) {
            const int row = top + row_of(i), column = start + column_of(i);
            if (row < rows && column < columns) qsim_store_part(out + (long long)row * columns + column, sums[i], more);
        }
    });
}

template <int A, int B>
__device__ __forceinline__ void qsim_fp8_wgmma(
    const QsimTensorMap& a, const QsimTensorMap& b, float* out, int rows, int columns, int begin, int end, int run,
    bool more, const QsimScale& scale_a, const QsimScale& scale_b, const unsigned char* dynamic)
{
    const unsigned base = (qsim_shared_address(dynamic) + QSIM_PATTERN - 1) / QSIM_PATTERN * QSIM_PATTERN;
    QsimRing ring{base, 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < QSIM_STAGES; ++i) {
            qsim_barrier_init(ring.full() + 8 * i, 1);
            qsim_barrier_init(ring.empty() + 8 * i, 8);
        }
    }
    if (threadIdx.x < QSIM_PATTERN / 4) qsim_shared_zero(ring.zeros() + 4 * threadIdx.x);
    qsim_shared_visible();
    __syncthreads();
    if (threadIdx.x < 256) {
        qsim_registers_up(QSIM_CONSUMER);
        qsim_consume<A, B>(out, ring, rows, columns, begin, end, run, more, scale_a, scale_b);
    } else {
        qsim_registers_down(QSIM_PRODUCER);
        if (threadIdx.x == 256) qsim_produce(a, b, ring, rows, columns, begin, end, run);
    }
}

#define QSIM_WGMMA_ENTRY(name, A, B)                                                                              \
    extern "C" __global__ void __launch_bounds__(QSIM_THREADS, 1) name(                                           \
        const __grid_constant__ QsimTensorMap a, const __grid_constant__ QsimTensorMap b, float* out, int rows,   \
        int columns, int begin, int end, int run, int more, const float* scale_a, int rows_a, int depth_a,        \
        int blocks_a, const float* scale_b, int rows_b, int depth_b, int blocks_b)                                \
    {                                                                                                             \
        QSIM_DYNAMIC_SHARED(dynamic);                                                                             \
        qsim_fp8_wgmma<A, B>(a, b, out, rows, columns, begin, end, run, more != 0,                                \
                             {scale_a, rows_a, depth_a, blocks_a}, {scale_b, rows_b, depth_b, blocks_b}, dynamic); \
    }

QSIM_WGMMA_ENTRY(qsim_fp8_wgmma_e4m3_e4m3, QSIM_E4M3, QSIM_E4M3)
QSIM_WGMMA_ENTRY(qsim_fp8_wgmma_e4m3_e5m2, QSIM_E4M3, QSIM_E5M2)
QSIM_WGMMA_ENTRY(qsim_fp8_wgmma_e5m2_e4m3, QSIM_E5M2, QSIM_E4M3)
QSIM_WGMMA_ENTRY(qsim_fp8_wgmma_e5m2_e5m2, QSIM_E5M2, QSIM_E5M2)
