// Any cast of one float32 to a code of at most 8 bits: every format, every rounding, stochastic too. Integers only.
// Put before a kernel's text by its launcher. The definition is qsim's oracle; the steps are those of its CPU kernels.

// A format and a policy; flags are 0 or 1. lowest: exponent of the lowest binade, plus 127. first: place of the least
// value in units of that binade's last place (0, or 2^mantissa_bits without a zero). zero_sign: the sign bit that code 0
// keeps. overflow, nan, negative_nan: codes. nearest, even: half is added before cutting, a tie goes to the even code.
// up_*: a rest goes to the larger magnitude. clip_*: rounding is towards zero there, so a finite number ends at max_code.
struct QsimRules {
    unsigned mantissa_bits, lowest, first, max_code, sign_bit, is_signed, flushes, zero_sign, overflow, nan, negative_nan,
        refuses_overflow, refuses_nan, nearest, even, up_positive, up_negative, to_odd, clip_positive, clip_negative,
        random_bits;
};

// code, and flags 0 or 1.
struct QsimCode {
    unsigned code, saturated, flushed, refused;
};

// What a policy makes of a rounded magnitude: `code`, perhaps beyond max_code, of the number with this sign and magnitude.
__device__ __forceinline__ QsimCode qsim_finished(
    unsigned code, unsigned negative, unsigned magnitude, const QsimRules& k)
{
    const bool is_nan = magnitude > 0x7F800000u, is_inf = magnitude == 0x7F800000u;
    const bool clip = (negative ? k.clip_negative : k.clip_positive) != 0u;
    bool over = code > k.max_code || is_inf;
    const unsigned limited = over ? (clip && !is_inf ? k.max_code : k.overflow) : code;
    const unsigned number = limited | (negative ? (limited != 0u ? k.sign_bit : k.zero_sign) : 0u);
    const bool no_number = is_nan || (negative && !k.is_signed && magnitude != 0u);
    over = over && !no_number;
    QsimCode result;
    result.code = no_number ? (negative ? k.negative_nan : k.nan) : number;
    result.saturated = over && !is_inf ? 1u : 0u;
    result.flushed = code == 0u && magnitude != 0u && !no_number && k.flushes ? 1u : 0u;
    result.refused = (no_number && k.refuses_nan) || (over && k.refuses_overflow) ? 1u : 0u;
    return result;
}

// word decides where `drawn`: up iff its top random_bits are below those of the fraction.
__device__ QsimCode qsim_cast_one(unsigned bits, unsigned word, bool drawn, const QsimRules& k)
{
    const unsigned negative = bits >> 31, magnitude = bits & 0x7FFFFFFFu;

    // |value| = significand * 2^(field - 150). A subnormal is doubled to fit a field of 0, the exponent -127; no format
    // goes lower. The last bit kept weighs 2^(binade - mantissa_bits); below the lowest binade that weight stays.
    const unsigned field = magnitude >> 23, fraction = magnitude & 0x7FFFFFu;
    const unsigned significand = field > 0u ? fraction | 0x800000u : fraction << 1;
    const unsigned binade = field > k.lowest ? field : k.lowest;
    const unsigned wanted = 23u - k.mantissa_bits + (binade - field);
    const unsigned drop = wanted < 30u ? wanted : 30u;  // from 25 on nothing is kept and the rest is below half
    const unsigned full = (1u << drop) - 1u;
    unsigned rest = significand & full;
    // The hidden bit adds 1 to the field, which is why binades count from 0 here.
    unsigned place = (significand >> drop) + ((binade - k.lowest) << k.mantissa_bits);
    const bool below = place < k.first;  // below the least value of a format without zero: its code, as if exact
    rest = below ? 0u : rest;
    place = below ? 0u : place - k.first;

    unsigned carry;
    if (drawn) {
        // f * 2^32 = rest * 2^(32 - wanted), cut to an integer and then to random_bits.
        const unsigned far = wanted - 32u;
        const unsigned threshold = wanted <= 32u ? (wanted == 0u ? 0u : rest << ((32u - wanted) & 31u))
                                                 : (far < 32u ? rest >> far : 0u);
        const unsigned spare = (32u - k.random_bits) & 31u;
        carry = (word >> spare) < (threshold >> spare) ? 1u : 0u;
    } else {
        const unsigned even = 1u - (place & 1u);
        const unsigned whole = (negative ? k.up_negative : k.up_positive) | (k.to_odd & even);
        const unsigned half = ((full >> 1) + 1u) - (k.even & even);  // a tie to even: one less where the code is even
        const unsigned extra = (k.nearest ? half : 0u) | (whole ? full : 0u);
        carry = (rest + extra) >> drop;
    }
    const unsigned code = place + carry;  // it may enter the next binade: that is the rounding we want

    return qsim_finished(code, negative, magnitude, k);
}

// Ten rounds of Philox4x32; counter c0..c3, key k0, k1. Source: Salmon et al., SC 2011.
__device__ void qsim_philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned k0, unsigned k1, unsigned* words)
{
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}
