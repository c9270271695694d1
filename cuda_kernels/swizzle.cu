// qsim_swizzle, qsim_unswizzle: block scales in the 128 x 4 tiles that tensor cores read, and back.
//
// Contract
//   scales [rows, columns] bytes, contiguous. tiles: whole tiles of 512 bytes, row-major over tile_columns tiles a row;
//   scale (r, c) of a tile stands at (r % 32) * 16 + (r / 32) * 4 + c, so the four columns of a row are one word.
//   qsim_swizzle writes every byte of every tile, 0 where there is no scale; qsim_unswizzle reads no other byte than
//   those of scales. words: 128 a tile, in all. tiles is aligned to 4 bytes; little-endian.
//   Any one-dimensional grid and block: threads stride over words. No shared memory.

struct QsimPlace {
    long long row, column;
};

// Row and first column of the scales of one word.
__device__ QsimPlace qsim_place_of_word(long long word, long long tile_columns)
{
    const long long tile = word / 128;
    const int inside = (int)(word % 128);
    return {tile / tile_columns * 128 + inside % 4 * 32 + inside / 4, tile % tile_columns * 4};
}

extern "C" __global__ void qsim_swizzle(
    const unsigned char* scales, unsigned* tiles, long long rows, long long columns, long long tile_columns,
    long long words)
{
    for (long long word = (long long)blockIdx.x * blockDim.x + threadIdx.x; word < words;
         word += (long long)gridDim.x * blockDim.x) {
        const QsimPlace at = qsim_place_of_word(word, tile_columns);
        unsigned value = 0;
        for (int c = 0; c < 4; ++c)
            if (at.row < rows && at.column + c < columns)
                value |= (unsigned)scales[at.row * columns + at.column + c] << (8 * c);
        tiles[word] = value;
    }
}

extern "C" __global__ void qsim_unswizzle(
    const unsigned char* tiles, unsigned char* scales, long long rows, long long columns, long long tile_columns,
    long long words)
{
    for (long long word = (long long)blockIdx.x * blockDim.x + threadIdx.x; word < words;
         word += (long long)gridDim.x * blockDim.x) {
        const QsimPlace at = qsim_place_of_word(word, tile_columns);
        for (int c = 0; c < 4; ++c)
            if (at.row < rows && at.column + c < columns)
                scales[at.row * columns + at.column + c] = tiles[4 * word + c];
    }
}
