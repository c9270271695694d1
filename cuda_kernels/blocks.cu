// Scaled casts of a matrix in blocks. qsim_blocks_fused: measured, scaled, encoded, packed in one read, where blocks
// lie along rows in 16, 32, 64 or 128 columns. qsim_blocks_measure, _scale, _encode: the same in three steps, for blocks of
// any shape.
//
// Contract
//   Each float operation is correctly rounded, subnormals kept (--fmad=false -ftz=false). What is cast is the residual
//   r = RN(x - c), x [rows, columns], contiguous; centre as in matrix.cuh. Blocks of block_rows x block_columns tile it
//   from the top left, tails smaller; a grid [down, across] has one entry a block. Rules of scales as in scales.cuh,
//   element y and its counts as in elements.cuh; rules [21]: QsimRules. stream [5]: Philox key (2) and upper counter
//   words (3), or null where the rounding draws nothing; element i, in C order, takes word i % 4 of block i / 4.
//   tensor [1]: the amax g that a two-level scale is relative to; else null.
//   codes [rows, columns], or [rows, (columns + 1) / 2] where packed, at an address that is a multiple of 4; codes of a
//   format of four bits there. scales [down, across] of QSIM_FLOAT32, scale_codes of the others: the other is null.
//   top [1] is raised to the bits of the largest finite |r|, null: it is not; counts [6] grow by QsimTally. seen
//   [down, across] is raised to the bits of the largest |r| of the block, NaN and Inf included. All are 0 beforehand.
//   multiplier [down, across]: QsimScale.multiplier, which of QSIM_FLOAT32 are the scales.
//   Maxima and counts are of integers, and errors are added in one order: bits depend on no grid and no block.
//   Grid: x strides over chunks or blocks; one-dimensional blocks, a multiple of 32 threads.

#define QSIM_FULL_WARP 0xFFFFFFFFu
#define QSIM_COUNTS 6
#define QSIM_HEIGHT 16  // rows of a tile that is measured together

// The tallies of a thread block, then of the grid; all threads take part.
__device__ __forceinline__ void qsim_add_counts(
    const QsimTally& tally, unsigned best, unsigned* shared, unsigned long long* counts, unsigned* top)
{
    if (threadIdx.x <= QSIM_COUNTS) shared[threadIdx.x] = 0u;
    __syncthreads();
    const unsigned own[QSIM_COUNTS] = {tally.saturated, tally.flushed, tally.nans, tally.infs, tally.zero_scales,
                                       tally.refused};
    #pragma unroll
    for (int i = 0; i < QSIM_COUNTS; ++i)
        if (own[i]) atomicAdd(shared + i, own[i]);
    if (best) atomicMax(shared + QSIM_COUNTS, best);
    __syncthreads();
    if (threadIdx.x < QSIM_COUNTS && shared[threadIdx.x])
        atomicAdd(counts + threadIdx.x, (unsigned long long)shared[threadIdx.x]);
    if (threadIdx.x == QSIM_COUNTS && top && shared[QSIM_COUNTS]) atomicMax(top, shared[QSIM_COUNTS]);
}

// Errors of the two maps over a block of ``lanes`` lanes, four elements each, added in ascending order from the first
// lane to the last, by all lanes of the warp; right in every lane.
__device__ __forceinline__ QsimScale qsim_four_over_six(
    const float (&v)[4], int present, int lanes, unsigned seen, const QsimRecipe& r, const QsimLevels& l)
{
    const QsimMaps maps = qsim_maps(l, seen);
    const int lane = threadIdx.x % 32, mine = lane % lanes, start = lane - mine;
    float total[2] = {0.0f, 0.0f};
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        float error[4];
        #pragma unroll
        for (int e = 0; e < 4; ++e) error[e] = e < present ? qsim_error(v[e], maps, i, r, l) : 0.0f;  // t + 0 is t
        for (int turn = 0; turn < lanes; ++turn) {
            const float before = __shfl_sync(QSIM_FULL_WARP, total[i], start + (turn > 0 ? turn - 1 : 0));
            if (turn == mine) {
                total[i] = before;
                #pragma unroll
                for (int e = 0; e < 4; ++e) total[i] = __fadd_rn(total[i], error[e]);
            }
        }
        total[i] = __shfl_sync(QSIM_FULL_WARP, total[i], start + lanes - 1);
    }
    return qsim_chosen(maps, seen, total[0], total[1]);
}

extern "C" __global__ void qsim_blocks_fused(
    const float* x, const float* center, const unsigned* rules, const unsigned* stream, const float* tensor,
    unsigned char* codes, float* scales, unsigned char* scale_codes, unsigned* top, unsigned long long* counts,
    long long rows, long long columns, long long center_down, long long center_across, int block_columns, int packed,
    int rule, unsigned carry, int offset, int absolute, float fmt_max, float scale_max, float full_range)
{
    __shared__ unsigned shared[QSIM_COUNTS + 1];
    const QsimRecipe recipe = {rule, carry, offset, absolute, fmt_max, scale_max, full_range};
    const QsimLevels levels = qsim_levels(full_range, tensor ? *tensor : 0.0f);
    const QsimEncoder to = qsim_encoder(rules, recipe, stream != nullptr);
    const QsimMatrix matrix = {x, center, rows, columns, center_down, center_across};
    const int lanes = block_columns / 4, lane = threadIdx.x % 32;
    const long long across = (columns + block_columns - 1) / block_columns;
    QsimTally tally = {0, 0, 0, 0, 0, 0};
    unsigned best = 0;

    for (QsimWalk walk(rows, columns); walk.inside(); walk.step()) {
        const long long first = walk.first(), left = columns - first;
        const int present = left < 0 ? 0 : left < 4 ? (int)left : 4;
        float v[4];
        qsim_read_four(matrix, walk.row, first, v);
        unsigned seen = 0;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const unsigned magnitude = __float_as_uint(v[e]) & QSIM_MAGNITUDE;
            seen = max(seen, magnitude);
            best = max(best, magnitude < QSIM_INF ? magnitude : 0u);
        }
        for (int by = 1; by < lanes; by *= 2) seen = max(seen, __shfl_xor_sync(QSIM_FULL_WARP, seen, by));
        const QsimScale scale = rule == QSIM_FOUR_OVER_SIX
                                    ? qsim_four_over_six(v, present, lanes, seen, recipe, levels)
                                    : qsim_scale(recipe, levels, seen);
        if (present > 0 && lane % lanes == 0) {
            const long long block = walk.row * across + walk.chunk * (32 / lanes) + lane / lanes;
            if (scales) scales[block] = scale.multiplier;
            if (scale_codes) scale_codes[block] = (unsigned char)scale.code;
            tally.zero_scales += qsim_is_zero(seen, scale.multiplier) ? 1u : 0u;
        }
        unsigned words[4], code[4];
        qsim_four_words(stream, walk.row * columns + first, words);
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            code[e] = e < present ? qsim_element(v[e], scale.multiplier, scale.divisor, words[e], to, tally) : 0u;
        qsim_write_four(codes, walk.row, first, columns, packed != 0, code);
    }
    qsim_add_counts(tally, best, shared, counts, top);
}

// Raise ``seen`` of band ``band`` by what a warp saw in four columns a lane, and forget it.
__device__ __forceinline__ void qsim_raise(
    unsigned* seen, long long band, long long chunk, long long columns, long long block_columns, long long across,
    unsigned (&largest)[4])
{
    const long long begin = QSIM_CHUNK * chunk, first = begin + threadIdx.x % 32 * 4;
    const long long last = begin + QSIM_CHUNK - 1 < columns ? begin + QSIM_CHUNK - 1 : columns - 1;
    unsigned* own = seen + band * across;
    if (begin / block_columns == last / block_columns) {
        unsigned all = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
        for (int by = 16; by > 0; by /= 2) all = max(all, __shfl_xor_sync(QSIM_FULL_WARP, all, by));
        if (threadIdx.x % 32 == 0 && all) atomicMax(own + begin / block_columns, all);
    } else if (first < columns && block_columns % 4 == 0) {
        const unsigned all = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
        if (all) atomicMax(own + first / block_columns, all);
    } else {
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            if (first + e < columns && largest[e]) atomicMax(own + (first + e) / block_columns, largest[e]);
    }
    largest[0] = largest[1] = largest[2] = largest[3] = 0u;
}

// seen may be null: then the whole matrix alone is measured.
extern "C" __global__ void qsim_blocks_measure(
    const float* x, const float* center, unsigned* seen, unsigned* top, long long rows, long long columns,
    long long center_down, long long center_across, long long block_rows, long long block_columns)
{
    const QsimMatrix matrix = {x, center, rows, columns, center_down, center_across};
    const long long across = (columns + block_columns - 1) / block_columns;
    unsigned best = 0, largest[4] = {0, 0, 0, 0};
    long long band = -1, chunk = -1;  // of what `largest` has seen

    for (QsimWalk walk((rows + QSIM_HEIGHT - 1) / QSIM_HEIGHT, columns); walk.inside(); walk.step()) {
        const long long start = QSIM_HEIGHT * walk.row, end = start + QSIM_HEIGHT < rows ? start + QSIM_HEIGHT : rows;
        long long own = start / block_rows;
        for (long long row = start; row < end; ++row) {
            if (row - own * block_rows == block_rows) ++own;
            if (seen && (own != band || (walk.chunk != chunk && block_columns < columns))) {
                if (band >= 0) qsim_raise(seen, band, chunk, columns, block_columns, across, largest);
                band = own;
                chunk = walk.chunk;
            }
            float v[4];
            qsim_read_four(matrix, row, walk.first(), v);
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const unsigned magnitude = __float_as_uint(v[e]) & QSIM_MAGNITUDE;
                largest[e] = max(largest[e], magnitude);
                best = max(best, magnitude < QSIM_INF ? magnitude : 0u);
            }
        }
    }
    if (seen && band >= 0) qsim_raise(seen, band, chunk, columns, block_columns, across, largest);
    for (int by = 16; by > 0; by /= 2) best = max(best, __shfl_xor_sync(QSIM_FULL_WARP, best, by));
    if (threadIdx.x % 32 == 0 && best) atomicMax(top, best);
}

// Four over six of a block of any shape, by one thread: errors are added row by row.
__device__ __forceinline__ QsimScale qsim_four_over_six_of(
    const QsimMatrix& matrix, long long top_row, long long bottom, long long left, long long right, unsigned seen,
    const QsimRecipe& r, const QsimLevels& l)
{
    const QsimMaps maps = qsim_maps(l, seen);
    float total[2] = {0.0f, 0.0f};
    for (long long row = top_row; row < bottom; ++row)
        for (long long j = left; j < right; ++j) {
            float v = matrix.x[row * matrix.columns + j];
            if (matrix.center)
                v = qsim_residual(v, matrix.center[row * matrix.center_down + j * matrix.center_across]);
            #pragma unroll
            for (int i = 0; i < 2; ++i) total[i] = __fadd_rn(total[i], qsim_error(v, maps, i, r, l));
        }
    return qsim_chosen(maps, seen, total[0], total[1]);
}

extern "C" __global__ void qsim_blocks_scale(
    const float* x, const float* center, const unsigned* seen, const float* tensor, float* multiplier,
    unsigned char* scale_codes, unsigned long long* counts, long long rows, long long columns, long long center_down,
    long long center_across, long long block_rows, long long block_columns, int rule, unsigned carry, int offset,
    int absolute, float fmt_max, float scale_max, float full_range)
{
    __shared__ unsigned shared[QSIM_COUNTS + 1];
    const QsimRecipe recipe = {rule, carry, offset, absolute, fmt_max, scale_max, full_range};
    const QsimLevels levels = qsim_levels(full_range, tensor ? *tensor : 0.0f);
    const QsimMatrix matrix = {x, center, rows, columns, center_down, center_across};
    const long long across = (columns + block_columns - 1) / block_columns;
    const long long count = (rows + block_rows - 1) / block_rows * across, stride = (long long)gridDim.x * blockDim.x;
    QsimTally tally = {0, 0, 0, 0, 0, 0};

    for (long long b = (long long)blockIdx.x * blockDim.x + threadIdx.x; b < count; b += stride) {
        QsimScale scale;
        if (rule == QSIM_FOUR_OVER_SIX) {
            const long long down = b / across * block_rows, right = b % across * block_columns;
            scale = qsim_four_over_six_of(
                matrix, down, down + block_rows < rows ? down + block_rows : rows, right,
                right + block_columns < columns ? right + block_columns : columns, seen[b], recipe, levels);
        } else {
            scale = qsim_scale(recipe, levels, seen[b]);
        }
        multiplier[b] = scale.multiplier;
        if (scale_codes) scale_codes[b] = (unsigned char)scale.code;
        tally.zero_scales += qsim_is_zero(seen[b], scale.multiplier) ? 1u : 0u;
    }
    qsim_add_counts(tally, 0u, shared, counts, nullptr);
}

extern "C" __global__ void qsim_blocks_encode(
    const float* x, const float* center, const unsigned* rules, const unsigned* stream, const float* tensor,
    const float* multiplier, const unsigned char* scale_codes, unsigned char* codes, unsigned long long* counts,
    long long rows, long long columns, long long center_down, long long center_across, long long block_rows,
    long long block_columns, int packed, int rule, float full_range)
{
    __shared__ unsigned shared[QSIM_COUNTS + 1];
    const QsimRecipe recipe = {rule, 0u, 0, 0, 0.0f, 0.0f, full_range};
    const QsimEncoder to = qsim_encoder(rules, recipe, stream != nullptr);
    const QsimMatrix matrix = {x, center, rows, columns, center_down, center_across};
    const float g = tensor ? *tensor : 0.0f;
    const long long across = (columns + block_columns - 1) / block_columns;
    QsimTally tally = {0, 0, 0, 0, 0, 0};

    for (QsimWalk walk(rows, columns); walk.inside(); walk.step()) {
        const long long first = walk.first(), left = columns - first;
        const int present = left < 0 ? 0 : left < 4 ? (int)left : 4;
        const long long line = walk.row / block_rows * across;
        float v[4];
        unsigned words[4], code[4];
        qsim_read_four(matrix, walk.row, first, v);
        qsim_four_words(stream, walk.row * columns + first, words);
        float m = 0.0f;
        double divisor = 0.0;
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (e < present && (e == 0 || (first + e) % block_columns == 0)) {
                const long long block = line + (first + e) / block_columns;
                m = multiplier[block];
                if (rule == QSIM_EXACT) divisor = qsim_divisor(g, scale_codes[block]);
            }
            code[e] = e < present ? qsim_element(v[e], m, divisor, words[e], to, tally) : 0u;
        }
        qsim_write_four(codes, walk.row, first, columns, packed != 0, code);
    }
    qsim_add_counts(tally, 0u, shared, counts, nullptr);
}
