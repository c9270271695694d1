// Elements of a replica in groups that move by one access of 16 bytes of float32 (or 4 of codes) where they lie whole and
// aligned in memory, else one by one: any length, any address. Put before a kernel's text by its launcher.
#pragma once

__device__ __forceinline__ bool qsim_aligned(const void* at, int bytes)
{
    return reinterpret_cast<size_t>(at) % bytes == 0;
}

// How many elements of ``bytes`` each lie between the last address that 16 divides and ``at``. With that many places left
// free before the first element, groups of 16 bytes are aligned in the row that begins at ``at``.
__device__ __forceinline__ int qsim_offset(const void* at, int bytes)
{
    return (int)(reinterpret_cast<size_t>(at) % 16) / bytes;
}

// Elements j .. j + 3 of row [size]; 0 where there is none.
__device__ __forceinline__ void qsim_load4(const float* row, long long j, long long size, float (&values)[4])
{
    if (j >= 0 && j + 4 <= size && qsim_aligned(row + j, 16)) {
        const float4 four = *reinterpret_cast<const float4*>(row + j);
        values[0] = four.x;
        values[1] = four.y;
        values[2] = four.z;
        values[3] = four.w;
        return;
    }
    #pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = j + e >= 0 && j + e < size ? row[j + e] : 0.0f;
}

// row[j .. j + 3] = values, as far as they lie in row [size].
__device__ __forceinline__ void qsim_store4(float* row, long long j, long long size, const float (&values)[4])
{
    if (j >= 0 && j + 4 <= size && qsim_aligned(row + j, 16)) {
        *reinterpret_cast<float4*>(row + j) = make_float4(values[0], values[1], values[2], values[3]);
        return;
    }
    #pragma unroll
    for (int e = 0; e < 4; ++e)
        if (j + e >= 0 && j + e < size) row[j + e] = values[e];
}

__device__ __forceinline__ void qsim_store4(
    unsigned char* row, long long j, long long size, const unsigned char (&codes)[4])
{
    if (j >= 0 && j + 4 <= size && qsim_aligned(row + j, 4)) {
        *reinterpret_cast<uchar4*>(row + j) = make_uchar4(codes[0], codes[1], codes[2], codes[3]);
        return;
    }
    #pragma unroll
    for (int e = 0; e < 4; ++e)
        if (j + e >= 0 && j + e < size) row[j + e] = codes[e];
}

// Codes j .. j + 15 of row [size], four a word, the first in the low byte; 0 where there is none.
__device__ __forceinline__ void qsim_load16(
    const unsigned char* row, long long j, long long size, unsigned (&words)[4])
{
    if (j >= 0 && j + 16 <= size && qsim_aligned(row + j, 16)) {
        const uint4 four = *reinterpret_cast<const uint4*>(row + j);
        words[0] = four.x;
        words[1] = four.y;
        words[2] = four.z;
        words[3] = four.w;
        return;
    }
    words[0] = words[1] = words[2] = words[3] = 0;
    #pragma unroll
    for (int e = 0; e < 16; ++e)
        if (j + e >= 0 && j + e < size) words[e / 4] |= (unsigned)row[j + e] << (8 * (e % 4));
}

// The centres of a replica, element after element: row [period] again and again, or nothing. One division a group.
struct QsimCenters {
    const float* row;
    long long period, at;

    __device__ __forceinline__ void begin(long long j)
    {
        if (row) at = (j > 0 ? j : 0) % period;
    }

    // That of element j, which is the one after the last asked for; 0 outside [0, size).
    __device__ __forceinline__ float of(long long j, long long size)
    {
        if (!row || j < 0 || j >= size) return 0.0f;
        const float c = row[at];
        at = at + 1 == period ? 0 : at + 1;
        return c;
    }
};
