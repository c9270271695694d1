// Packed E2M1 codes on their way from global memory to int8. Put before a kernel's text by its launcher.
#pragma once

// Four codes, the first in the low nibble, to twice their values, the first in the low byte.
__device__ __forceinline__ unsigned qsim_twice(unsigned codes)
{
    const unsigned at = codes & 0x7777u;
    const unsigned positive = __byte_perm(0x03020100u, 0x0C080604u, at);
    const unsigned negative = __byte_perm(0xFDFEFF00u, 0xF4F8FAFCu, at);
    return __byte_perm(positive, negative, 0x3210u | (codes & 0x8888u) >> 1);
}

// Sixteen packed bytes of one row from byte ``first`` on; zero past the end.
__device__ __forceinline__ void qsim_fetch(
    const unsigned char* codes, long long row, long long rows, long long bytes, long long first, bool odd,
    unsigned (&words)[4])
{
    words[0] = words[1] = words[2] = words[3] = 0;
    if (row >= rows) return;
    const unsigned char* own = codes + row * bytes;
    if (bytes % 16 == 0 && first + 16 <= bytes) {
        const uint4 four = *reinterpret_cast<const uint4*>(own + first);
        words[0] = four.x;
        words[1] = four.y;
        words[2] = four.z;
        words[3] = four.w;
        if (odd && first + 16 == bytes) words[3] &= 0x0FFFFFFFu;
        return;
    }
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
        const long long at = first + i;
        if (at >= bytes) continue;
        const unsigned byte = own[at];
        words[i / 4] |= (odd && at == bytes - 1 ? byte & 0x0Fu : byte) << (8 * (i % 4));
    }
}
