// Softmax attention over the KV cache, in two launches: scores, then softmax and weighted sum; or in three where few queries see many positions.
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

    // The row of the tile's key head with this number of those that the task sees: of one that sees all up to a position, their position.
    __device__ const u8 *row(const u8 *const *pages, u32 number, u32 stride) const {
        u32 position = number + args.behind;
        if (number < args.listed) position = args.chosen ? args.chosen[number] : number;
        u32 shift = args.page_shift, in_page = position & ((1u << shift) - 1);
        return pages[position >> shift] + (((u64)(args.first_kv_head + kv_head) << shift) + in_page) * stride;
    }

    // The bias of the score of query i with the key at a position.
    __device__ float bias(u32 i, u32 position) const {
        u32 width = 2 * args.reach + 1, at = args.first_query + query(i), key = position + args.reach;
        return args.bias[(u64)head(i) * width + (key > at ? min(key - at, width - 1) : 0)];
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

// The scores of each query with each key, summed in the order of a product. A warp has eight keys, two at a time; the
// grid's y is the tile.
template <typename Kind> __device__ void scores_of(const u8 *tasks, u32 count, u32 first_tile) {
    QueryTile tile(tasks, count, first_tile);
    const AttentionKernelArgs &args = tile.args;
    u32 width = args.key_width;
    u64 at = tile.from + (u64)group_of_warp() * GROUP;
    if (at >= tile.to) return;
    const float *x[TILE_QUERIES];
    for (u32 t = 0; t < TILE_QUERIES; t++) x[t] = args.queries + tile.pair(min(t, tile.count - 1)) * width;
    float *scores = tile.scores() - tile.from;
    for (u32 pair = 0; pair < GROUP; pair += 2) {
        u64 wanted = at + threadIdx.x % WARP / LANES + pair;
        const u8 *key = tile.row(args.key_pages, min((u32)wanted, tile.to - 1), args.key_row_stride);
        float sums[TILE_QUERIES];
        products_of_row<Kind>(key, x, width, sums);
        for (u32 t = 0; t < TILE_QUERIES; t++) {
            bool mine = threadIdx.x % LANES == 0 && wanted < tile.to && t < tile.count;
            if (mine) scores[t * (u64)args.score_stride + wanted] = mul_rn(sums[t], args.scale);
        }
    }
}

// Adds the bias to the scores of each query. A thread has a position; the grid's y is the tile.
extern "C" __global__ void add_bias(const u8 *tasks, u32 count, u32 first_tile) {
    QueryTile tile(tasks, count, first_tile);
    u64 at = (u64)tile.from + index_of_thread();
    if (at >= tile.to || !tile.args.bias) return;
    for (u32 t = 0; t < tile.count; t++) {
        float &score = tile.scores()[t * (u64)tile.args.score_stride + at - tile.from];
        score = add_rn(score, tile.bias(t, (u32)at));
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

// The positions that the queries of a tile see, and their scores.
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
                for (u32 t = 0; t < TILE_QUERIES; t++) sums[t] = fma_rn(sight.scores[t][at + i], prefetched[i], sums[t]);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < PREFETCHED; i++) {
                for (u32 t = 0; t < TILE_QUERIES; t++) {
                    bool sees = sight.starts[t] <= at + i && at + i < sight.ends[t];
                    if (sees) sums[t] = fma_rn(sight.scores[t][at + i], prefetched[i], sums[t]);
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

// The weighted sums of weighted_sum_of in two launches where few queries see many positions: first the powers and the sums of values of each
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
