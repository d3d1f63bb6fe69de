// Products of many tokens on tensor cores: sums of integers, exact for each 32 values, which are added up as in blocks.cuh.
//
// A warp has eight rows and sixteen tokens at a time. In a group of 32 columns, a lane gives four of each half to the products: those from
// 4 * (lane % 4) and from 16 + 4 * (lane % 4) on, of row lane / 4 and of the tokens lane / 4 and lane / 4 + 8. It gets the sums of these
// tokens with the rows 2 * (lane % 4) and 2 * (lane % 4) + 1.
//
// Where both halves of a group have scales of their own, HALVES, their sums are kept apart.
#pragma once
#include "blocks.cuh"

// Tokens of a tile.
constexpr u32 TILE_TOKENS = 16;

// The sums of products of sixteen rows of 32 bytes, a, with eight rows of 32 bytes, b.
__device__ inline void multiply_tile(int (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef EMULATED
    emulated_mma(sums, a, b);
#elif __CUDA_ARCH__ >= 800
    // Volatile: all lanes of a warp must meet it, so it may not move to where some of them branch.
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0));
#endif
}

// A lane's integers of a group: four of each half.
template <typename Kind, typename Rows> __device__ void fragment(const Rows &rows, int b, int g, int piece, u32 (&out)[2]) {
    for (int half = 0; half < 2; half++) {
        u32 word = Kind::word(rows, b, g, 4 * half + piece);
        out[half] = Kind::OFFSET ? below(word, Kind::OFFSET) : word;
    }
}

// Eight rows with TILES * 16 tokens, from one on.
template <typename Kind, bool INTERLEAVED, int TILES>
__device__ void tile_rows(const ProductKernelArgs &p, u32 group, u32 from) {
    using Rows = typename Kind::template Rows<INTERLEAVED>;
    u32 lane = threadIdx.x % WARP, own = lane / 4, piece = lane % 4, first = group * GROUP;
    int blocks = p.cols / Kind::VALUES;
    u64 row_bytes = (u64)blocks * Kind::BYTES;
    auto row_at = [&](u32 row) {
        return Rows{p.weights + (INTERLEAVED ? first : min(first + row, p.rows - 1)) * row_bytes, (int)row};
    };
    Rows given = row_at(own), got[2] = {row_at(2 * piece), row_at(2 * piece + 1)};
    float sums[TILES][4] = {};
    const Block *x[TILES][2];
    for (int tile = 0; tile < TILES; tile++) {
        for (u32 half = 0; half < 2; half++) {
            u32 token = min(from + TILE_TOKENS * tile + own + 8 * half, p.tokens - 1);
            x[tile][half] = (const Block *)p.x + p.x_at(token) / BLOCK;
        }
    }
    for (int b = 0; b < blocks; b++) {
        for (int g = 0; g < Kind::VALUES / BLOCK; g++) {
            u32 weights[2];
            fragment<Kind>(given, b, g, piece, weights);
            typename Kind::Scales scales[2] = {Kind::scales(got[0], b, g), Kind::scales(got[1], b, g)};
            for (int tile = 0; tile < TILES; tile++) {
                const Block *now[2] = {x[tile][0] + b * (Kind::VALUES / BLOCK) + g, x[tile][1] + b * (Kind::VALUES / BLOCK) + g};
                u32 a[4] = {(u32)now[0]->q[piece], (u32)now[1]->q[piece], (u32)now[0]->q[4 + piece], (u32)now[1]->q[4 + piece]};
                int dots[2][4];
                if (Kind::HALVES) {
                    multiply_tile(dots[0], a, {weights[0], 0});
                    multiply_tile(dots[1], a, {0, weights[1]});
                } else {
                    multiply_tile(dots[0], a, weights);
                }
                for (int i = 0; i < 4; i++) {
                    float term = scales[i % 2].term(dots[0][i], Kind::HALVES ? dots[1][i] : 0, *now[i / 2]);
                    sums[tile][i] = fma_rn(term, now[i / 2]->d, sums[tile][i]);
                }
            }
        }
    }
    for (int tile = 0; tile < TILES; tile++) {
        for (int i = 0; i < 4; i++) {
            u32 token = from + TILE_TOKENS * tile + own + 8 * (i / 2), row = first + 2 * piece + i % 2;
            if (token < p.tokens && row < p.rows) p.out[(u64)token * p.out_stride + row] = p.finished(sums[tile][i]);
        }
    }
}

template <typename Kind, bool INTERLEAVED> __device__ void all_tiles(const ProductKernelArgs &p, u32 group) {
    for (u32 from = 0; from < p.tokens; from += 2 * TILE_TOKENS) {
        if (p.tokens - from > TILE_TOKENS) tile_rows<Kind, INTERLEAVED, 2>(p, group, from);
        else tile_rows<Kind, INTERLEAVED, 1>(p, group, from);
    }
}

template <typename Kind> __device__ void tiles_matmul(const ProductKernelArgs *products, u32 count, u32 groups) {
    u32 group = group_of_warp();
    if (group >= groups) return;
    const ProductKernelArgs &p = *find(products, count, group);
    if (!p.weights) return;
    u32 own = group - p.first_group;
    // The last rows are not interleaved if they are not a whole group.
    if (p.interleaved && (own + 1) * GROUP <= p.rows) all_tiles<Kind, true>(p, own);
    else all_tiles<Kind, false>(p, own);
}

// A row of a matrix as floats: out [cols]. A thread has eight values of a group.
template <typename Kind, typename Rows>
__device__ void widen_eight(const Rows &rows, u32 group, u32 piece, const MatrixKernelArgs &m, float *out) {
    constexpr int EACH = Kind::VALUES / BLOCK;
    int b = group / EACH, g = group % EACH;
    u32 words[2];
    fragment<Kind>(rows, b, g, piece, words);
    typename Kind::Scales scales = Kind::scales(rows, b, g);
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 4; i++) {
            float value = scales.widened((signed char)(words[half] >> 8 * i), half);
            out[BLOCK * group + 16 * half + 4 * piece + i] = m.finished(value);
        }
    }
}

template <typename Kind> __device__ void widen_row(const MatrixKernelArgs &m, const u32 *number, float *out) {
    u32 group = index_of_thread() / 4, piece = index_of_thread() % 4, row = min(*number, m.rows - 1), first = row / GROUP * GROUP;
    if (group >= m.cols / BLOCK) return;
    u64 row_bytes = (u64)(m.cols / Kind::VALUES) * Kind::BYTES;
    if (m.interleaved && first + GROUP <= m.rows) {
        typename Kind::template Rows<true> rows = {m.weights + first * row_bytes, (int)(row - first)};
        widen_eight<Kind>(rows, group, piece, m, out);
    } else {
        typename Kind::template Rows<false> rows = {m.weights + row * row_bytes, (int)(row - first)};
        widen_eight<Kind>(rows, group, piece, m, out);
    }
}

// The kernels of a format: for one token, for a few, and for many; and one for a row.
#define PRODUCTS(name, Kind)                                                                                           \
    extern "C" __global__ void name##_matvec(const ProductKernelArgs *products, u32 count, u32 groups) {               \
        blocks_matmul<Kind, 1>(products, count, groups);                                                               \
    }                                                                                                                  \
    extern "C" __global__ void name##_matmul(const ProductKernelArgs *products, u32 count, u32 groups) {               \
        blocks_matmul<Kind, 8>(products, count, groups);                                                               \
    }                                                                                                                  \
    extern "C" __global__ void name##_tiles(const ProductKernelArgs *products, u32 count, u32 groups) {                \
        tiles_matmul<Kind>(products, count, groups);                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void name##_row(                                                                             \
        const u8 *weights, const u32 *number, float *out, u32 rows, u32 cols, u32 interleaved, u32 scale_at) {         \
        widen_row<Kind>({weights, rows, cols, interleaved, scale_at}, number, out);                                    \
    }
