// Products with weights in block formats, directly on the bytes of slots: all experts of a layer in one launch.
//
// A warp has eight rows. Lane l has row l % 8 and part l / 8 of every step, so that four pieces of eight rows are read
// at once, and are adjacent if the rows are interleaved. Sums of integers are exact in any order; the floats made of
// them are exchanged by shuffles and added in the order of the columns.
//
// Each kind of format has two functions, see groups.cuh: `load` loads a lane's piece of a step, for any number of tokens;
// `add` adds the products of the four pieces of the lane's row with one token.
#pragma once
#include "common.cuh"

// A lane's row; its first block is at base. INTERLEAVED: base is the address of the row's group of eight.
template <bool INTERLEAVED, int HALVES, int HALVES_AT, int FOURS_AT, int BYTES> struct Row {
    const u8 *base;
    int row;

    // The f16 number i of block b.
    __device__ float half(int b, int i) const {
        if (INTERLEAVED) return half_at(base + (u64)b * BYTES * GROUP + 2 * (GROUP * i + row));
        return half_at(base + (u64)b * BYTES + HALVES_AT + 2 * i);
    }

    // The bits of the f16 number i of block b.
    __device__ u32 bits(int b, int i) const {
        if (INTERLEAVED) return *(const u16 *)(base + (u64)b * BYTES * GROUP + 2 * (GROUP * i + row));
        return *(const u16 *)(base + (u64)b * BYTES + HALVES_AT + 2 * i);
    }

    // Run i of four of the other bytes of block b.
    __device__ u32 four(int b, int i) const {
        u64 offset = (u64)b * BYTES * GROUP + 2 * GROUP * HALVES + 4 * (GROUP * i + row);
        if (INTERLEAVED) return *(const u32 *)(base + offset);
        // Blocks are aligned to two bytes only.
        const u16 *at = (const u16 *)(base + (u64)b * BYTES + FOURS_AT + 4 * i);
        return at[0] | (u32)at[1] << 16;
    }
};

// The term of the lane that has this part of the row.
__device__ inline float from_part(float term, int row, int part) { return __shfl_sync(ALL, term, row + GROUP * part); }

// What the integers of a group of 32 are multiplied with, exact numbers: COUNT scales, one for all or one for each half; and with MINIMA as
// many numbers, which are added to the values.
template <int COUNT, bool MINIMA> struct GroupScales {
    float d[COUNT];
    float min_of[COUNT];

    // The product with a block of activations whose scale is left out, of the sums of products of integers in both halves.
    __device__ float term(int first, int last, const Block &x) const {
        float sum = mul_rn(d[0], (float)(COUNT == 1 ? first + last : first));
        if constexpr (COUNT == 2) sum = fma_rn(d[1], (float)last, sum);
        for (int i = 0; MINIMA && i < COUNT; i++) sum = fma_rn(min_of[i], COUNT == 1 ? x.sum : x.halves[i], sum);
        return sum;
    }

    // The value of an integer of a half.
    __device__ float widened(int integer, int half) const {
        float value = mul_rn(d[half % COUNT], (float)integer);
        return MINIMA ? add_rn(value, min_of[half % COUNT]) : value;
    }
};

// A format has two functions: `word`, four integers of a group as bytes, which are too large by OFFSET; and `scales`, those of a group. Of a
// block of 256 values a lane has two groups, APART from each other.
template <int COUNT, bool MINIMA = false> struct Format {
    using Scales = GroupScales<COUNT, MINIMA>;
    static constexpr bool HALVES = COUNT == 2;
    static constexpr int OFFSET = 0, APART = 1;
};

// Formats with one scale for a block, its first f16 number.
struct BlockScale : Format<1> {
    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int) { return {{rows.half(b, 0)}}; }
};

// Four bytes, each less by an offset, as signed bytes. They are below 128.
__device__ inline u32 below(u32 bytes, u32 offset) {
    return ((bytes | 0x80808080u) - offset * 0x01010101u) ^ 0x80808080u;
}

// Sixteen integers, of which each nibble chooses one; as bytes, the first in the lowest.
struct Levels {
    u32 words[4];

    // Those that the low nibbles of four bytes choose.
    __device__ u32 four(u32 nibbles) const {
        nibbles &= 0x0F0F0F0Fu;
        u32 places = nibbles & 0x07070707u;
        // The selector has four bits for each byte of the result.
        u32 selector = (places & 0xF) | (places >> 4 & 0xF0) | (places >> 8 & 0xF00) | (places >> 12 & 0xF000);
        u32 low = __byte_perm(words[0], words[1], selector), high = __byte_perm(words[2], words[3], selector);
        u32 is_high = (nibbles >> 3 & 0x01010101u) * 255;
        return (low & ~is_high) | (high & is_high);
    }
};

// Those of iq4_nl and iq4_xs: -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
__device__ inline Levels iq4_levels() { return {{0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u}}; }

// Twice the values of the floats of four bits: 0, 1, 2, 3, 4, 6, 8, 12, and the same below zero.
__device__ inline Levels mxfp4_levels() { return {{0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu}}; }

// Eight rows with TOKENS tokens at a time, so that weights are read once for them.
template <typename Kind, bool INTERLEAVED, int TOKENS>
__device__ void eight_rows(const ProductKernelArgs &p, u32 group) {
    int lane = threadIdx.x % WARP, row = lane % GROUP, part = lane / GROUP, blocks = p.cols / Kind::VALUES;
    // Lanes beyond the last row compute that row as well, and do not store it.
    u32 first = group * GROUP, own = min(first + row, p.rows - 1);
    u64 row_bytes = (u64)blocks * Kind::BYTES;
    typename Kind::template Rows<INTERLEAVED> rows = {p.weights + (INTERLEAVED ? first : own) * row_bytes, row};
    for (u32 from = 0; from < p.tokens; from += TOKENS) {
        float sums[TOKENS];
        const Block *x[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            sums[t] = 0.0f;
            x[t] = (const Block *)p.x + p.x_at(min(from + t, p.tokens - 1)) / BLOCK;
        }
#pragma unroll(TOKENS == 1 ? Kind::UNROLL : 1)
        for (int step = 0; step < Kind::steps(blocks); step++) {
            Kind piece;
            piece.template load<INTERLEAVED>(rows, step, part, blocks);
            for (int t = 0; t < TOKENS; t++) sums[t] = piece.add(sums[t], x[t], step, part, row, blocks);
        }
        for (int t = 0; t < TOKENS; t++) {
            bool wanted = part == 0 && first + row < p.rows && from + t < p.tokens;
            if (wanted) p.out[(u64)(from + t) * p.out_stride + own] = p.finished(sums[t]);
        }
    }
}

// The last rows are not interleaved if they are not a whole group.
template <typename Kind, int TOKENS> __device__ void rows_of_group(const ProductKernelArgs &p, u32 group) {
    if (p.interleaved && (group + 1) * GROUP <= p.rows) eight_rows<Kind, true, TOKENS>(p, group);
    else eight_rows<Kind, false, TOKENS>(p, group);
}

template <typename Kind, int TOKENS>
__device__ void blocks_matmul(const ProductKernelArgs *products, u32 count, u32 groups) {
    u32 group = group_of_warp();
    if (group >= groups) return;
    const ProductKernelArgs &p = *find(products, count, group);
    if (!p.weights) return;
    // Most experts of a few tokens have one.
    if (TOKENS > 1 && p.tokens == 1) rows_of_group<Kind, 1>(p, group - p.first_group);
    else rows_of_group<Kind, TOKENS>(p, group - p.first_group);
}
