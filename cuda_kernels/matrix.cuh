// How warps go over a matrix [rows, columns], and how a lane reads and writes four elements of a row. Put before a
// kernel's text by its launcher. Knows no scale and no format. Blocks of one dimension, a multiple of 32 threads.
#pragma once

#define QSIM_CHUNK 128  // elements of a row that a warp takes at once, four a lane

// Warps take chunks one after another along the rows; a chunk of a warp has one row, so all its lanes go the same way.
struct QsimWalk {
    long long row, chunk, rows, chunks, down, across;

    __device__ __forceinline__ QsimWalk(long long rows, long long columns) : rows(rows)
    {
        chunks = (columns + QSIM_CHUNK - 1) / QSIM_CHUNK;
        const long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
        const long long warps = (long long)gridDim.x * blockDim.x / 32;
        row = warp / chunks;
        chunk = warp % chunks;
        down = warps / chunks;
        across = warps % chunks;
    }

    __device__ __forceinline__ bool inside() const { return row < rows; }

    // The first of this lane's four columns; it may lie past the end.
    __device__ __forceinline__ long long first() const { return QSIM_CHUNK * chunk + threadIdx.x % 32 * 4; }

    __device__ __forceinline__ void step()
    {
        row += down;
        chunk += across;
        if (chunk >= chunks) {
            chunk -= chunks;
            ++row;
        }
    }
};

// x less its centre: element (i, j) of the centre at i * center_down + j * center_across, or null.
struct QsimMatrix {
    const float* x;
    const float* center;
    long long rows, columns, center_down, center_across;
};

__device__ __forceinline__ bool qsim_aligned(const void* at) { return (unsigned long long)at % 16 == 0; }

// RN(value - c). The sign of a NaN that arithmetic makes differs between processors, so only x's own NaN has one.
__device__ __forceinline__ float qsim_residual(float value, float c)
{
    const unsigned own = __float_as_uint(value), left = __float_as_uint(__fsub_rn(value, c));
    const unsigned sign = (own & 0x7FFFFFFFu) > 0x7F800000u ? own & 0x80000000u : 0u;
    return __uint_as_float((left & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u | sign : left);
}

// Four elements of a row from column ``first`` on; +0 past its end.
__device__ __forceinline__ void qsim_read_four(const QsimMatrix& of, long long row, long long first, float (&v)[4])
{
    const float* own = of.x + row * of.columns + first;
    v[0] = v[1] = v[2] = v[3] = 0.0f;
    if (of.columns % 4 == 0 && qsim_aligned(of.x)) {
        if (first >= of.columns) return;
        const float4 four = *reinterpret_cast<const float4*>(own);
        v[0] = four.x;
        v[1] = four.y;
        v[2] = four.z;
        v[3] = four.w;
    } else {
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            if (first + e < of.columns) v[e] = own[e];
    }
    if (!of.center) return;
    const float* center = of.center + row * of.center_down + first * of.center_across;
    #pragma unroll
    for (int e = 0; e < 4; ++e)
        if (first + e < of.columns) v[e] = qsim_residual(v[e], center[e * of.center_across]);
}

// Four codes of a row from column ``first`` on, one a byte or two, the even one low. Codes past the end are 0.
__device__ __forceinline__ void qsim_write_four(
    unsigned char* codes, long long row, long long first, long long columns, bool packed, const unsigned (&code)[4])
{
    if (packed) {
        unsigned char* own = codes + row * ((columns + 1) / 2) + first / 2;
        const unsigned low = code[0] | code[1] << 4, high = code[2] | code[3] << 4;
        if (columns % 4 == 0) {
            if (first < columns) *reinterpret_cast<unsigned short*>(own) = (unsigned short)(low | high << 8);
        } else {
            if (first < columns) own[0] = (unsigned char)low;
            if (first + 2 < columns) own[1] = (unsigned char)high;
        }
        return;
    }
    unsigned char* own = codes + row * columns + first;
    if (columns % 4 == 0) {
        if (first < columns)
            *reinterpret_cast<unsigned*>(own) = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
    } else {
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            if (first + e < columns) own[e] = (unsigned char)code[e];
    }
}
