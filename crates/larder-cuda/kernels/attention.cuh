// The arguments of attention over the KV cache, and rows of it.
#pragma once
#include "common.cuh"

// Positions of a position tile, the first of which is a multiple of this number: a part of the definition of attention.
constexpr u32 TILE_POSITIONS = 512;

// Factors of a position tile when it is added to those before it.
struct TileFactors {
    // On the sum of the tiles before it.
    float before;
    // On the sum of the tile.
    float now;
};

// The arguments of attention of one sequence, a task.
struct AttentionKernelArgs {
    // [queries, heads, key_width]
    const float *queries;
    // The pages [key heads, positions per page, components as stored], of which page i has the positions from
    // i << page_shift on; the first key_width or value_width components are used
    const u8 *const *key_pages;
    const u8 *const *value_pages;
    // [queries, 2]: the first visible position, and the end of the range.
    const u32 *seen;
    // [heads], or null
    const float *sinks;
    // [tiles * TILE_QUERIES, score_stride]: the scores of a launch; a row begins at the first position that its tile
    // sees.
    float *scores;
    // [tiles * TILE_QUERIES]: 1 / sum of e^(score - max).
    float *inverse_sums;
    // [tiles * TILE_QUERIES, tile_stride()], beginning with the position tile of the first position that the tile sees.
    TileFactors *factors;
    // [tiles * TILE_QUERIES, tile_stride(), value_width], or null: attention in one launch for each position tile.
    float *partial_sums;
    // [queries, heads, value_width]
    float *out;
    // The same, quantised, or null; then value_width is a multiple of 32.
    Block *blocks;
    // The position of each of the first `listed` rows that the task sees, which then has one query; or null: they are at the positions of their
    // numbers.
    const u32 *chosen;
    // [heads, 2 * reach + 1]: additions to scores by the distance from query to key, those far before the query first; or null
    const float *bias;
    // Number of queries.
    u32 count;
    // Number of query heads.
    u32 heads;
    // Query heads per key head.
    u32 group;
    // Bytes from one row to the next.
    u32 key_row_stride;
    u32 value_row_stride;
    u32 key_width;
    u32 value_width;
    u32 score_stride;
    float scale;
    // The binary logarithm of the positions per page.
    u32 page_shift;
    // The number of the task's first tile of queries within its launch.
    u32 first_tile;
    // The key head of the first query head.
    u32 first_kv_head;
    // Rows that are listed, or are those of another source: the first ones.
    u32 listed;
    // What the positions of the other rows are behind their numbers.
    u32 behind;
    // The distance beyond which the bias does not change.
    u32 reach;
    // With a bias: position of the first query, which the others follow.
    u32 first_query;

    // The most position tiles that score_stride positions are in.
    __device__ u32 tile_stride() const { return score_stride / TILE_POSITIONS + 2; }
};
static_assert(sizeof(AttentionKernelArgs) == 168, "must match the layout in Rust");

// Bytes from one task of a list to the next: arguments of attention, and of the heads of new tokens.
constexpr u32 TASK_BYTES = 288;

// A task of a list.
__device__ inline const AttentionKernelArgs &task_at(const u8 *tasks, u32 number) {
    return *(const AttentionKernelArgs *)(tasks + (u64)number * TASK_BYTES);
}

// The task that a tile of a launch belongs to.
__device__ inline const AttentionKernelArgs &task_of_tile(const u8 *tasks, u32 count, u32 tile) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (task_at(tasks, middle).first_tile <= tile) low = middle;
        else high = middle;
    }
    return task_at(tasks, low);
}

// Rows of keys and values in floats. All threads of a warp store a value each, of which some are used.
template <typename Kind> struct FloatRows {
    __device__ static float widen(const u8 *row, u32 i) { return Kind::widen(row, i); }

    __device__ static void store(u8 *row, u32 i, float value, bool is_used) {
        if (is_used) Kind::narrow(row, i, value);
    }
};

// Rows in blocks of 32 values, q8_0: a scale in half precision, and bytes. Rows are padded to whole blocks.
struct ByteRows {
    static constexpr u32 BYTES = 34;

    __device__ static float widen(const u8 *row, u32 i) {
        const u8 *block = row + (u64)(i / BLOCK) * BYTES;
        return mul_rn(half_at(block), (float)((const signed char *)block)[2 + i % BLOCK]);
    }

    // The values of a warp are a block.
    __device__ static void store(u8 *row, u32 i, float value, bool is_used) {
        u32 lane = threadIdx.x % WARP;
        if (!is_used) value = 0.0f;
        // Magnitudes have the order of their bits; NaN counts as infinite.
        u32 amax = value == value ? __float_as_uint(fabsf(value)) : 0x7F800000u;
        for (int step = WARP / 2; step > 0; step /= 2) {
            u32 other = __shfl_xor_sync(ALL, amax, step);
            amax = other > amax ? other : amax;
        }
        u16 scale = half_of(div_rn(__uint_as_float(amax), 127.0f));
        if (scale == 0x7C00u) scale = 0x7BFFu;
        if (amax >= 0x7F800000u) scale = 0x7E00u;
        float d = half_at((const u8 *)&scale), inverse = d > 0.0f ? div_rn(1.0f, d) : 0.0f;
        float rounded = rintf(mul_rn(value, inverse));
        rounded = rounded < -127.0f ? -127.0f : rounded > 127.0f ? 127.0f : rounded;
        u8 *block = row + (u64)(i / BLOCK) * BYTES;
        ((signed char *)block)[2 + lane] = rounded == rounded ? (signed char)rounded : 0;
        if (lane == 0) *(u16 *)block = scale;
    }
};

// The products of a row with COUNT queries, summed in the order of a product, for the first of the LANES lanes that share the row.
template <typename Kind, u32 COUNT>
__device__ inline void products_of_row(const u8 *row, const float *const (&x)[COUNT], u32 width, float (&sums)[COUNT]) {
    u32 body = width / LANES * LANES;
    for (u32 t = 0; t < COUNT; t++) sums[t] = 0.0f;
#pragma unroll 4
    for (u32 i = threadIdx.x % LANES; i < body; i += LANES) {
        float number = Kind::widen(row, i);
        for (u32 t = 0; t < COUNT; t++) sums[t] = fma_rn(number, x[t][i], sums[t]);
    }
    for (u32 t = 0; t < COUNT; t++) {
        sums[t] = sum_of_lanes(sums[t]);
        for (u32 i = body; i < width; i++) sums[t] = fma_rn(Kind::widen(row, i), x[t][i], sums[t]);
    }
}
