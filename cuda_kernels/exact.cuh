// Words of exact.cu: elements of an operand, a rounding that proves itself, an accumulator that loses nothing.
#pragma once

// One operand of a product. An element is a float32, or table[code] * the scale of its block: a float64 without error.
struct QsimSide {
    const void* data;              // float32; uint8 codes where there is a table
    const float* table;            // [256] values of the codes, or null
    const float* block;            // [row blocks, columns] scales, or null
    const double* factor;          // [rows], or null: 1
    long long lead, down, along;   // strides of data in elements: replicas, rows, k
    long long band;                // rows of a block
    int width, columns;            // k of a block, blocks along k
};

struct QsimRow {
    long long at;         // element of its first k
    const float* scales;  // of its blocks, or null
    double factor;
};

__device__ __forceinline__ QsimRow qsim_row(const QsimSide& x, long long replica, long long row)
{
    return {replica * x.lead + row * x.down, x.block ? x.block + row / x.band * x.columns : nullptr,
            x.factor ? x.factor[row] : 1.0};
}

// Element k of a row; ``table`` is a copy of x.table.
__device__ __forceinline__ double qsim_element(const QsimSide& x, const float* table, const QsimRow& row, int k)
{
    const long long at = row.at + k * x.along;
    if (!x.table) return static_cast<const float*>(x.data)[at];
    const double value = table[static_cast<const unsigned char*>(x.data)[at]];
    return row.scales ? __dmul_rn(value, row.scales[(unsigned)k / (unsigned)x.width]) : value;
}

// ---- float64 --------------------------------------------------------------------------------------------------------

#define QSIM_INFINITY __longlong_as_double(0x7FF0000000000000LL)

__device__ __forceinline__ bool qsim_finite(double x) { return fabs(x) < QSIM_INFINITY; }

// 2^exponent of a normal number.
__device__ __forceinline__ double qsim_power(int exponent)
{
    return __longlong_as_double((long long)(exponent + 1023) << 52);
}

// The exponent of the lowest bit of a normal x.
__device__ __forceinline__ int qsim_lowest_bit(double x)
{
    const long long word = __double_as_longlong(x), fraction = word & 0xFFFFFFFFFFFFFLL;
    return (int)(word >> 52 & 0x7FF) - 1075 + (fraction ? __ffsll(fraction) - 1 : 52);
}

// RN32, with one NaN for all.
__device__ __forceinline__ float qsim_float(double x)
{
    return x != x ? __uint_as_float(0x7FC00000u) : __double2float_rn(x);
}

// ---- a rounding that proves itself ----------------------------------------------------------------------------------

struct QsimFactors {
    double row, column, divisor;
    bool any;  // false: all three are 1
};

// Whether sum * row * column / divisor rounds to ``out`` for every sum within ``bound`` of s; bound 0: s is the sum.
__device__ __forceinline__ bool qsim_decided(double s, double bound, const QsimFactors& by, float& out)
{
    if (!qsim_finite(s) || !qsim_finite(by.row) || !qsim_finite(by.column)) {
        // No finite sum overflows: such an s is what IEEE makes of the products, in any order. An exact 0 is +0.
        out = s == 0.0 ? 0.0f : qsim_float(__dmul_rn(__dmul_rn(s, by.row), by.column));
        return !qsim_finite(s) || bound == 0.0 || fabs(s) > bound;
    }
    double t = s, d = bound;
    if (by.any && (s != 0.0 || bound != 0.0)) {
        const double first = __dmul_rn(s, by.row), product = __dmul_rn(first, by.column);
        bool exact = bound == 0.0 && __fma_rn(s, by.row, -first) == 0.0 && __fma_rn(first, by.column, -product) == 0.0;
        t = product;
        d = __dmul_rn(__dmul_rn(bound, fabs(by.row)), fabs(by.column));
        if (by.divisor != 1.0) {
            t = __ddiv_rn(product, by.divisor);
            d = __ddiv_rn(d, by.divisor);
            exact = exact && __fma_rn(-t, by.divisor, product) == 0.0;
        }
        // Far from where float64 ends, three roundings move t by less than 2^-51 of it, and two move the ends.
        if (!(fabs(first) > 0x1p-500 && fabs(product) > 0x1p-500 && fabs(product) < 0x1p900)) return false;
        if (!exact) d = __dmul_rn(__dadd_rn(d, __dmul_rn(fabs(t), 0x1p-50)), 0x1.00001p0);
    }
    out = qsim_float(t);
    // Rounding is monotone: equal ends of one sign prove all between them.
    const bool same = __double2float_rn(__dadd_rn(t, -d)) == __double2float_rn(__dadd_rn(t, d));
    return same && (fabs(t) > d || d == 0.0);
}

// ---- an accumulator that loses nothing ------------------------------------------------------------------------------
// Digits of 32 bits in int64, the least first, in units of 2^-QSIM_UNIT. An element is a product of two float32 numbers
// at most, so a product of two elements, and what float64 rounds off it, is 0 or a normal float64 in [2^-596, 2^512), a
// multiple of 2^-596: its last bit has a position of 120 to 1227, digits 3 to 38, and the whole reaches two digits
// further. 2^29 of them need one more, and one holds the sign: 42. Two factors of 53 bits take 4 more.
//
// A quotient needs no remainder. The magnitude N is a multiple of 2^172, so N / divisor lies above 2^119, the last bit
// that float32 keeps lies at 96 or higher, and a tie T of float32 is a multiple of 2^95. So is N - T * divisor:
// unless it is 0 the quotient is off the tie by at least 2^95 / 2^53, and its digits say so.

#define QSIM_UNIT 768
#define QSIM_DIGITS 46
#define QSIM_LOW 0xFFFFFFFFLL

// Adds x; the first of the three digits that it changes.
__device__ __forceinline__ int qsim_add(long long* digits, double x)
{
    const long long word = __double_as_longlong(x);
    const int position = (int)(word >> 52 & 0x7FF) - 1075 + QSIM_UNIT, at = position >> 5, shift = position & 31;
    const long long significand = (word & 0xFFFFFFFFFFFFFLL) | 0x10000000000000LL;
    const long long low = (significand & QSIM_LOW) << shift, high = (significand >> 32) << shift;
    const long long middle = (low >> 32) + (high & QSIM_LOW), sign = word < 0 ? -1 : 1;
    digits[at] += sign * (low & QSIM_LOW);
    digits[at + 1] += sign * middle;
    digits[at + 2] += sign * (high >> 32);
    return at;
}

// Every digit but the last into 0 .. 2^32 - 1; the last keeps the sign of the whole.
__device__ __forceinline__ void qsim_carry(long long* digits)
{
    for (int i = 0; i < QSIM_DIGITS - 1; ++i) {
        digits[i + 1] += digits[i] >> 32;  // arithmetic: floor
        digits[i] &= QSIM_LOW;
    }
}

// Makes the accumulator its magnitude; whether it was negative.
__device__ __forceinline__ bool qsim_magnitude(long long* digits)
{
    qsim_carry(digits);
    if (digits[QSIM_DIGITS - 1] >= 0) return false;
    for (int i = 0; i < QSIM_DIGITS; ++i) digits[i] = -digits[i];
    qsim_carry(digits);
    return true;
}

// Multiplies the magnitude by the significand of x, which is finite; the exponent of that significand's last bit.
__device__ __forceinline__ int qsim_multiply(long long* digits, double x)
{
    const long long word = __double_as_longlong(x), field = word >> 52 & 0x7FF;
    const unsigned long long significand = (word & 0xFFFFFFFFFFFFFLL) | (field ? 0x10000000000000LL : 0);
    const unsigned long long low = significand & QSIM_LOW, high = significand >> 32;
    unsigned long long before = 0, carry = 0;
    for (int i = 0; i < QSIM_DIGITS; ++i) {
        const unsigned long long own = digits[i], one = own * low, two = before * high;
        const unsigned long long sum = (one & QSIM_LOW) + (two & QSIM_LOW) + (carry & QSIM_LOW);
        carry = (one >> 32) + (two >> 32) + (carry >> 32) + (sum >> 32);
        digits[i] = (long long)(sum & QSIM_LOW);
        before = own;
    }
    return field ? (int)field - 1075 : -1074;
}

// Divides the magnitude by an integer below 2^53, down.
__device__ __forceinline__ void qsim_divide(long long* digits, unsigned long long divisor)
{
    unsigned long long rest = 0;
    for (int i = QSIM_DIGITS - 1; i >= 0; --i) {
        unsigned long long quotient = 0;
        for (int byte = 24; byte >= 0; byte -= 8) {
            rest = rest << 8 | ((unsigned long long)digits[i] >> byte & 0xFFu);
            quotient = quotient << 8 | rest / divisor;
            rest %= divisor;
        }
        digits[i] = (long long)quotient;
    }
}

// The magnitude times 2^exponent rounded to float32 once: its bits, without sign.
__device__ __forceinline__ unsigned qsim_round(const long long* digits, int exponent)
{
    int top = QSIM_DIGITS - 1;
    while (top >= 0 && digits[top] == 0) --top;
    if (top < 0) return 0;
    const int leading = 32 * top + 31 - __clz((int)digits[top]);  // position of the leading bit
    const int tiny = QSIM_UNIT - exponent - 149;                  // and of the last one of a subnormal float32
    if (leading - tiny >= 128 + 149) return 0x7F800000u;
    const int last = max(leading - 23, tiny);  // position of the last bit that float32 keeps
    if (last > leading + 1) return 0;          // below half of the smallest subnormal
    // At most 24 bits are kept, of two digits.
    int at = last >> 5;
    unsigned long long two = at < QSIM_DIGITS ? digits[at] : 0;
    if (at + 1 < QSIM_DIGITS) two |= (unsigned long long)digits[at + 1] << 32;
    unsigned kept = (unsigned)(two >> (last & 31));
    at = (last - 1) >> 5;
    const unsigned below = (unsigned)digits[at] << (31 - ((last - 1) & 31));  // the half bit on top, then its digit
    bool more = (below & 0x7FFFFFFFu) != 0;
    for (int i = 0; i < at; ++i) more = more || digits[i] != 0;
    if ((below & 0x80000000u) && (more || (kept & 1u))) ++kept;  // may carry into the exponent: that is the rounding
    // kept is below 2^23 only where last is tiny: the field stays 0. Else the hidden bit adds 1 to it.
    return min(((unsigned)(last - tiny) << 23) + kept, 0x7F800000u);
}

// The accumulators of a warp's lanes, which changed the digits from ``first`` to ``last`` at most, as one in each lane.
__device__ __forceinline__ void qsim_join(long long* digits, int first, int last, double& special)
{
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        first = min(first, __shfl_xor_sync(0xFFFFFFFFu, first, by));
        last = max(last, __shfl_xor_sync(0xFFFFFFFFu, last, by));
        special = __dadd_rn(special, __shfl_xor_sync(0xFFFFFFFFu, special, by));
    }
    for (int i = first; i <= last; ++i) {
        long long sum = digits[i];
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, by);
        digits[i] = sum;
    }
}

// RN32(sum of products over k from start to stop * row * column / divisor), by all lanes of a warp, for each of them.
__device__ __forceinline__ float qsim_settled(
    const QsimSide& a, const QsimSide& b, const QsimRow& row, const QsimRow& column, int start, int stop,
    const QsimFactors& by)
{
    long long digits[QSIM_DIGITS];
    for (int i = 0; i < QSIM_DIGITS; ++i) digits[i] = 0;
    double special = 0.0;  // the sum of products that are not finite
    int first = QSIM_DIGITS, last = 0;
    for (int k = start + threadIdx.x % 32; k < stop; k += 32) {
        const double x = qsim_element(a, a.table, row, k), y = qsim_element(b, b.table, column, k);
        const double product = __dmul_rn(x, y);
        if (!qsim_finite(product)) {
            special = __dadd_rn(special, product);
        } else if (product != 0.0) {
            const double rest = __fma_rn(x, y, -product);
            const int at = qsim_add(digits, product);
            first = min(first, rest != 0.0 ? qsim_add(digits, rest) : at);  // the rest lies below
            last = max(last, at + 2);
        }
    }
    qsim_join(digits, first, last, special);
    if (special != 0.0) return qsim_float(__dmul_rn(__dmul_rn(special, by.row), by.column));
    bool negative = qsim_magnitude(digits), zero = true;
    for (int i = 0; i < QSIM_DIGITS; ++i) zero = zero && digits[i] == 0;
    if (zero) return 0.0f;
    int exponent = 0;
    if (by.any) {
        if (!qsim_finite(by.row) || !qsim_finite(by.column))
            return qsim_float(__dmul_rn(__dmul_rn(negative ? -1.0 : 1.0, by.row), by.column));
        if (by.row == 0.0 || by.column == 0.0) return 0.0f;
        negative = negative != ((by.row < 0.0) != (by.column < 0.0));
        exponent = qsim_multiply(digits, by.row);
        exponent += qsim_multiply(digits, by.column);
        if (by.divisor != 1.0) qsim_divide(digits, (unsigned long long)by.divisor);
    }
    return __uint_as_float(qsim_round(digits, exponent) | (negative ? 0x80000000u : 0u));
}
