// qsim_observe: largest finite residual, and how many NaN and Inf, of every replica.
// qsim_sums_top, qsim_sums_total: order-independent fixed-point sums behind a mean.
//
// Every result is a maximum of integers or a sum of integers, so its bits depend on no grid, no block and no order.
//
// Contract of qsim_observe
//   x [replicas, per_replica] float32, contiguous; center: element r * center_stride + j % center_period, or null: 0.
//   top [replicas] is raised to the float32 bits of the largest finite |RN(x - center)|; nan_count, inf_count
//   [replicas] grow by the number of x that are NaN, Inf. All three are 0 beforehand.
//   Grid: x strides over elements, y over replicas; blocks of one dimension, a multiple of 32 threads, at most 1024.
//
// Contract of the sums: x [rows, length], row r belongs to slot slot_of[r]; results [slots, width], width 1 or length.
//   qsim_sums_top    top: raised to the bits of the largest finite |x|; count: grows by the number of finite x.
//   qsim_sums_total  total: grows by rint(x * unit) of finite x, unit [slots, width] = 2^(40 - exponent of top), so
//                    that |x * unit| < 2^41: exact in float64, rounded to nearest even by adding 1.5 * 2^52.
//   Results are 0 beforehand. Grid: x strides over columns, y over rows. Blocks of one dimension.

#define QSIM_INF 0x7F800000u
#define QSIM_FULL_WARP 0xFFFFFFFFu

__device__ unsigned qsim_magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// Maximum and sums of a block, right in thread 0. shared: 3 x 32 words; all threads of the block take part.
__device__ void qsim_block_reduce(unsigned& top, unsigned& nans, unsigned& infs, unsigned* shared)
{
    for (int by = 16; by > 0; by /= 2) {
        top = max(top, __shfl_down_sync(QSIM_FULL_WARP, top, by));
        nans += __shfl_down_sync(QSIM_FULL_WARP, nans, by);  // lane 0 adds what is right; the last lanes hold anything
        infs += __shfl_down_sync(QSIM_FULL_WARP, infs, by);
    }
    const unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
    __syncthreads();  // the last use of `shared` is over
    if (threadIdx.x % 32 == 0) {
        shared[warp] = top;
        shared[32 + warp] = nans;
        shared[64 + warp] = infs;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (unsigned w = 1; w < warps; ++w) {
            top = max(top, shared[w]);
            nans += shared[32 + w];
            infs += shared[64 + w];
        }
}

extern "C" __global__ void qsim_observe(
    const float* x, const float* center, unsigned* top, unsigned long long* nan_count, unsigned long long* inf_count,
    long long replicas, long long per_replica, long long center_period, long long center_stride)
{
    __shared__ unsigned shared[96];
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long r = blockIdx.y; r < replicas; r += gridDim.y) {
        unsigned best = 0, nans = 0, infs = 0;
        for (long long j = (long long)blockIdx.x * blockDim.x + threadIdx.x; j < per_replica; j += stride) {
            const float value = x[r * per_replica + j];
            const float c = center ? center[r * center_stride + j % center_period] : 0.0f;
            const unsigned residual = qsim_magnitude(__fsub_rn(value, c)), own = qsim_magnitude(value);
            best = max(best, residual < QSIM_INF ? residual : 0u);
            nans += own > QSIM_INF ? 1u : 0u;
            infs += own == QSIM_INF ? 1u : 0u;
        }
        qsim_block_reduce(best, nans, infs, shared);
        if (threadIdx.x == 0) {
            atomicMax(top + r, best);
            if (nans) atomicAdd(nan_count + r, (unsigned long long)nans);
            if (infs) atomicAdd(inf_count + r, (unsigned long long)infs);
        }
    }
}

extern "C" __global__ void qsim_sums_top(
    const float* x, const long long* slot_of, unsigned* top, unsigned long long* count, long long rows,
    long long length, long long width)
{
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
        for (long long j = (long long)blockIdx.x * blockDim.x + threadIdx.x; j < length; j += stride) {
            const unsigned magnitude = qsim_magnitude(x[row * length + j]);
            const long long at = slot_of[row] * width + (width == 1 ? 0 : j);
            if (magnitude < QSIM_INF) {
                atomicMax(top + at, magnitude);
                atomicAdd(count + at, 1ull);
            }
        }
    }
}

extern "C" __global__ void qsim_sums_total(
    const float* x, const long long* slot_of, const double* unit, unsigned long long* total, long long rows,
    long long length, long long width)
{
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
        for (long long j = (long long)blockIdx.x * blockDim.x + threadIdx.x; j < length; j += stride) {
            const float value = x[row * length + j];
            const long long at = slot_of[row] * width + (width == 1 ? 0 : j);
            if (qsim_magnitude(value) < QSIM_INF) {
                const double shifted = __dadd_rn(__dmul_rn((double)value, unit[at]), 6755399441055744.0);
                // Two's complement: adding the negative as unsigned is the signed sum.
                atomicAdd(total + at, (unsigned long long)(__double_as_longlong(shifted) - 0x4338000000000000ll));
            }
        }
    }
}
