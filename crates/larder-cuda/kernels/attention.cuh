// The arguments of attention over the KV cache.
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

    // The most position tiles that score_stride positions are in.
    __device__ u32 tile_stride() const { return score_stride / TILE_POSITIONS + 2; }
};
static_assert(sizeof(AttentionKernelArgs) == 136, "must match the layout in Rust");

// Bytes from one task of a list to the next: arguments of attention, and of the heads of new tokens.
constexpr u32 TASK_BYTES = 256;

// A task of a list.
__device__ inline const AttentionKernelArgs &task_at(const u8 *tasks, u32 number) {
    return *(const AttentionKernelArgs *)(tasks + (u64)number * TASK_BYTES);
}

// The task that a tile of a launch belongs to.
__device__ inline const AttentionKernelArgs &task_of_tile(const u8 *tasks, u32 count, u32 tile) {
    u32 number = 0;
    while (number + 1 < count && task_at(tasks, number + 1).first_tile <= tile) number++;
    return task_at(tasks, number);
}
