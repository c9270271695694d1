// qsim_decode: values of codes, RN(RN(table[code] * d) + c); NaN is always 7fc00000.
//
// Contract
//   codes, out [replicas, per_replica], contiguous; table [size] of at most 256 float32, any other code is NaN; descale
//   [replicas] or null: no multiplication; center: element r * center_stride + j % center_period, or null: nothing is
//   added (x + (+0) would turn -0 into +0). Each operation is correctly rounded, subnormals kept.
//   out at an address that 4 divides; sixteen codes, and four values, that lie whole and aligned move at once.
//   Grid: x strides over groups of sixteen elements, y over replicas; one-dimensional blocks. Shared memory: the products
//   of the codes.

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
        const unsigned char* row = codes + r * per_replica;
        QsimCenters centers = {center ? center + r * center_stride : nullptr, center_period, 0};
        const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
        for (long long j = 16 * first - qsim_offset(row, 1); j < per_replica; j += 16 * stride) {
            unsigned words[4];
            qsim_load16(row, j, per_replica, words);
            centers.begin(j);
            #pragma unroll
            for (int w = 0; w < 4; ++w) {
                float values[4];
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float value = product[words[w] >> (8 * e) & 0xFFu];
                    const float c = centers.of(j + 4 * w + e, per_replica);
                    if (center) value = __fadd_rn(value, c);
                    values[e] = value == value ? value : __uint_as_float(0x7FC00000u);
                }
                qsim_store4(out + r * per_replica, j + 4 * w, per_replica, values);
            }
        }
    }
}
