// qsim_pack: two 4-bit codes a byte, the even element in the low nibble; qsim_unpack: back.
//
// Contract
//   codes [rows, length], packed [rows, bytes], bytes = ceil(length / 2), contiguous. A code above 15 is cut to its low
//   nibble. The high nibble behind an odd length is written as 0 and not read.
//   Grid: x strides over the bytes (of pack) or the codes (of unpack) of all rows; one-dimensional blocks.

extern "C" __global__ void qsim_pack(
    const unsigned char* codes, unsigned char* packed, long long rows, long long length)
{
    const long long bytes = (length + 1) / 2, stride = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < rows * bytes; at += stride) {
        const long long row = at / bytes, first = 2 * (at - row * bytes);
        const unsigned char* own = codes + row * length + first;
        const unsigned high = first + 1 < length ? own[1] : 0u;
        packed[at] = (unsigned char)((own[0] & 15u) | high << 4);
    }
}

extern "C" __global__ void qsim_unpack(
    const unsigned char* packed, unsigned char* codes, long long rows, long long length)
{
    const long long bytes = (length + 1) / 2, stride = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < rows * length; at += stride) {
        const long long row = at / length, element = at - row * length;
        codes[at] = (unsigned char)(packed[row * bytes + element / 2] >> (4 * (element % 2)) & 15);
    }
}
