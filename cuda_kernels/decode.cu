// qsim_decode: values of codes, RN(RN(table[code] * d) + c); NaN is always 7fc00000.
//
// Contract
//   codes, out [replicas, per_replica], contiguous; table [size] of at most 256 float32, any other code is NaN; descale
//   [replicas] or null: no multiplication; center: element r * center_stride + j % center_period, or null: nothing is
//   added (x + (+0) would turn -0 into +0). Each operation is correctly rounded, subnormals kept.
//   Grid: x strides over elements, y over replicas; one-dimensional blocks. Shared memory: the products of the codes.

extern "C" __global__ void qsim_decode(
    const unsigned char* codes, const float* table, const float* descale, const float* center, float* out,
    long long replicas, long long per_replica, long long center_period, long long center_stride, long long size)
{
    __shared__ float product[256];
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long r = blockIdx.y; r < replicas; r += gridDim.y) {
        __syncthreads();  // the products of the last replica are no longer read
        for (int code = threadIdx.x; code < 256; code += blockDim.x) {
            const float value = code < size ? table[code] : __uint_as_float(0x7FC00000u);
            product[code] = descale ? __fmul_rn(value, descale[r]) : value;
        }
        __syncthreads();
        for (long long j = (long long)blockIdx.x * blockDim.x + threadIdx.x; j < per_replica; j += stride) {
            float value = product[codes[r * per_replica + j]];
            if (center) value = __fadd_rn(value, center[r * center_stride + j % center_period]);
            out[r * per_replica + j] = value == value ? value : __uint_as_float(0x7FC00000u);
        }
    }
}
