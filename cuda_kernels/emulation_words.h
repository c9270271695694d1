// The words of CUDA that a thread says: barriers, warp operations, atomics, arithmetic. Included by emulation.h.
#pragma once

// ---- barriers and warp operations ------------------------------------------------------------------------------------

#define __syncthreads() ::qsim_emulation::wait_at_barrier(__LINE__)
#define __syncthreads_or(flag) (::qsim_emulation::count_at_barrier(__LINE__, flag) != 0)
#define __syncwarp(...) ::qsim_emulation::sync_warp(__LINE__, ##__VA_ARGS__)
#define __shfl_sync(mask, value, source) ::qsim_emulation::shuffle(mask, __LINE__, value, source)
#define __shfl_xor_sync(mask, value, other) \
    ::qsim_emulation::shuffle(mask, __LINE__, value, ::qsim_emulation::lane() ^ (other))
#define __shfl_down_sync(mask, value, by) ::qsim_emulation::shuffle_down(mask, __LINE__, value, by)
#define __ballot_sync(mask, flag) ::qsim_emulation::ballot(mask, __LINE__, flag)
#define __any_sync(mask, flag) (::qsim_emulation::ballot(mask, __LINE__, flag) != 0u)
#define __all_sync(mask, flag) (::qsim_emulation::ballot(mask, __LINE__, !(flag)) == 0u)

namespace qsim_emulation {

// How many threads of the block bring ``flag``.
inline int count_at_barrier(int line, bool flag)
{
    block->counted += flag ? 1 : 0;
    wait_at_barrier(line);
    return block->agreed;
}

inline void sync_warp(int line, unsigned mask = 0xFFFFFFFFu)
{
    meet<int, int>(mask, line, 0, [](unsigned, unsigned char (*)[BLOB], unsigned char (*)[BLOB]) {});
}

template <typename T>
struct Shuffled {
    T value;
    unsigned source;
};

template <typename T>
T shuffle(unsigned mask, int line, T value, unsigned source)
{
    return meet<Shuffled<T>, T>(
        mask, line, {value, source % WARP}, [](unsigned, unsigned char (*in)[BLOB], unsigned char (*out)[BLOB]) {
            for (unsigned i = 0; i < WARP; ++i) {
                Shuffled<T> mine, theirs;
                std::memcpy(&mine, in[i], sizeof mine);
                std::memcpy(&theirs, in[mine.source % WARP], sizeof theirs);
                std::memcpy(out[i], &theirs.value, sizeof(T));
            }
        });
}

template <typename T>
T shuffle_down(unsigned mask, int line, T value, unsigned by)
{
    const unsigned source = lane() + by;
    return shuffle(mask, line, value, source < WARP ? source : lane());
}

inline unsigned ballot(unsigned mask, int line, bool flag)
{
    return meet<int, unsigned>(
        mask, line, flag, [](unsigned wanted, unsigned char (*in)[BLOB], unsigned char (*out)[BLOB]) {
            unsigned votes = 0;
            for (unsigned i = 0; i < WARP; ++i) {
                int vote;
                std::memcpy(&vote, in[i], sizeof vote);
                votes |= (wanted >> i & 1u && vote != 0) ? 1u << i : 0u;
            }
            for (unsigned i = 0; i < WARP; ++i) std::memcpy(out[i], &votes, sizeof votes);
        });
}

}  // namespace qsim_emulation

// ---- atomics: fibres switch nowhere in them --------------------------------------------------------------------------

template <typename T>
T atomicAdd(T* at, T value)
{
    const T before = *at;
    *at = static_cast<T>(before + value);
    return before;
}

template <typename T>
T atomicMax(T* at, T value)
{
    const T before = *at;
    *at = before < value ? value : before;
    return before;
}

template <typename T>
T atomicOr(T* at, T value)
{
    const T before = *at;
    *at = before | value;
    return before;
}

// ---- vectors: to copy one is one access, at an address that its size divides ------------------------------------------

namespace qsim_emulation {

inline void check_address(const void* at, std::size_t bytes)
{
    if (block == nullptr || reinterpret_cast<std::uintptr_t>(at) % bytes == 0) return;
    std::fprintf(stderr, "qsim emulation: thread %u of block (%u, %u, %u) moves %zu bytes at once at %p\n",
                 block->current, block_index.x, block_index.y, block_index.z, bytes, at);
    block->failed = true;
}

template <typename T>
struct Two {
    using Item = T;
    T x, y;
};

template <typename T>
struct Four {
    using Item = T;
    T x, y, z, w;
};

template <typename Fields>
struct alignas(sizeof(Fields)) Vector : Fields {
    Vector() = default;
    template <typename... Each, std::enable_if_t<sizeof...(Each) * sizeof(typename Fields::Item) == sizeof(Fields), int> = 0>
    Vector(Each... each) : Fields{static_cast<typename Fields::Item>(each)...} {}
    Vector(const Vector& other) { move(this, &other); }
    Vector& operator=(const Vector& other)
    {
        move(this, &other);
        return *this;
    }

  private:
    static void move(void* to, const void* from)
    {
        asm("" : "+r"(to), "+r"(from));  // the compiler shall believe nothing of the addresses
        check_address(to, sizeof(Fields));
        check_address(from, sizeof(Fields));
        std::memcpy(to, from, sizeof(Fields));
    }
};

}  // namespace qsim_emulation

using float4 = qsim_emulation::Vector<qsim_emulation::Four<float>>;
using uint4 = qsim_emulation::Vector<qsim_emulation::Four<unsigned>>;
using uint2 = qsim_emulation::Vector<qsim_emulation::Two<unsigned>>;
using uchar4 = qsim_emulation::Vector<qsim_emulation::Four<unsigned char>>;

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z, unsigned char w) { return {x, y, z, w}; }

// ---- arithmetic ------------------------------------------------------------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }

namespace qsim_emulation {
template <typename To, typename From>
To bits_as(From value)
{
    static_assert(sizeof(To) == sizeof(From), "the same number of bits");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}
}  // namespace qsim_emulation

inline unsigned __float_as_uint(float x) { return qsim_emulation::bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return qsim_emulation::bits_as<float>(x); }
inline int __float_as_int(float x) { return qsim_emulation::bits_as<int>(x); }
inline float __int_as_float(int x) { return qsim_emulation::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return qsim_emulation::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return qsim_emulation::bits_as<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
// PRMT: a nibble of ``selector`` names a byte of b:a; its high bit spreads that byte's sign instead.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
    const std::uint64_t both = std::uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = selector >> (4 * i) & 0xFu;
        const unsigned byte = static_cast<unsigned>(both >> (8 * (nibble & 7u))) & 0xFFu;
        result |= (nibble & 8u ? (byte & 0x80u ? 0xFFu : 0u) : byte) << (8 * i);
    }
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t(a) * b) >> 32); }
template <typename T>
inline T __ldg(const T* at) { return *at; }
template <typename T>
inline T min(T a, T b) { return b < a ? b : a; }
template <typename T>
inline T max(T a, T b) { return a < b ? b : a; }
