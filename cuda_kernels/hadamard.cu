// qsim_hadamard: the Walsh-Hadamard transform of blocks of 16 or 32 along memory, between two factors an element.
//
// Contract
//   Each float operation is correctly rounded, subnormals kept. x, out [count], contiguous, out may be x; count a
//   multiple of size, 16 or 32; before, after [size]. Of a block v: v_j = x_j * before_j; stages of distance h = 1, 2,
//   4 ... size / 2, in each (v_i, v_{i+h}) becomes (RN(v_i + v_{i+h}), RN(v_i - v_{i+h})) for every i without bit h;
//   y_i = v_i * after_i, then + 0, so that no zero is negative. NaN is always 7fc00000.
//   Grid: x strides over chunks of 128 elements a warp, four a lane; one-dimensional blocks, a multiple of 32 threads.

#define QSIM_FULL_WARP 0xFFFFFFFFu

// One stage inside a lane: numbers i and i + h of its four.
__device__ __forceinline__ void qsim_butterfly(float& low, float& high)
{
    const float sum = __fadd_rn(low, high);
    high = __fsub_rn(low, high);
    low = sum;
}

extern "C" __global__ void qsim_hadamard(
    const float* x, const float* before, const float* after, float* out, long long count, int size)
{
    const int lane = threadIdx.x % 32, place = 4 * lane % size;
    float first[4], last[4];
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
        first[e] = before[place + e];
        last[e] = after[place + e];
    }
    const bool wide = ((unsigned long long)x | (unsigned long long)out) % 16 == 0;
    const long long groups = count / 4, stride = (long long)gridDim.x * blockDim.x;
    const long long begin = (long long)blockIdx.x * blockDim.x + threadIdx.x - lane;

    for (long long base = begin; base < groups; base += stride) {
        const long long group = base + lane;
        const bool present = group < groups;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (present && wide) {
            const float4 four = *reinterpret_cast<const float4*>(x + 4 * group);
            v[0] = four.x;
            v[1] = four.y;
            v[2] = four.z;
            v[3] = four.w;
        } else if (present) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) v[e] = x[4 * group + e];
        }
        #pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = __fmul_rn(v[e], first[e]);
        qsim_butterfly(v[0], v[1]);
        qsim_butterfly(v[2], v[3]);
        qsim_butterfly(v[0], v[2]);
        qsim_butterfly(v[1], v[3]);
        for (int by = 1; by < size / 4; by *= 2) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float other = __shfl_xor_sync(QSIM_FULL_WARP, v[e], by);
                v[e] = lane & by ? __fsub_rn(other, v[e]) : __fadd_rn(v[e], other);
            }
        }
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float y = __fadd_rn(__fmul_rn(v[e], last[e]), 0.0f);  // -0 becomes +0, all else stays
            v[e] = y == y ? y : __uint_as_float(0x7FC00000u);
        }
        if (present && wide) {
            *reinterpret_cast<float4*>(out + 4 * group) = make_float4(v[0], v[1], v[2], v[3]);
        } else if (present) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) out[4 * group + e] = v[e];
        }
    }
}
