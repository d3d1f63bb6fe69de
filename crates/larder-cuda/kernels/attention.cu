// Softmax attention over the KV cache, in two launches (scores, then softmax and weighted sum), what is done with the heads of new tokens before
// it, and copies of KV rows.
#include "attention.cuh"

// Queries of a tile, which share a key head: keys and values are read once for all of them.
constexpr u32 TILE_QUERIES = 4;
// Values that a thread loads before it uses the first.
constexpr u32 PREFETCHED = 32;
static_assert(TILE_POSITIONS % PREFETCHED == 0, "what is loaded together is in one position tile");

// Up to TILE_QUERIES pairs of query and head that share a key head. Pairs are counted query by query, and within a
// query by head.
struct QueryTile {
    const AttentionKernelArgs &args;
    u32 kv_head;
    u32 first;
    u32 count;
    // The range of positions that the tile sees.
    u32 from;
    u32 to;
    // Its place in the memory of the launch for the task: where a task has all tiles, its number.
    u32 place;

    // The tile of this block, which is the grid's y behind the first tile of the launch.
    __device__ QueryTile(const u8 *tasks, u32 tasks_in_launch, u32 first_tile)
        : args(task_of_tile(tasks, tasks_in_launch, first_tile + blockIdx.y)) {
        u32 number = first_tile + blockIdx.y - args.first_tile;
        place = min(number, blockIdx.y);
        u32 pairs = args.count * args.group, each = (pairs + TILE_QUERIES - 1) / TILE_QUERIES;
        kv_head = number / each;
        first = number % each * TILE_QUERIES;
        count = min(TILE_QUERIES, pairs - first);
        from = start(0);
        to = end(0);
        for (u32 i = 1; i < count; i++) {
            from = min(from, start(i));
            to = to < end(i) ? end(i) : to;
        }
    }

    __device__ u32 query(u32 i) const { return (first + i) / args.group; }
    __device__ u32 head(u32 i) const { return kv_head * args.group + (first + i) % args.group; }
    __device__ u64 pair(u32 i) const { return (u64)query(i) * args.heads + head(i); }
    __device__ u32 start(u32 i) const { return args.seen[2 * query(i)]; }
    __device__ u32 end(u32 i) const { return args.seen[2 * query(i) + 1]; }

    // The row of the tile's key head at a position.
    __device__ const u8 *row(const u8 *const *pages, u32 position, u32 stride) const {
        u32 shift = args.page_shift, in_page = position & ((1u << shift) - 1);
        return pages[position >> shift] + (((u64)kv_head << shift) + in_page) * stride;
    }

    // The scores of the tile.
    __device__ float *scores() const { return args.scores + (u64)place * TILE_QUERIES * args.score_stride; }

    // The factors of query i for the position tile of a position.
    __device__ TileFactors &factors(u32 i, u32 position) const {
        u64 query = (u64)place * TILE_QUERIES + i;
        return args.factors[query * args.tile_stride() + position / TILE_POSITIONS - from / TILE_POSITIONS];
    }

    // The sums of the values of query i in a position tile, which are counted from the first that the tile sees.
    __device__ float *partial(u32 i, u32 position_tile) const {
        u64 query = (u64)place * TILE_QUERIES + i;
        return args.partial_sums + (query * args.tile_stride() + position_tile) * args.value_width;
    }
};

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

// The scores of each query with each key, summed in the order of a product. A warp has eight keys, two at a time; the
// grid's y is the tile.
template <typename Kind> __device__ void scores_of(const u8 *tasks, u32 count, u32 first_tile) {
    QueryTile tile(tasks, count, first_tile);
    const AttentionKernelArgs &args = tile.args;
    u32 lane = threadIdx.x % LANES, width = args.key_width, body = width / LANES * LANES;
    u64 at = tile.from + (u64)group_of_warp() * GROUP;
    if (at >= tile.to) return;
    const float *x[TILE_QUERIES];
    for (u32 t = 0; t < TILE_QUERIES; t++) x[t] = args.queries + tile.pair(min(t, tile.count - 1)) * width;
    float *scores = tile.scores() - tile.from;
    for (u32 pair = 0; pair < GROUP; pair += 2) {
        u64 wanted = at + threadIdx.x % WARP / LANES + pair;
        const u8 *key = tile.row(args.key_pages, min((u32)wanted, tile.to - 1), args.key_row_stride);
        float sums[TILE_QUERIES] = {};
#pragma unroll 4
        for (u32 i = lane; i < body; i += LANES) {
            float number = Kind::widen(key, i);
            for (u32 t = 0; t < TILE_QUERIES; t++) sums[t] = add_rn(sums[t], mul_rn(number, x[t][i]));
        }
        for (u32 t = 0; t < TILE_QUERIES; t++) {
            float sum = sum_of_lanes(sums[t]);
            for (u32 i = body; i < width; i++) sum = add_rn(sum, mul_rn(Kind::widen(key, i), x[t][i]));
            bool mine = lane == 0 && wanted < tile.to && t < tile.count;
            if (mine) scores[t * (u64)args.score_stride + wanted] = mul_rn(sum, args.scale);
        }
    }
}

extern "C" __global__ void scores_f32(const u8 *tasks, u32 count, u32 first_tile) {
    scores_of<FloatRows<F32>>(tasks, count, first_tile);
}

extern "C" __global__ void scores_f16(const u8 *tasks, u32 count, u32 first_tile) {
    scores_of<FloatRows<F16>>(tasks, count, first_tile);
}

extern "C" __global__ void scores_q8_0(const u8 *tasks, u32 count, u32 first_tile) {
    scores_of<ByteRows>(tasks, count, first_tile);
}

// Replaces the scores of a position tile by e^(score - max). Returns the sum of these powers: eight interleaved sums, these added in
// order, then the tail. For all threads of a warp.
__device__ inline float powers_of(float *scores, u32 length, float max_score) {
    u32 lane = threadIdx.x % WARP, body = length / SUM_LANES * SUM_LANES;
    float sum = 0.0f, power = 0.0f;
#pragma unroll 4
    for (u32 from = 0; from < length; from += WARP) {
        u32 j = from + lane;
        if (j < length) scores[j] = power = exp_in_steps(sub_rn(scores[j], max_score));
        for (u32 chunk = 0; chunk < WARP; chunk += SUM_LANES) {
            float other = __shfl_sync(ALL, power, chunk + lane % SUM_LANES);
            if (from + chunk < body) sum = add_rn(sum, other);
        }
    }
    float all = 0.0f;
    for (u32 j = 0; j < SUM_LANES; j++) all = add_rn(all, __shfl_sync(ALL, sum, j));
    // The powers of the tail were computed last.
    for (u32 j = body; j < length; j++) all = add_rn(all, __shfl_sync(ALL, power, j % WARP));
    return all;
}

// The maximum of the scores of a query in a position tile, by which they are replaced by e^(score - maximum), and the sum of these.
struct TilePowers {
    float max_score;
    float sum;
};

// Computes the powers of a query from position `at` to `next` of one position tile. For all threads of a warp.
__device__ inline TilePowers powers_of_tile(float *scores, u32 at, u32 next) {
    float tile_max = minus_infinity();
#pragma unroll 8
    for (u32 j = at + threadIdx.x % WARP; j < next; j += WARP) tile_max = larger(tile_max, scores[j]);
    for (int step = WARP / 2; step > 0; step /= 2) tile_max = larger(tile_max, __shfl_xor_sync(ALL, tile_max, step));
    return {tile_max, powers_of(scores + at, next - at, tile_max)};
}

// The softmax of a query over the position tiles so far.
struct Softmax {
    float max_score;
    float sum;

    __device__ Softmax(const QueryTile &tile, u32 i)
        : max_score(tile.args.sinks ? tile.args.sinks[tile.head(i)] : minus_infinity()), sum(tile.args.sinks ? 1.0f : 0.0f) {}

    // Adds the next position tile. Returns the factors for the sums of values.
    __device__ TileFactors add(TilePowers tile) {
        float new_max = larger(max_score, tile.max_score);
        TileFactors factors = {exp_in_steps(sub_rn(max_score, new_max)), exp_in_steps(sub_rn(tile.max_score, new_max))};
        sum = add_rn(mul_rn(sum, factors.before), mul_rn(tile.sum, factors.now));
        max_score = new_max;
        return factors;
    }
};

// Replaces each score of query i of a tile by e^(score - maximum of its position tile), and adds the position tiles up in order. For all
// threads of a warp.
__device__ void softmax_of(const QueryTile &tile, u32 i) {
    const AttentionKernelArgs &args = tile.args;
    u32 lane = threadIdx.x % WARP;
    float *scores = tile.scores() + (u64)i * args.score_stride - tile.from;
    Softmax softmax(tile, i);
    for (u32 at = tile.start(i), next; at < tile.end(i); at = next) {
        next = min((at / TILE_POSITIONS + 1) * TILE_POSITIONS, tile.end(i));
        TileFactors factors = softmax.add(powers_of_tile(scores, at, next));
        if (lane == 0) tile.factors(i, at) = factors;
    }
    if (lane == 0) args.inverse_sums[(u64)tile.place * TILE_QUERIES + i] = div_rn(1.0f, softmax.sum);
}

// What the queries of a tile see.
struct Sight {
    const float *scores[TILE_QUERIES];
    u32 starts[TILE_QUERIES];
    u32 ends[TILE_QUERIES];
    // The positions that all see.
    u32 low;
    u32 high;

    __device__ Sight(const QueryTile &tile) : low(tile.from), high(tile.to) {
        for (u32 t = 0; t < TILE_QUERIES; t++) {
            // The last query stands in for missing ones.
            u32 i = min(t, tile.count - 1);
            scores[t] = tile.scores() + (u64)i * tile.args.score_stride - tile.from;
            starts[t] = tile.start(i);
            ends[t] = tile.end(i);
            low = low < starts[t] ? starts[t] : low;
            high = min(high, ends[t]);
        }
    }

    // Whether query t sees some of these positions.
    __device__ bool sees_some(u32 t, u32 from, u32 to) const { return starts[t] < to && from < ends[t]; }
};

// One column of the sums of the values of a position tile, weighted, for all queries of the tile; positions are added in order.
template <typename Kind>
__device__ void sums_of_positions(
    const QueryTile &tile, const Sight &sight, u32 column, u32 tile_start, float (&sums)[TILE_QUERIES]) {
    const AttentionKernelArgs &args = tile.args;
    u32 first = tile.from / PREFETCHED * PREFETCHED, end = min(tile_start + TILE_POSITIONS, tile.to);
    for (u32 at = first < tile_start ? tile_start : first; at < end; at += PREFETCHED) {
        float prefetched[PREFETCHED];
#pragma unroll
        for (u32 i = 0; i < PREFETCHED; i++) {
            u32 position = at + i < tile.from ? tile.from : min(at + i, tile.to - 1);
            const u8 *value = tile.row(args.value_pages, position, args.value_row_stride);
            prefetched[i] = Kind::widen(value, column);
        }
        if (sight.low <= at && at + PREFETCHED <= sight.high) { // Every query sees every position.
#pragma unroll
            for (u32 i = 0; i < PREFETCHED; i++) {
                for (u32 t = 0; t < TILE_QUERIES; t++) {
                    sums[t] = add_rn(sums[t], mul_rn(sight.scores[t][at + i], prefetched[i]));
                }
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < PREFETCHED; i++) {
                for (u32 t = 0; t < TILE_QUERIES; t++) {
                    bool sees = sight.starts[t] <= at + i && at + i < sight.ends[t];
                    if (sees) sums[t] = add_rn(sums[t], mul_rn(sight.scores[t][at + i], prefetched[i]));
                }
            }
        }
    }
}

// Writes a value of the result.
__device__ inline void write_value(const AttentionKernelArgs &args, u64 pair, u32 column, float value) {
    u64 at = pair * args.value_width + column;
    args.out[at] = value;
    if (args.blocks) quantise_block(value, args.blocks[at / BLOCK]);
}

// One column of the sum of the values, weighted by the softmax, for all queries of the tile; positions are added in order within a
// position tile, and then the position tiles.
template <typename Kind> __device__ void weighted_column(const QueryTile &tile, u32 column) {
    const AttentionKernelArgs &args = tile.args;
    Sight sight(tile);
    float totals[TILE_QUERIES] = {};
    for (u32 start = tile.from / TILE_POSITIONS * TILE_POSITIONS; start < tile.to; start += TILE_POSITIONS) {
        float sums[TILE_QUERIES] = {};
        sums_of_positions<Kind>(tile, sight, column, start, sums);
#pragma unroll
        for (u32 t = 0; t < TILE_QUERIES; t++) {
            if (!sight.sees_some(t, start, start + TILE_POSITIONS)) continue;
            TileFactors factors = tile.factors(min(t, tile.count - 1), start < tile.from ? tile.from : start);
            totals[t] = add_rn(mul_rn(totals[t], factors.before), mul_rn(sums[t], factors.now));
        }
    }
#pragma unroll
    for (u32 t = 0; t < TILE_QUERIES; t++) {
        float inverse_sum = args.inverse_sums[(u64)tile.place * TILE_QUERIES + min(t, tile.count - 1)];
        if (t >= tile.count) break;
        write_value(args, tile.pair(t), column, mul_rn(totals[t], inverse_sum));
    }
}

// Softmax and weighted sum of a tile, which is the grid's y and has one block. A warp has a query, then a thread has columns.
template <typename Kind> __device__ void weighted_sum_of(const u8 *tasks, u32 count, u32 first_tile) {
    QueryTile tile(tasks, count, first_tile);
    const AttentionKernelArgs &args = tile.args;
    if (threadIdx.x / WARP < tile.count) softmax_of(tile, threadIdx.x / WARP);
    __syncthreads();
    for (u32 column = threadIdx.x; column < args.value_width; column += blockDim.x) weighted_column<Kind>(tile, column);
}

// What weighted_sum_of computes, in two launches where few queries see many positions: first the powers and the sums of values of each
// position tile, whose number is the grid's x. The powers take the places of factors.
template <typename Kind> __device__ void partial_sums_of(const u8 *tasks, u32 count, u32 first_tile) {
    QueryTile tile(tasks, count, first_tile);
    const AttentionKernelArgs &args = tile.args;
    u32 i = threadIdx.x / WARP, start = (tile.from / TILE_POSITIONS + blockIdx.x) * TILE_POSITIONS, end = start + TILE_POSITIONS;
    if (start >= tile.to) return;
    if (i < tile.count && tile.start(i) < end && start < tile.end(i)) {
        u32 at = start < tile.start(i) ? tile.start(i) : start;
        float *scores = tile.scores() + (u64)i * args.score_stride - tile.from;
        TilePowers powers = powers_of_tile(scores, at, min(end, tile.end(i)));
        if (threadIdx.x % WARP == 0) tile.factors(i, at) = {powers.max_score, powers.sum};
    }
    __syncthreads();
    Sight sight(tile);
    for (u32 column = threadIdx.x; column < args.value_width; column += blockDim.x) {
        float sums[TILE_QUERIES] = {};
        sums_of_positions<Kind>(tile, sight, column, start, sums);
#pragma unroll
        for (u32 t = 0; t < TILE_QUERIES; t++) {
            if (t < tile.count) tile.partial(t, blockIdx.x)[column] = sums[t];
        }
    }
}

// Then the position tiles are added up in order. The grid's y is the tile, x its query.
extern "C" __global__ void add_partial_sums(const u8 *tasks, u32 count, u32 first_tile) {
    QueryTile tile(tasks, count, first_tile);
    const AttentionKernelArgs &args = tile.args;
    u32 i = blockIdx.x;
    if (i >= tile.count) return;
    for (u32 column = threadIdx.x; column < args.value_width; column += blockDim.x) {
        Softmax softmax(tile, i);
        float total = 0.0f;
        for (u32 at = tile.start(i); at < tile.end(i); at = (at / TILE_POSITIONS + 1) * TILE_POSITIONS) {
            TileFactors powers = tile.factors(i, at), factors = softmax.add({powers.before, powers.now});
            float sum = tile.partial(i, at / TILE_POSITIONS - tile.from / TILE_POSITIONS)[column];
            total = add_rn(mul_rn(total, factors.before), mul_rn(sum, factors.now));
        }
        write_value(args, tile.pair(i), column, mul_rn(total, div_rn(1.0f, softmax.sum)));
    }
}

extern "C" __global__ void __launch_bounds__(256) partial_sums_f32(const u8 *tasks, u32 count, u32 first_tile) {
    partial_sums_of<FloatRows<F32>>(tasks, count, first_tile);
}

extern "C" __global__ void __launch_bounds__(256) partial_sums_f16(const u8 *tasks, u32 count, u32 first_tile) {
    partial_sums_of<FloatRows<F16>>(tasks, count, first_tile);
}

extern "C" __global__ void __launch_bounds__(256) partial_sums_q8_0(const u8 *tasks, u32 count, u32 first_tile) {
    partial_sums_of<ByteRows>(tasks, count, first_tile);
}

extern "C" __global__ void __launch_bounds__(256) weighted_sum_f32(const u8 *tasks, u32 count, u32 first_tile) {
    weighted_sum_of<FloatRows<F32>>(tasks, count, first_tile);
}

extern "C" __global__ void __launch_bounds__(256) weighted_sum_f16(const u8 *tasks, u32 count, u32 first_tile) {
    weighted_sum_of<FloatRows<F16>>(tasks, count, first_tile);
}

extern "C" __global__ void __launch_bounds__(256) weighted_sum_q8_0(const u8 *tasks, u32 count, u32 first_tile) {
    weighted_sum_of<ByteRows>(tasks, count, first_tile);
}

// NaN stays NaN.
__device__ inline float clipped(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// A head of a new token: values in one row or in two parts, the first of which are normalised if there is a weight, by the mean of their
// squares, or of those of all heads of the token, and then clamped.
struct NewHead {
    const float *x;
    // The values from split on.
    const float *rest;
    const float *weight;
    u32 split;
    u32 norm_width;
    float scale;
    float limit;

    __device__ float value(u32 i) const { return i < split ? x[i] : rest[i - split]; }

    __device__ float at(u32 i) const {
        return clipped(weight && i < norm_width ? mul_rn(mul_rn(value(i), scale), weight[i]) : value(i), limit);
    }
};

// The heads of new tokens, with their norms and rotation.
struct NewHeadsArgs {
    // [queries, heads, split]; the results are the queries of the attention.
    const float *queries;
    // [queries, key heads, key_width]
    const float *keys;
    // [queries, key heads, value_width], or null: values are parts of keys
    const float *values;
    // [queries, heads, rest_step], of which the values from rest_first on are those of queries from split on; or null
    const float *rest;
    // [norm_width], or [heads, key_width] and [key heads, key_width] if whole; or null
    const float *query_weight;
    const float *key_weight;
    // [queries, dim / 2, 2]: cosines and sines
    const float *turns;
    // [queries], factors on queries behind the rotation; or null
    const float *scales;
    double eps;
    u32 split;
    u32 rest_step;
    u32 rest_first;
    u32 norm_width;
    // The first rotated value of a head, and the number of rotated values.
    u32 first;
    u32 dim;
    u32 interleaved;
    // Whether the norm is over all heads of a token.
    u32 whole;
    // Of the absolute values of queries, keys and values; or infinity
    float limit;
    // Whether the norm is over each head behind its rotation; then without a weight too.
    u32 norm_last;
    // On values.
    float value_factor;
    // Whether each head of the values has a norm without a weight.
    u32 value_norm;

    // A head whose values are in one row, of the `count` heads of a token.
    __device__ NewHead head(const float *token, u32 head, u32 count, const float *weights, u32 width) const {
        const float *x = token + (u64)head * width;
        if (norm_last) return {x, x, nullptr, width, norm_width, 1.0f, limit};
        NewHead own = {x, x, weights && whole ? weights + (u64)head * width : weights, width, whole ? width : norm_width, 1.0f, limit};
        const float *from = whole ? token : x;
        if (weights) own.scale = rms_scale([from](u32 i) { return from[i]; }, whole ? count * width : norm_width, eps);
        return own;
    }

    // A query whose last values are those of the rest. There is no norm for it.
    __device__ NewHead query_in_parts(u64 token_head, u32 width) const {
        const float *last = rest + token_head * rest_step + rest_first;
        return {queries + token_head * split, last, nullptr, split, width, 1.0f, limit};
    }
};
static_assert(sizeof(NewHeadsArgs) == 120, "must match the layout in Rust");
static_assert(sizeof(AttentionKernelArgs) + sizeof(NewHeadsArgs) == TASK_BYTES, "must match the layout in Rust");

// A head of which some values are rotated, pairwise: adjacent values, or those of two halves.
struct RotatedHead {
    const NewHead &head;
    const NewHeadsArgs &args;
    // [dim / 2, 2]
    const float *turns;

    __device__ float at(u32 i) const {
        if (i < args.first || i >= args.first + args.dim) return head.at(i);
        u32 place = i - args.first, half = args.dim / 2;
        u32 pair = args.interleaved ? place / 2 : place % half;
        bool is_second = args.interleaved ? place % 2 : place >= half;
        u32 one = args.first + (args.interleaved ? 2 * pair : pair), other = args.interleaved ? one + 1 : one + half;
        float a = head.at(one), b = head.at(other), cosine = turns[2 * pair], sine = turns[2 * pair + 1];
        return is_second ? add_rn(mul_rn(a, sine), mul_rn(b, cosine)) : sub_rn(mul_rn(a, cosine), mul_rn(b, sine));
    }
};

// Writes a head times a factor, and normalised if a norm is behind the rotation; its weight may be null.
template <typename Kind>
__device__ void write_rotated(const RotatedHead &head, const float *weight, u8 *out, u32 width, float factor) {
    bool is_normalised = head.args.norm_last;
    float scale = is_normalised ? rms_scale([&head](u32 i) { return head.at(i); }, width, head.args.eps) : 1.0f;
    for (u32 from = 0; from < width; from += WARP) {
        u32 i = from + threadIdx.x % WARP;
        float value = i < width ? head.at(i) : 0.0f;
        if (is_normalised) value = mul_rn(value, scale);
        if (is_normalised && weight && i < width) value = mul_rn(value, weight[i]);
        Kind::store(out, i, mul_rn(value, factor), i < width);
    }
}

// Normalises and rotates the queries and keys of new tokens, and writes keys and values to the page of the last position that each
// token sees. A warp has a head; the grid's y is the task.
template <typename Kind> __device__ void new_heads_of(const u8 *tasks) {
    const AttentionKernelArgs &args = task_at(tasks, blockIdx.y);
    const NewHeadsArgs &heads = *(const NewHeadsArgs *)(&args + 1);
    u32 kv_heads = args.heads / args.group, each = args.heads + 2 * kv_heads, index = group_of_warp();
    u32 token = index / each, head = index % each, lane = threadIdx.x % WARP, width = args.key_width;
    if (token >= args.count) return;
    const float *turns = heads.turns + (u64)token * heads.dim;
    if (head < args.heads) {
        u64 place = (u64)token * args.heads + head;
        u8 *out = (u8 *)(args.queries + place * width);
        NewHead query = heads.rest ? heads.query_in_parts(place, width)
                                   : heads.head(heads.queries + (u64)token * args.heads * width, head, args.heads, heads.query_weight, width);
        float factor = heads.scales ? heads.scales[token] : 1.0f;
        write_rotated<FloatRows<F32>>({query, heads, turns}, heads.query_weight, out, width, factor);
        return;
    }
    head -= args.heads;
    bool is_key = head < kv_heads;
    if (!is_key) head -= kv_heads;
    u32 position = args.seen[2 * token + 1] - 1, shift = args.page_shift, in_page = position & ((1u << shift) - 1);
    u64 row = ((u64)head << shift) + in_page, first = (u64)token * kv_heads;
    if (is_key) {
        NewHead key = heads.head(heads.keys + first * width, head, kv_heads, heads.key_weight, width);
        u8 *out = (u8 *)args.key_pages[position >> shift] + row * args.key_row_stride;
        write_rotated<Kind>({key, heads, turns}, heads.key_weight, out, width, 1.0f);
    } else if (heads.values) {
        const float *value = heads.values + (first + head) * args.value_width;
        u8 *out = (u8 *)args.value_pages[position >> shift] + row * args.value_row_stride;
        auto at = [value, &heads](u32 i) { return clipped(value[i], heads.limit); };
        float scale = heads.value_norm ? rms_scale(at, args.value_width, heads.eps) : 1.0f;
        for (u32 from = 0; from < args.value_width; from += WARP) {
            u32 i = from + lane;
            float own = i < args.value_width ? scaled(mul_rn(at(i), scale), heads.value_factor) : 0.0f;
            Kind::store(out, i, own, i < args.value_width);
        }
    }
}

extern "C" __global__ void new_heads_f32(const u8 *tasks) {
    new_heads_of<FloatRows<F32>>(tasks);
}

extern "C" __global__ void new_heads_f16(const u8 *tasks) {
    new_heads_of<FloatRows<F16>>(tasks);
}

extern "C" __global__ void new_heads_q8_0(const u8 *tasks) {
    new_heads_of<ByteRows>(tasks);
}

// Copies rows of `row` units of two bytes, count per head; the grid's y is the head. Strides are in these units.
extern "C" __global__ void copy_rows(
    const u16 *from, u16 *to, u64 from_head, u64 from_row, u64 to_head, u32 row, u32 count) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, at = i / row, half = i % row;
    if (at < count) to[blockIdx.y * to_head + at * row + half] = from[blockIdx.y * from_head + at * from_row + half];
}
