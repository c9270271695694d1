// qsim_cast: codes of RN(RN(x - c) * s) in any format and rounding, amax of the residual and counts from the same pass.
//
// Contract
//   Each float32 operation is correctly rounded, subnormals kept (--fmad=false -ftz=false). The sign of a NaN y is that
//   of x where x is NaN, else positive.
//   x, codes [replicas, per_replica], contiguous; scale [replicas] or null: 1; center: element
//   r * center_stride + j % center_period, or null: c = +0. streams [replicas, 5]: Philox key (2) and the upper counter
//   words (3), or null where the rounding draws nothing; element j takes word j % 4 of block j / 4.
//   rules [21]: QsimRules. top [replicas] is raised to the bits of the largest finite |RN(x - c)|; counts [replicas, 5]
//   grow by saturated, flushed, NaN, Inf of x, refused. Both are 0 beforehand.
//   x at an address that 4 divides; a group of four elements at one that 16 divides is read at once.
//   Grid: x strides over groups of four elements, y over replicas; one-dimensional blocks. No shared memory.

extern "C" __global__ void qsim_cast(
    const float* x, const float* scale, const float* center, const unsigned* streams, const unsigned* rules,
    unsigned char* codes, unsigned* top, unsigned long long* counts, long long replicas, long long per_replica,
    long long center_period, long long center_stride)
{
    QsimRules k;
    unsigned* fields = &k.mantissa_bits;
    for (int i = 0; i < 21; ++i) fields[i] = rules[i];
    const long long groups = (per_replica + 3) / 4, stride = (long long)gridDim.x * blockDim.x;

    for (long long r = blockIdx.y; r < replicas; r += gridDim.y) {
        const float* row = x + r * per_replica;
        const float s = scale ? scale[r] : 1.0f;
        QsimCenters centers = {center ? center + r * center_stride : nullptr, center_period, 0};
        unsigned best = 0, tally[5] = {0, 0, 0, 0, 0};
        for (long long group = (long long)blockIdx.x * blockDim.x + threadIdx.x; group < groups; group += stride) {
            unsigned words[4] = {0, 0, 0, 0};
            if (streams) {
                const unsigned* own = streams + 5 * r;
                qsim_philox((unsigned)group, own[2], own[3], own[4], own[0], own[1], words);
            }
            const long long first = 4 * group;
            float values[4];
            unsigned char four[4] = {};
            qsim_load4(row, first, per_replica, values);
            centers.begin(first);
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (first + e >= per_replica) break;
                const float value = values[e], c = centers.of(first + e, per_replica);
                const float residual = __fsub_rn(value, c), y = __fmul_rn(residual, s);
                const unsigned own = __float_as_uint(value), own_magnitude = own & 0x7FFFFFFFu;
                unsigned bits = __float_as_uint(y);
                if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
                    bits = 0x7FC00000u | (own_magnitude > 0x7F800000u ? own & 0x80000000u : 0u);
                const QsimCode result = qsim_cast_one(bits, words[e], streams != nullptr, k);
                four[e] = (unsigned char)result.code;

                const unsigned left = __float_as_uint(residual) & 0x7FFFFFFFu, magnitude = bits & 0x7FFFFFFFu;
                best = left < 0x7F800000u && left > best ? left : best;
                // The cast saw y, not x: a product that became Inf or 0 is saturated or flushed too.
                tally[0] += result.saturated | (magnitude == 0x7F800000u && own_magnitude < 0x7F800000u ? 1u : 0u);
                tally[1] += result.flushed | (magnitude == 0u && left != 0u ? 1u : 0u);
                tally[2] += own_magnitude > 0x7F800000u ? 1u : 0u;
                tally[3] += own_magnitude == 0x7F800000u ? 1u : 0u;
                tally[4] += result.refused;
            }
            qsim_store4(codes + r * per_replica, first, per_replica, four);
        }
        if (best) atomicMax(top + r, best);
        for (int i = 0; i < 5; ++i)
            if (tally[i]) atomicAdd(counts + 5 * r + i, (unsigned long long)tally[i]);
    }
}
