// What becomes of the partial of a chain where the chain ends: it joins the sum so far in float32.
//
//   without scales   sum = RN(sum + partial)
//   with scales      sum = RN(partial RN(s_a s_b) + sum), one rounding
// A sum begins with +0: a partial is never -0, so the first one is kept as it is. qsim/gemm/products.py is the
// definition.
#pragma once

// float32 scales of an operand, [row blocks, blocks of K], each block ``rows`` x ``depth``; null: none, which is 1.
struct QsimScale {
    const float* values;
    int rows, depth, blocks;
};

// Where the scales of ``row`` begin; rows past the last of ``count`` take its own.
__device__ __forceinline__ int qsim_scale_row(const QsimScale& scale, int row, int count)
{
    return scale.values == nullptr ? 0 : min(row, count - 1) / scale.rows * scale.blocks;
}

__device__ __forceinline__ float qsim_scale_at(const QsimScale& scale, int row, int block)
{
    return scale.values == nullptr ? 1.0f : __ldg(scale.values + row + block);
}

__device__ __forceinline__ float qsim_promoted(float sum, float partial, bool scaled, float a, float b)
{
    return scaled ? __fmaf_rn(partial, __fmul_rn(a, b), sum) : __fadd_rn(sum, partial);
}

// Stores the sum of a part of K; ``more``: it joins what earlier parts left there. One NaN for all.
__device__ __forceinline__ void qsim_store_part(float* out, float sum, bool more)
{
    const float total = more ? __fadd_rn(*out, sum) : sum;
    *out = total == total ? total : __uint_as_float(0x7FFFFFFFu);
}
