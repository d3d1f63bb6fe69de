// Attention of many queries in one launch, in half precision on tensor cores (FlashAttention): scores stay in registers, and the softmax is
// corrected as larger scores are found. Sums are in single precision. Results differ from those of attention.cu in the last bits, but do
// not depend on the other queries of a launch: positions are taken in steps that begin at multiples of STEP.
#include "attention.cuh"

// Pairs of query and head of a tile, which share a key head. Pairs are counted query by query, and within a query by head.
constexpr u32 PAIRS = 16;
// Positions of a step, and those that are multiplied at once, which are in one page.
constexpr u32 STEP = 64;
constexpr u32 TOGETHER = 16;
// Columns of values whose sums a warp has; where values are wider, several warps compute the same scores.
constexpr u32 COLUMNS = 128;
constexpr float LOG2_E = 1.44269504088896340736f;

// Two numbers in half precision, the first in the low bits.
__device__ inline u32 halves(float low, float high) { return half_of(low) | (u32)half_of(high) << 16; }

// 2^x, approximately.
__device__ inline float power_of_two(float x) {
#ifdef EMULATED
    return emulated_exp2(x);
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#endif
}

// Adds the products of sixteen rows of 16 halves, a, with eight rows of 16 halves, b.
__device__ inline void multiply_halves(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef EMULATED
    emulated_half_mma(sums, a, b);
#elif __CUDA_ARCH__ >= 800
    // Volatile: all lanes of a warp must meet it, so it may not move to where some of them branch.
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Rows of keys and values: two values from an even column on, and four from a multiple of four, as halves.
struct SingleRows {
    __device__ static u32 two(const u8 *row, u32 column) {
        const float *at = (const float *)row + column;
        return halves(at[0], at[1]);
    }

    __device__ static void four(const u8 *row, u32 column, u32 (&out)[2]) {
        out[0] = two(row, column);
        out[1] = two(row, column + 2);
    }
};

struct HalfRows {
    __device__ static u32 two(const u8 *row, u32 column) { return *(const u32 *)(row + 2 * (u64)column); }

    __device__ static void four(const u8 *row, u32 column, u32 (&out)[2]) {
        u64 all = *(const u64 *)(row + 2 * (u64)column);
        out[0] = (u32)all;
        out[1] = (u32)(all >> 32);
    }
};

// Blocks of a scale in half precision and 32 bytes, which begin at even addresses.
struct ByteBlocks {
    static constexpr u32 BYTES = ByteRows::BYTES;

    __device__ static u32 two(const u8 *row, u32 column) {
        const u8 *block = row + (u64)(column / BLOCK) * BYTES;
        return scaled_pair(half_at(block), *(const u16 *)(block + 2 + column % BLOCK));
    }

    __device__ static void four(const u8 *row, u32 column, u32 (&out)[2]) {
        const u8 *block = row + (u64)(column / BLOCK) * BYTES;
        float d = half_at(block);
        const u16 *at = (const u16 *)(block + 2 + column % BLOCK);
        out[0] = scaled_pair(d, at[0]);
        out[1] = scaled_pair(d, at[1]);
    }

    __device__ static u32 scaled_pair(float d, u16 bytes) {
        return halves(mul_rn(d, (float)(signed char)(bytes & 0xFF)), mul_rn(d, (float)(signed char)(bytes >> 8)));
    }
};

// A tile, with the two pairs of a lane: rows lane / 4 and lane / 4 + 8.
struct PairTile {
    const AttentionKernelArgs &args;
    u32 kv_head;
    u32 pairs[2];
    // Whether these pairs exist; the last one stands in for others.
    bool exists[2];
    u32 start[2];
    u32 end[2];
    // The range of positions that the whole tile sees.
    u32 from;
    u32 to;

    __device__ PairTile(const AttentionKernelArgs &args, u32 number) : args(args) {
        u32 all = args.count * args.group, each = (all + PAIRS - 1) / PAIRS, row = threadIdx.x % WARP / 4;
        kv_head = number / each;
        for (u32 r = 0; r < 2; r++) {
            u32 wanted = number % each * PAIRS + row + 8 * r;
            exists[r] = wanted < all;
            pairs[r] = min(wanted, all - 1);
            start[r] = args.seen[2 * query(r)];
            end[r] = args.seen[2 * query(r) + 1];
        }
        from = min(start[0], start[1]);
        to = end[0] < end[1] ? end[1] : end[0];
        for (int step = WARP / 2; step >= 4; step /= 2) {
            u32 other = __shfl_xor_sync(ALL, to, step);
            from = min(from, __shfl_xor_sync(ALL, from, step));
            to = to < other ? other : to;
        }
    }

    __device__ u32 query(u32 r) const { return pairs[r] / args.group; }
    __device__ u32 head(u32 r) const { return kv_head * args.group + pairs[r] % args.group; }
    __device__ u64 place(u32 r) const { return (u64)query(r) * args.heads + head(r); }
    __device__ bool sees(u32 r, u32 position) const { return start[r] <= position && position < end[r]; }

    // Whether some of the positions that are multiplied at once are in sight.
    __device__ bool sees_some(u32 at) const { return at < to && at + TOGETHER > from; }

    // The row of the tile's key head at a position.
    __device__ const u8 *row(const u8 *const *pages, u32 position, u32 stride) const {
        u32 shift = args.page_shift, in_page = position & ((1u << shift) - 1);
        return pages[position >> shift] + (((u64)kv_head << shift) + in_page) * stride;
    }
};

// The scores of a step: scores[j][2 * r + c] is of row r and of position at + 8 * j + 2 * (lane % 4) + c.
template <typename Rows> __device__ void scores_of_step(const PairTile &tile, u32 at, float (&scores)[STEP / 8][4]) {
    const AttentionKernelArgs &args = tile.args;
    u32 lane = threadIdx.x % WARP, piece = lane % 4, width = args.key_width;
    const float *queries[2] = {args.queries + tile.place(0) * width, args.queries + tile.place(1) * width};
    const u8 *keys[STEP / 8];
#pragma unroll
    for (u32 j = 0; j < STEP / 8; j++) {
        u32 position = at + 8 * j + lane / 4;
        bool there = tile.sees_some(at + j / 2 * TOGETHER);
        keys[j] = there ? tile.row(args.key_pages, position, args.key_row_stride) : nullptr;
        for (u32 i = 0; i < 4; i++) scores[j][i] = 0.0f;
    }
    // Both sides have their columns in the same order, so that a lane reads four that are next to each other.
    for (u32 first = 0; first < width; first += 16) {
        u32 column = first + 4 * piece, a[4] = {};
        if (column < width) {
            const float *x = queries[0] + column, *y = queries[1] + column;
            a[0] = halves(x[0], x[1]);
            a[1] = halves(y[0], y[1]);
            a[2] = halves(x[2], x[3]);
            a[3] = halves(y[2], y[3]);
        }
#pragma unroll
        for (u32 j = 0; j < STEP / 8; j++) {
            if (!keys[j]) continue;
            u32 b[2] = {};
            if (column < width) Rows::four(keys[j], column, b);
            multiply_halves(scores[j], a, b);
        }
    }
}

// Replaces the scores of a step by powers of two below the largest score so far, which is corrected with the sums.
__device__ inline void powers_of_step(
    const PairTile &tile, u32 at, float (&scores)[STEP / 8][4], float (&top)[2], float (&sum)[2], float (&factor)[2]) {
    float scale = tile.args.scale * LOG2_E;
    u32 piece = threadIdx.x % 4;
    for (u32 r = 0; r < 2; r++) {
        float most = top[r];
#pragma unroll
        for (u32 j = 0; j < STEP / 8; j++) {
            for (u32 c = 0; c < 2; c++) {
                float &score = scores[j][2 * r + c];
                score = tile.sees(r, at + 8 * j + 2 * piece + c) ? mul_rn(score, scale) : minus_infinity();
                most = larger(most, score);
            }
        }
        most = larger(most, __shfl_xor_sync(ALL, most, 1));
        most = larger(most, __shfl_xor_sync(ALL, most, 2));
        // Where nothing was in sight so far, all powers are 0.
        float base = most == minus_infinity() ? 0.0f : most;
        factor[r] = power_of_two(sub_rn(top[r], base));
        top[r] = most;
        sum[r] = mul_rn(sum[r], factor[r]);
#pragma unroll
        for (u32 j = 0; j < STEP / 8; j++) {
            for (u32 c = 0; c < 2; c++) {
                float &score = scores[j][2 * r + c];
                score = power_of_two(sub_rn(score, base));
                sum[r] = add_rn(sum[r], score);
            }
        }
    }
}

// Adds the values of a step, weighted: sums[2 * j + o][2 * r + c] is of row r and of column first + 16 * j + 4 * (lane % 4) + 2 * c + o.
template <typename Rows>
__device__ void add_values(
    const PairTile &tile, u32 at, u32 first, const float (&powers)[STEP / 8][4], float (&sums)[COLUMNS / 8][4]) {
    const AttentionKernelArgs &args = tile.args;
    u32 lane = threadIdx.x % WARP, piece = lane % 4;
#pragma unroll
    for (u32 g = 0; g < STEP / TOGETHER; g++) {
        u32 now = at + g * TOGETHER;
        if (!tile.sees_some(now)) continue;
        const float(&low)[4] = powers[2 * g], (&high)[4] = powers[2 * g + 1];
        u32 a[4] = {halves(low[0], low[1]), halves(low[2], low[3]), halves(high[0], high[1]), halves(high[2], high[3])};
        const u8 *rows[4];
        for (u32 i = 0; i < 4; i++) {
            u32 position = now + 2 * piece + i % 2 + 8 * (i / 2);
            // Rows that were never written may hold any values.
            bool there = tile.from <= position && position < tile.to;
            rows[i] = there ? tile.row(args.value_pages, position, args.value_row_stride) : nullptr;
        }
#pragma unroll
        for (u32 j = 0; j < COLUMNS / 16; j++) {
            u32 column = first + 16 * j + 2 * (lane / 4), pairs[4] = {};
            if (first + 16 * j >= args.value_width) break;
            for (u32 i = 0; i < 4; i++) {
                if (rows[i] && column < args.value_width) pairs[i] = Rows::two(rows[i], column);
            }
            u32 even[2] = {(pairs[0] & 0xFFFF) | pairs[1] << 16, (pairs[2] & 0xFFFF) | pairs[3] << 16};
            u32 odd[2] = {pairs[0] >> 16 | (pairs[1] & 0xFFFF0000u), pairs[2] >> 16 | (pairs[3] & 0xFFFF0000u)};
            multiply_halves(sums[2 * j], a, even);
            multiply_halves(sums[2 * j + 1], a, odd);
        }
    }
}

// Attention of all queries. A warp has a tile and a part of the columns; the grid's y is the task. Widths are multiples of four.
template <typename Keys, typename Values> __device__ void flash_of(const u8 *tasks) {
    const AttentionKernelArgs &args = task_at(tasks, blockIdx.y);
    u32 parts = (args.value_width + COLUMNS - 1) / COLUMNS, number = group_of_warp() / parts;
    u32 tiles = (args.count * args.group + PAIRS - 1) / PAIRS * (args.heads / args.group);
    if (number >= tiles) return;
    PairTile tile(args, number);
    u32 first = group_of_warp() % parts * COLUMNS, piece = threadIdx.x % 4;
    float sums[COLUMNS / 8][4] = {}, top[2], sum[2];
    for (u32 r = 0; r < 2; r++) {
        top[r] = args.sinks ? mul_rn(args.sinks[tile.head(r)], LOG2_E) : minus_infinity();
        sum[r] = args.sinks && piece == 0 ? 1.0f : 0.0f;
    }
    for (u32 at = tile.from / STEP * STEP; at < tile.to; at += STEP) {
        float scores[STEP / 8][4], factor[2];
        scores_of_step<Keys>(tile, at, scores);
        powers_of_step(tile, at, scores, top, sum, factor);
#pragma unroll
        for (u32 j = 0; j < COLUMNS / 8; j++) {
            for (u32 i = 0; i < 4; i++) sums[j][i] = mul_rn(sums[j][i], factor[i / 2]);
        }
        add_values<Values>(tile, at, first, scores, sums);
    }
    for (u32 r = 0; r < 2; r++) {
        float all = sum[r];
        all = add_rn(all, __shfl_xor_sync(ALL, all, 1));
        all = add_rn(all, __shfl_xor_sync(ALL, all, 2));
        float inverse = div_rn(1.0f, all);
        float *out = args.out + tile.place(r) * args.value_width + first + 4 * piece;
#pragma unroll
        for (u32 j = 0; j < COLUMNS / 16; j++) {
            if (!tile.exists[r] || first + 16 * j + 4 * piece >= args.value_width) continue;
            for (u32 c = 0; c < 2; c++) {
                out[16 * j + 2 * c] = mul_rn(sums[2 * j][2 * r + c], inverse);
                out[16 * j + 2 * c + 1] = mul_rn(sums[2 * j + 1][2 * r + c], inverse);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) flash_f32(const u8 *tasks) {
    flash_of<SingleRows, SingleRows>(tasks);
}

extern "C" __global__ void __launch_bounds__(128) flash_f16(const u8 *tasks) {
    flash_of<HalfRows, HalfRows>(tasks);
}

extern "C" __global__ void __launch_bounds__(128) flash_q8_0(const u8 *tasks) {
    flash_of<ByteBlocks, ByteBlocks>(tasks);
}
