// NVIDIA's own scalar conversions of cuda_fp8.h, cuda_fp6.h and cuda_fp4.h as functions on arrays, for ctypes.
// Test only. Converts nothing itself: every code below is returned by a function of those headers.
// Without __CUDACC__ the headers give their portable C++ path, the one that also runs on GPUs without the instruction.
#include <cuda_fp4.h>
#include <cuda_fp6.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define QSIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// The order of KINDS and SOURCES in nvidia_headers.py.
enum Kind { kE4M3, kE5M2, kE2M3, kE3M2, kE2M1, kE8M0 };
enum Source { kFloat, kDouble, kHalf, kBfloat16 };

struct Mode {
    __nv_saturation_t saturation;
    cudaRoundMode rounding;
};

std::uint8_t fp8(float x, __nv_saturation_t s, __nv_fp8_interpretation_t i) { return __nv_cvt_float_to_fp8(x, s, i); }
std::uint8_t fp8(double x, __nv_saturation_t s, __nv_fp8_interpretation_t i) { return __nv_cvt_double_to_fp8(x, s, i); }
std::uint8_t fp8(__half_raw x, __nv_saturation_t s, __nv_fp8_interpretation_t i)
{
    return __nv_cvt_halfraw_to_fp8(x, s, i);
}
std::uint8_t fp8(__nv_bfloat16_raw x, __nv_saturation_t s, __nv_fp8_interpretation_t i)
{
    return __nv_cvt_bfloat16raw_to_fp8(x, s, i);
}

std::uint8_t fp6(float x, __nv_fp6_interpretation_t i, cudaRoundMode r) { return __nv_cvt_float_to_fp6(x, i, r); }
std::uint8_t fp6(double x, __nv_fp6_interpretation_t i, cudaRoundMode r) { return __nv_cvt_double_to_fp6(x, i, r); }
std::uint8_t fp6(__half_raw x, __nv_fp6_interpretation_t i, cudaRoundMode r)
{
    return __nv_cvt_halfraw_to_fp6(x, i, r);
}
std::uint8_t fp6(__nv_bfloat16_raw x, __nv_fp6_interpretation_t i, cudaRoundMode r)
{
    return __nv_cvt_bfloat16raw_to_fp6(x, i, r);
}

std::uint8_t fp4(float x, cudaRoundMode r) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, r); }
std::uint8_t fp4(double x, cudaRoundMode r) { return __nv_cvt_double_to_fp4(x, __NV_E2M1, r); }
std::uint8_t fp4(__half_raw x, cudaRoundMode r) { return __nv_cvt_halfraw_to_fp4(x, __NV_E2M1, r); }
std::uint8_t fp4(__nv_bfloat16_raw x, cudaRoundMode r) { return __nv_cvt_bfloat16raw_to_fp4(x, __NV_E2M1, r); }

std::uint8_t e8m0(float x, Mode m) { return __nv_cvt_float_to_e8m0(x, m.saturation, m.rounding); }
std::uint8_t e8m0(double x, Mode m) { return __nv_cvt_double_to_e8m0(x, m.saturation, m.rounding); }
std::uint8_t e8m0(__nv_bfloat16_raw x, Mode m) { return __nv_cvt_bfloat16raw_to_e8m0(x, m.saturation, m.rounding); }

// What the headers can do; anything else would run into one of their asserts or be rounded another way unseen.
bool available(Kind kind, Source source, cudaRoundMode rounding)
{
    switch (kind) {
    case kE4M3:
    case kE5M2: return rounding == cudaRoundNearest;
    case kE2M3:
    case kE3M2:
    case kE2M1: return rounding == cudaRoundNearest || rounding == cudaRoundZero;
    case kE8M0: return source != kHalf && (rounding == cudaRoundZero || rounding == cudaRoundPosInf);
    }
    return false;
}

// flatten: with the format known in the loop, all 2^32 float32 take a quarter to a half of the time.
template <typename T, typename Convert>
__attribute__((flatten)) void each(const void* input, std::uint8_t* codes, std::size_t count, Convert convert)
{
    const T* x = static_cast<const T*>(input);
    for (std::size_t i = 0; i < count; ++i) codes[i] = convert(x[i]);
}

template <typename T>
void encode_elements(Kind kind, Mode m, const void* x, std::uint8_t* codes, std::size_t count)
{
    switch (kind) {
    case kE4M3: return each<T>(x, codes, count, [m](T v) { return fp8(v, m.saturation, __NV_E4M3); });
    case kE5M2: return each<T>(x, codes, count, [m](T v) { return fp8(v, m.saturation, __NV_E5M2); });
    case kE2M3: return each<T>(x, codes, count, [m](T v) { return fp6(v, __NV_E2M3, m.rounding); });
    case kE3M2: return each<T>(x, codes, count, [m](T v) { return fp6(v, __NV_E3M2, m.rounding); });
    case kE2M1: return each<T>(x, codes, count, [m](T v) { return fp4(v, m.rounding); });
    case kE8M0: return;
    }
}

template <typename T>
void encode_any(Kind kind, Mode m, const void* x, std::uint8_t* codes, std::size_t count)
{
    if (kind == kE8M0)
        each<T>(x, codes, count, [m](T v) { return e8m0(v, m); });
    else
        encode_elements<T>(kind, m, x, codes, count);
}

template <typename Pack>
void store(const Pack& value, std::uint8_t* bytes)
{
    std::memcpy(bytes, &value.__x, sizeof value.__x);
}

}  // namespace

// Codes, one a byte, of ``count`` numbers; 0, or -1 where the headers have no such conversion (nothing is written).
QSIM_EXPORT int qsim_nv_encode(int kind, int source, int saturate, int rounding, const void* x, std::uint8_t* codes,
                               std::size_t count)
{
    const Kind k = static_cast<Kind>(kind);
    const Mode m{saturate ? __NV_SATFINITE : __NV_NOSAT, static_cast<cudaRoundMode>(rounding)};
    if (!available(k, static_cast<Source>(source), m.rounding)) return -1;
    switch (static_cast<Source>(source)) {
    case kFloat: encode_any<float>(k, m, x, codes, count); return 0;
    case kDouble: encode_any<double>(k, m, x, codes, count); return 0;
    case kHalf: encode_elements<__half_raw>(k, m, x, codes, count); return 0;
    case kBfloat16: encode_any<__nv_bfloat16_raw>(k, m, x, codes, count); return 0;
    }
    return -1;
}

// Bits of the float16 values of ``count`` codes, one a byte; of the bfloat16 values for E8M0.
QSIM_EXPORT int qsim_nv_decode(int kind, const std::uint8_t* codes, std::uint16_t* bits, std::size_t count)
{
    for (std::size_t i = 0; i < count; ++i) {
        switch (static_cast<Kind>(kind)) {
        case kE4M3: bits[i] = __nv_cvt_fp8_to_halfraw(codes[i], __NV_E4M3).x; break;
        case kE5M2: bits[i] = __nv_cvt_fp8_to_halfraw(codes[i], __NV_E5M2).x; break;
        case kE2M3: bits[i] = __nv_cvt_fp6_to_halfraw(codes[i], __NV_E2M3).x; break;
        case kE3M2: bits[i] = __nv_cvt_fp6_to_halfraw(codes[i], __NV_E3M2).x; break;
        case kE2M1: bits[i] = __nv_cvt_fp4_to_halfraw(codes[i], __NV_E2M1).x; break;
        case kE8M0: bits[i] = __nv_cvt_e8m0_to_bf16raw(codes[i]).x; break;
        default: return -1;
        }
    }
    return 0;
}

// Bytes of ``count`` two-element types, saturating, as they lie in memory: one byte each for E2M1, else two.
QSIM_EXPORT int qsim_nv_encode_x2(int kind, const float* x, std::uint8_t* bytes, std::size_t count)
{
    for (std::size_t i = 0; i < count; ++i) {
        const float2 v = {x[2 * i], x[2 * i + 1]};
        switch (static_cast<Kind>(kind)) {
        case kE4M3: store(__nv_fp8x2_e4m3(v), bytes + 2 * i); break;
        case kE5M2: store(__nv_fp8x2_e5m2(v), bytes + 2 * i); break;
        case kE2M3: store(__nv_fp6x2_e2m3(v), bytes + 2 * i); break;
        case kE3M2: store(__nv_fp6x2_e3m2(v), bytes + 2 * i); break;
        case kE2M1: store(__nv_fp4x2_e2m1(v), bytes + i); break;
        default: return -1;
        }
    }
    return 0;
}

// Bytes of ``count`` four-element types, saturating, as they lie in memory: two bytes each for E2M1, else four.
QSIM_EXPORT int qsim_nv_encode_x4(int kind, const float* x, std::uint8_t* bytes, std::size_t count)
{
    for (std::size_t i = 0; i < count; ++i) {
        const float4 v = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
        switch (static_cast<Kind>(kind)) {
        case kE4M3: store(__nv_fp8x4_e4m3(v), bytes + 4 * i); break;
        case kE5M2: store(__nv_fp8x4_e5m2(v), bytes + 4 * i); break;
        case kE2M3: store(__nv_fp6x4_e2m3(v), bytes + 4 * i); break;
        case kE3M2: store(__nv_fp6x4_e3m2(v), bytes + 4 * i); break;
        case kE2M1: store(__nv_fp4x4_e2m1(v), bytes + 2 * i); break;
        default: return -1;
        }
    }
    return 0;
}

// float16 bits of both elements of ``count`` packed E2M1 bytes.
QSIM_EXPORT void qsim_nv_decode_fp4x2(const std::uint8_t* bytes, std::uint16_t* bits, std::size_t count)
{
    for (std::size_t i = 0; i < count; ++i) {
        const __half2_raw both = __nv_cvt_fp4x2_to_halfraw2(bytes[i], __NV_E2M1);
        bits[2 * i] = both.x;
        bits[2 * i + 1] = both.y;
    }
}
