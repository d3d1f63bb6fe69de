// The choice of the rows that queries of sparse attention attend to: the scores of an indexer, and the highest of them.
#include "attention.cuh"

// Heads of a query that are multiplied by a key at once.
constexpr u32 INDEX_HEADS = 4;
// The most warps of a block that chooses.
constexpr u32 CHOOSING_WARPS = 32;
// Values of a digit, by which scores are sorted.
constexpr u32 DIGITS = 256;

// The queries of an indexer for tokens of one sequence, and the rows among which they choose.
struct IndexTask {
    // [tokens, heads, width]
    const float *queries;
    // [tokens, heads]: factors on what the heads find; or null
    const float *weights;
    // The pages [positions per page, components as stored], of which page i has the rows from i << page_shift on.
    const u8 *const *pages;
    // [tokens, 2]: how many rows a token chooses from, the first ones; and how many positions it sees.
    const u32 *seen;
    // Number of its first token in the step.
    u32 first;
    u32 row_stride;
};
static_assert(sizeof(IndexTask) == 40, "must match the layout in Rust");

// A token of a step, and its task.
struct IndexToken {
    const IndexTask *task;
    // Within the task.
    u32 number;
    u32 rows;
    u32 positions;

    __device__ IndexToken(const IndexTask *tasks, u32 count, u32 token) : task(tasks) {
        while (count > 1 && task[1].first <= token) task++, count--;
        number = token - task->first;
        rows = task->seen[2 * number];
        positions = task->seen[2 * number + 1];
    }
};

// The scores of each row for some tokens from `first` on, [tokens, stride]: the sum over heads of weight * (query * row) * scale, where products
// below 0 count as 0 if they are rectified. A warp has eight rows, two at a time; the grid's y is the token.
template <typename Kind>
__device__ void index_scores_of(
    const IndexTask *tasks, u32 count, u32 first, float *scores, u32 stride, u32 heads, u32 width, u32 page_shift, float scale,
    u32 rectified) {
    IndexToken token(tasks, count, first + blockIdx.y);
    u64 at = (u64)group_of_warp() * GROUP;
    if (at >= token.rows) return;
    const float *queries = token.task->queries + (u64)token.number * heads * width;
    const float *weights = token.task->weights ? token.task->weights + (u64)token.number * heads : nullptr;
    for (u32 pair = 0; pair < GROUP; pair += 2) {
        u64 wanted = at + threadIdx.x % WARP / LANES + pair;
        u32 row = min((u32)wanted, token.rows - 1), in_page = row & ((1u << page_shift) - 1);
        const u8 *key = token.task->pages[row >> page_shift] + (u64)in_page * token.task->row_stride;
        float score = 0.0f;
        for (u32 head = 0; head < heads; head += INDEX_HEADS) {
            float sums[INDEX_HEADS];
            const float *x[INDEX_HEADS];
            // The last head stands in for missing ones.
            for (u32 h = 0; h < INDEX_HEADS; h++) x[h] = queries + (u64)min(head + h, heads - 1) * width;
            products_of_row<Kind>(key, x, width, sums);
            for (u32 h = 0; h < INDEX_HEADS; h++) {
                float product = mul_rn(sums[h], scale);
                if (rectified && !(product > 0.0f)) product = 0.0f;
                if (head + h < heads) score = add_rn(score, weights ? mul_rn(weights[head + h], product) : product);
            }
        }
        if (threadIdx.x % LANES == 0 && wanted < token.rows) scores[(u64)blockIdx.y * stride + wanted] = score;
    }
}

extern "C" __global__ void index_scores_f32(
    const IndexTask *tasks, u32 count, u32 first, float *scores, u32 stride, u32 heads, u32 width, u32 page_shift, float scale,
    u32 rectified) {
    index_scores_of<FloatRows<F32>>(tasks, count, first, scores, stride, heads, width, page_shift, scale, rectified);
}

extern "C" __global__ void index_scores_f16(
    const IndexTask *tasks, u32 count, u32 first, float *scores, u32 stride, u32 heads, u32 width, u32 page_shift, float scale,
    u32 rectified) {
    index_scores_of<FloatRows<F16>>(tasks, count, first, scores, stride, heads, width, page_shift, scale, rectified);
}

extern "C" __global__ void index_scores_q8_0(
    const IndexTask *tasks, u32 count, u32 first, float *scores, u32 stride, u32 heads, u32 width, u32 page_shift, float scale,
    u32 rectified) {
    index_scores_of<ByteRows>(tasks, count, first, scores, stride, heads, width, page_shift, scale, rectified);
}

// Writes the positions of a chosen row, the number of which among the chosen ones is `rank`: a block of positions, if rows stand for blocks.
__device__ inline void write_positions(u32 *list, u32 rank, u32 row, u32 block, u32 positions) {
    for (u32 i = 0; i < block && row * block + i < positions; i++) list[rank * block + i] = row * block + i;
}

// Finds the digit of the score that is wanted, from the highest digit on: known_and_left gets it, and how many scores with it are wanted. For
// all threads of a warp.
__device__ inline void find_digit(const u32 *digits, u32 *known_and_left, u32 shift) {
    constexpr u32 EACH = DIGITS / WARP;
    u32 lane = threadIdx.x % WARP, left = known_and_left[1], own = 0, before = 0;
    for (u32 i = 0; i < EACH; i++) own += digits[DIGITS - 1 - lane * EACH - i];
    for (u32 other = 0; other < WARP; other++) {
        u32 count = __shfl_sync(ALL, own, other);
        if (other < lane) before += count;
    }
    __syncwarp();
    if (before >= left || before + own < left) return;
    u32 digit = DIGITS - 1 - lane * EACH;
    for (; before + digits[digit] < left; digit--) before += digits[digit];
    known_and_left[0] |= digit << shift;
    known_and_left[1] = left - before;
}

// Scores in order. NaN, whose sign differs between processors, counts as minus infinity.
__device__ inline u32 place_of_score(float score) { return place_in_order(score == score ? score : minus_infinity()); }

// The place in order of the `wanted`-th highest score, and in `equal` how many scores with this place are among those. For all threads of a
// block, which gets `digits` of its own.
__device__ u32 place_of_highest(const float *scores, u32 rows, u32 wanted, u32 *digits, u32 *known_and_left, u32 &equal) {
    if (threadIdx.x == 0) known_and_left[0] = 0, known_and_left[1] = wanted;
    for (u32 shift = 32 - 8, mask = 0;; shift -= 8) {
        for (u32 i = threadIdx.x; i < DIGITS; i += blockDim.x) digits[i] = 0;
        __syncthreads();
        u32 known = known_and_left[0];
#pragma unroll 4
        for (u32 i = threadIdx.x; i < rows; i += blockDim.x) {
            u32 place = place_of_score(scores[i]);
            if ((place & mask) == known) atomicAdd(&digits[place >> shift & (DIGITS - 1)], 1u);
        }
        __syncthreads();
        if (threadIdx.x < WARP) find_digit(digits, known_and_left, shift);
        __syncthreads();
        mask |= (DIGITS - 1) << shift;
        if (shift == 0) break;
    }
    equal = known_and_left[1];
    return known_and_left[0];
}

// The highest score of each block of `block` rows, [lists, best_stride], which is infinite for the last `local` blocks. A warp has a block; the
// grid's y is the list.
extern "C" __global__ void best_of_blocks(
    const IndexTask *tasks, u32 count, u32 first, const float *scores, u32 stride, float *best, u32 best_stride, u32 block, u32 local) {
    IndexToken token(tasks, count, first + blockIdx.y);
    u32 number = group_of_warp(), blocks = (token.rows + block - 1) / block;
    if (number >= blocks) return;
    scores += (u64)blockIdx.y * stride;
    float highest = minus_infinity();
    u32 end = min((number + 1) * block, token.rows);
    // Comparisons with NaN are false.
    for (u32 i = number * block + threadIdx.x % WARP; i < end; i += WARP) highest = scores[i] > highest ? scores[i] : highest;
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(ALL, highest, step);
        highest = other > highest ? other : highest;
    }
    if (number + local >= blocks) highest = -minus_infinity();
    if (threadIdx.x % WARP == 0) best[(u64)blockIdx.y * best_stride + number] = highest;
}

// Writes the positions of the `wanted` highest scores of each list, ascending, to the list [list_stride]; of equal scores the earlier is
// taken. A score is of rows_each rows, which stand for `block` positions in all; positions behind the last score are chosen too. A token
// with fewer scores has all its positions. A block of threads has a list, the grid's x.
extern "C" __global__ void __launch_bounds__(1024) choose_rows(
    const IndexTask *tasks, u32 count, u32 first, const float *scores, u32 stride, u32 *lists, u32 list_stride, u32 wanted, u32 block,
    u32 rows_each) {
    __shared__ u32 digits[DIGITS];
    __shared__ u32 known_and_left[2];
    __shared__ u32 higher_of_warp[CHOOSING_WARPS], equal_of_warp[CHOOSING_WARPS];
    IndexToken token(tasks, count, first + blockIdx.x);
    u32 *list = lists + (u64)(first + blockIdx.x) * list_stride;
    u32 rows = (token.rows + rows_each - 1) / rows_each;
    if (rows <= wanted) {
        for (u32 i = threadIdx.x; i < token.positions; i += blockDim.x) list[i] = i;
        return;
    }
    scores += (u64)blockIdx.x * stride;
    u32 most_equal, least = place_of_highest(scores, rows, wanted, digits, known_and_left, most_equal);
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, below = (1u << lane) - 1;
    u32 higher = 0, equal = 0; // of the scores so far
    for (u32 from = 0; from < rows; from += blockDim.x) {
        u32 i = from + threadIdx.x;
        u32 place = i < rows ? place_of_score(scores[i]) : 0;
        bool is_higher = i < rows && place > least, is_equal = i < rows && place == least;
        u32 of_higher = __ballot_sync(ALL, is_higher), of_equal = __ballot_sync(ALL, is_equal);
        if (lane == 0) higher_of_warp[warp] = __popc(of_higher), equal_of_warp[warp] = __popc(of_equal);
        __syncthreads();
        u32 higher_before = higher + __popc(of_higher & below), equal_before = equal + __popc(of_equal & below);
        for (u32 other = 0; other < blockDim.x / WARP; other++) {
            if (other < warp) higher_before += higher_of_warp[other], equal_before += equal_of_warp[other];
            higher += higher_of_warp[other];
            equal += equal_of_warp[other];
        }
        if (is_higher || (is_equal && equal_before < most_equal)) {
            write_positions(list, higher_before + min(equal_before, most_equal), i, block, token.positions);
        }
        __syncthreads();
    }
    u32 rest = rows * block;
    for (u32 i = rest + threadIdx.x; i < token.positions; i += blockDim.x) list[wanted * block + i - rest] = i;
}

// Rows of one sequence that are pooled to blocks.
struct PoolTask {
    // The pages [positions per page, components as stored], of which page i has the rows from i << page_shift on.
    const u8 *const *pages;
    u32 row_stride;
    // Number of the first block, and of its result.
    u32 first_block;
    u32 first_out;
};
static_assert(sizeof(PoolTask) == 24, "must match the layout in Rust");

// The mean of the rows of a block, each channel by itself; or with places [rate, channels], where rows are values and then logits, their sum
// weighted by the softmax of the logits plus those of their places. Rows have as many channels as the result; or where blocks overlap, twice as
// many: then the rows of the block before take part with the first half, and those of the block with the second.
template <typename Kind>
__device__ void pool_blocks_of(
    const PoolTask *tasks, u32 count, const float *places, float *out, u32 blocks, u32 width, u32 rate, u32 page_shift, u32 overlap) {
    u32 at = index_of_thread(), number = at / width, channel = at % width;
    if (number >= blocks) return;
    const PoolTask *task = tasks;
    while (count > 1 && task[1].first_out <= number) task++, count--;
    u32 block = task->first_block + number - task->first_out, before = overlap && block > 0 ? rate : 0;
    u32 first = block * rate - before, rows = rate + before, channels = overlap ? 2 * width : width;
    auto row = [=](u32 i) {
        u32 position = first + i, in_page = position & ((1u << page_shift) - 1);
        return task->pages[position >> page_shift] + (u64)in_page * task->row_stride;
    };
    if (!places) {
        float sum = 0.0f;
        for (u32 i = 0; i < rows; i++) sum = add_rn(sum, Kind::widen(row(i), channel));
        out[at] = div_rn(sum, (float)rate);
        return;
    }
    auto column = [=](u32 i) { return overlap && i >= before ? width + channel : channel; };
    auto logit = [=](u32 i) {
        return add_rn(Kind::widen(row(i), channels + column(i)), places[i % rate * channels + column(i)]);
    };
    float most = minus_infinity(), sum = 0.0f, mean = 0.0f;
    for (u32 i = 0; i < rows; i++) most = larger(most, logit(i));
    for (u32 i = 0; i < rows; i++) sum = add_rn(sum, exp_in_steps(sub_rn(logit(i), most)));
    for (u32 i = 0; i < rows; i++) {
        float weight = div_rn(exp_in_steps(sub_rn(logit(i), most)), sum);
        mean = add_rn(mean, mul_rn(Kind::widen(row(i), column(i)), weight));
    }
    out[at] = mean;
}

extern "C" __global__ void pool_blocks_f32(
    const PoolTask *tasks, u32 count, const float *places, float *out, u32 blocks, u32 width, u32 rate, u32 page_shift, u32 overlap) {
    pool_blocks_of<FloatRows<F32>>(tasks, count, places, out, blocks, width, rate, page_shift, overlap);
}

extern "C" __global__ void pool_blocks_f16(
    const PoolTask *tasks, u32 count, const float *places, float *out, u32 blocks, u32 width, u32 rate, u32 page_shift, u32 overlap) {
    pool_blocks_of<FloatRows<F16>>(tasks, count, places, out, blocks, width, rate, page_shift, overlap);
}

extern "C" __global__ void pool_blocks_q8_0(
    const PoolTask *tasks, u32 count, const float *places, float *out, u32 blocks, u32 width, u32 rate, u32 page_shift, u32 overlap) {
    pool_blocks_of<ByteRows>(tasks, count, places, out, blocks, width, rate, page_shift, overlap);
}
