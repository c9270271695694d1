// One element of a block: scaled, encoded, counted. Put before a kernel's text by its launcher, after codec.cuh,
// scales.cuh. Knows no layout.
#pragma once

// What an encode needs beside the rules. shift, least, limit: of qsim_nearest. usual: nearest even, which it serves.
struct QsimEncoder {
    QsimRules k;
    unsigned shift, least, limit;
    bool usual, drawn, exact, two_level;
    double full_range;
};

// In the order of the kernels' counts.
struct QsimTally {
    unsigned saturated, flushed, nans, infs, zero_scales, refused;
};

__device__ __forceinline__ QsimEncoder qsim_encoder(const unsigned* rules, const QsimRecipe& r, bool drawn)
{
    QsimEncoder to;
    unsigned* fields = &to.k.mantissa_bits;
    #pragma unroll
    for (int i = 0; i < 21; ++i) fields[i] = rules[i];
    const QsimRules& k = to.k;
    to.shift = 23u - k.mantissa_bits;
    to.least = k.lowest << 23;
    to.limit = ((k.lowest - 1u) << 23) + ((k.max_code + 1u) << to.shift);  // the value after the largest
    // A code's parity is that of its units where there is a mantissa bit, and every number below has its float32 bits.
    const bool fits = k.mantissa_bits > 0u && k.first == 0u && k.lowest > 0u && (to.limit >> 23) + to.shift < 255u;
    to.usual = fits && k.nearest && k.even && !drawn;
    to.drawn = drawn;
    to.exact = r.rule == QSIM_EXACT;
    to.two_level = r.rule >= QSIM_EXACT;
    to.full_range = (double)r.full_range;
    return to;
}

// qsim_cast_one to nearest even, by one addition: see qsim_e4m3. What exceeds the largest number is cut to `limit`.
__device__ __forceinline__ QsimCode qsim_nearest(unsigned bits, const QsimEncoder& to)
{
    const unsigned magnitude = bits & QSIM_MAGNITUDE;
    const unsigned m = min(magnitude, to.limit);
    const unsigned field = max(m & QSIM_INF, to.least), anchor = field + (to.shift << 23);
    const unsigned units = __float_as_uint(__fadd_rn(__uint_as_float(m), __uint_as_float(anchor))) - anchor;
    return qsim_finished(units + ((field - to.least) >> to.shift), bits >> 31, magnitude, to.k);
}

// Bits of RN(v * m). 0 * Inf, of a zero, stays that zero; a scale of 0 makes +0 of all.
__device__ __forceinline__ unsigned qsim_product(float v, float m)
{
    const unsigned own = __float_as_uint(v), product = __float_as_uint(__fmul_rn(v, m));
    if (m == 0.0f) return 0u;
    return __float_as_uint(m) == QSIM_INF && (own & QSIM_MAGNITUDE) == 0u ? own : product;
}

// The E2M1 number nearest to the exact quotient a / divisor >= 0, ties to even, 8 where it is beyond the largest; bits.
// a = |v| * full_range has 29 bits and divisor 28: both sides of every comparison are exact in float64.
__device__ __forceinline__ unsigned qsim_nearest_quotient(double a, double divisor)
{
    unsigned steps = a > __dmul_rn(divisor, 0.25) ? 1u : 0u;
    steps += a >= __dmul_rn(divisor, 0.75) ? 1u : 0u;
    steps += a > __dmul_rn(divisor, 1.25) ? 1u : 0u;
    steps += a >= __dmul_rn(divisor, 1.75) ? 1u : 0u;
    steps += a > __dmul_rn(divisor, 2.5) ? 1u : 0u;
    steps += a >= __dmul_rn(divisor, 3.5) ? 1u : 0u;
    steps += a > __dmul_rn(divisor, 5.0) ? 1u : 0u;
    steps += a >= __dmul_rn(divisor, 7.0) ? 1u : 0u;
    // From 1 on the number with code n is 2^(n / 2 - 1) * (1 + n % 2 / 2).
    return steps > 1u ? (steps + 252u) << 22 : steps * 0x3F000000u;
}

__device__ __forceinline__ double qsim_top_24_bits(double v)
{
    return __longlong_as_double(__double_as_longlong(v) & ~((1ll << 29) - 1));
}

// a / b rounded to odd, a >= 0, b > 0, of at most 29 bits each: exact, or the neighbour with an odd last bit, so that
// one rounding is left. The quotient is cut into parts of at most 24 bits, whose products with b are exact; what is
// left of a after each has few bits, as the quotient was near a / b, and is exact too.
__device__ __forceinline__ double qsim_odd_quotient(double a, double b)
{
    const double q = __ddiv_rn(a, b), first = qsim_top_24_bits(q), after = __dsub_rn(q, first);
    const double second = qsim_top_24_bits(after), third = __dsub_rn(after, second);
    const double left = __dsub_rn(__dsub_rn(a, __dmul_rn(first, b)), __dmul_rn(second, b));
    const double rest = __dsub_rn(left, __dmul_rn(third, b));
    const long long bits = __double_as_longlong(q) - (rest < 0.0 ? 1 : 0);  // q was above a / b
    return __longlong_as_double(bits | (rest != 0.0 ? 1 : 0));
}

// The E2M1 number that stochastic rounding makes of v >= 0 by ``word``, 8 where it is beyond the largest; bits.
// Up iff the top random_bits of the word are below those of the fraction, which is held to 2^-34 or finer.
__device__ __forceinline__ unsigned qsim_drawn_quotient(double v, unsigned word, unsigned random_bits)
{
    if (v >= 8.0) return 0x41000000u;
    const unsigned long long fixed = (unsigned long long)__dmul_rn(v, 17179869184.0);  // of 2^-34, the rest cut off
    const unsigned binade = v < 2.0 ? 0u : v < 4.0 ? 1u : 2u;  // whose numbers lie 2^(binade - 1) apart
    const unsigned whole = (unsigned)(fixed >> (33u + binade)), fraction = (unsigned)(fixed >> (1u + binade));
    const unsigned spare = 32u - random_bits;
    const unsigned steps = whole + ((word >> spare) < (fraction >> spare) ? 1u : 0u);
    return __float_as_uint(__fmul_rn((float)steps, binade == 0u ? 0.5f : binade == 1u ? 1.0f : 2.0f));
}

// Bits of v * full_range / divisor: exact where they are an E2M1 number or above all, else rounded to odd.
__device__ __forceinline__ unsigned qsim_quotient(float v, double divisor, unsigned word, const QsimEncoder& to)
{
    const unsigned own = __float_as_uint(v), sign = own & 0x80000000u;
    if ((own & QSIM_MAGNITUDE) > QSIM_INF) return own;
    if (!(divisor > 0.0)) return divisor == 0.0 ? 0u : QSIM_NAN;
    const double a = __dmul_rn((double)__uint_as_float(own & QSIM_MAGNITUDE), to.full_range);
    if (to.usual) return sign | qsim_nearest_quotient(a, divisor);
    const double v_odd = qsim_odd_quotient(a, divisor);
    if (to.drawn) return sign | qsim_drawn_quotient(v_odd, word, to.k.random_bits);
    // Below 2^-100 every rounding does what it does there, and from 8 on too.
    const double held = v_odd > 8.0 ? 8.0 : v_odd > 0.0 && v_odd < 0x1p-100 ? 0x1p-100 : v_odd;
    return sign | __float_as_uint(qsim_to_odd(held));
}

// The code of the residual v in a block of this scale; it is counted. A NaN v has the sign that its code shall have.
__device__ __forceinline__ unsigned qsim_element(
    float v, float multiplier, double divisor, unsigned word, const QsimEncoder& to, QsimTally& tally)
{
    const unsigned own = __float_as_uint(v), magnitude = own & QSIM_MAGNITUDE;
    unsigned y = to.exact ? qsim_quotient(v, divisor, word, to) : qsim_product(v, multiplier);
    if ((y & QSIM_MAGNITUDE) > QSIM_INF) y = QSIM_NAN | (magnitude > QSIM_INF ? own & 0x80000000u : 0u);
    const QsimCode result = to.usual ? qsim_nearest(y, to) : qsim_cast_one(y, word, to.drawn, to.k);

    const bool nan = magnitude > QSIM_INF, inf = magnitude == QSIM_INF;
    const unsigned reached = y & QSIM_MAGNITUDE;
    // The cast saw y, not x: a product that became Inf or 0 is saturated or flushed too.
    tally.saturated += result.saturated | (reached == QSIM_INF && !inf ? 1u : 0u);
    tally.flushed += result.flushed | (reached == 0u && magnitude != 0u ? 1u : 0u);
    tally.nans += nan ? 1u : 0u;
    tally.infs += inf ? 1u : 0u;
    // Those to blame: not the numbers beside a NaN or an Inf that made the block NaN.
    const bool refused_inf = to.k.refuses_overflow || (to.two_level && to.k.refuses_nan);
    const unsigned beyond = reached > QSIM_INF ? 0u : result.refused;
    tally.refused += nan ? to.k.refuses_nan : inf ? (refused_inf ? 1u : 0u) : beyond;
    return result.code;
}

// The random words of four elements from ``element`` on; zeros without a stream.
__device__ __forceinline__ void qsim_four_words(const unsigned* stream, long long element, unsigned (&words)[4])
{
    unsigned own[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (stream) {
        const unsigned block = (unsigned)(element / 4), ahead = (unsigned)element % 4u;
        qsim_philox(block, stream[2], stream[3], stream[4], stream[0], stream[1], own);
        if (ahead != 0u) qsim_philox(block + 1u, stream[2], stream[3], stream[4], stream[0], stream[1], own + 4);
        #pragma unroll
        for (int i = 0; i < 7; ++i) own[i] = ahead & 1u ? own[i + 1] : own[i];
        #pragma unroll
        for (int i = 0; i < 6; ++i) own[i] = ahead & 2u ? own[i + 2] : own[i];
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = own[i];
}
