// The best logits of rows: what the choice of a token reads of them. And a draw among them.
#include "common.cuh"

// The most slices of a row, in each of which the best value is found first.
constexpr u32 SLICES = 1024;
// Warps that collect the best values of a row.
constexpr u32 COLLECTORS = 8;

// The place of a logit in their order, in which infinity and NaN are the last, and both zeros are equal.
__device__ inline u32 rank_of_logit(float logit) {
    return logit <= 3.402823466e38f ? place_in_order(add_rn(logit, 0.0f)) : ~0u;
}

// Takes values out of each row, at places that differ: out [rows, count]. A place behind the row is none.
extern "C" __global__ void take_out(float *x, const u32 *places, float *out, u32 rows, u32 width, u32 count) {
    u32 i = index_of_thread();
    if (i >= rows * count || places[i % count] >= width) return;
    float &value = x[(u64)(i / count) * width + places[i % count]];
    out[i] = value;
    value = minus_infinity();
}

// How the logit of a token changes.
struct ChangedLogit {
    u32 id;
    float bias;
    // Whether it occurs in the text, and how often in the answer.
    u32 in_text;
    u32 in_answer;
};
static_assert(sizeof(ChangedLogit) == 16, "must match the layout in Rust");

// Penalties on tokens that occurred.
struct Penalties {
    float repetition;
    float frequency;
    float presence;

    // As if the token occurred once more in the text and in the answer.
    __device__ ChangedLogit once_more(ChangedLogit token) const {
        token.in_text |= repetition != 1.0f;
        token.in_answer += frequency != 0.0f || presence != 0.0f;
        return token;
    }

    // With the bits of the CPU.
    __device__ float changed(const ChangedLogit &token, float logit) const {
        if (token.bias != 0.0f) logit = add_rn(logit, token.bias);
        if (token.in_text > 0) logit = logit < 0.0f ? mul_rn(logit, repetition) : div_rn(logit, repetition);
        for (u32 before = 0; before < token.in_answer; before++) logit = sub_rn(logit, before == 0 ? add_rn(frequency, presence) : frequency);
        return logit;
    }
};

// Changes the logits of `count` tokens of one row, and that of the token that was drawn last, unless `drawn` is null. Out, of `count` + 2
// words, are these logits as they were; the last two are that of the token that was drawn last, and its id, if no list has it and it changes,
// else all bits are set. The last block looks for that token in the list, the others have an item per thread. An id behind the row is none.
extern "C" __global__ void change_logits(
    float *x, const ChangedLogit *tokens, const u32 *drawn, float *out, u32 width, u32 count, float repetition, float frequency,
    float presence) {
    __shared__ u32 listed;
    Penalties penalties = {repetition, frequency, presence};
    u32 last = drawn ? *drawn : ~0u, i = index_of_thread();
    if (blockIdx.x + 1 < gridDim.x) {
        if (i >= count) return;
        ChangedLogit token = tokens[i];
        bool exists = token.id < width;
        float logit = exists ? x[token.id] : 0.0f;
        out[i] = logit;
        if (token.id == last) token = penalties.once_more(token);
        if (exists) x[token.id] = penalties.changed(token, logit);
        return;
    }
    if (threadIdx.x == 0) listed = last >= width;
    __syncthreads();
    for (i = threadIdx.x; i < count; i += blockDim.x) {
        if (tokens[i].id == last) listed = 1;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    ChangedLogit token = penalties.once_more({last, 0.0f, 0, 0});
    bool is_new = !listed && (token.in_text > 0 || token.in_answer > 0);
    out[count] = is_new ? x[last] : 0.0f;
    out[count + 1] = __uint_as_float(is_new ? last : ~0u);
    if (is_new) x[last] = penalties.changed(token, x[last]);
}

// The highest rank of each slice, of `each` values: maxima [rows, slices]. Clears the number that each row of `found`, of `step` words,
// begins with. A warp has a slice.
extern "C" __global__ void best_of_slices(
    const float *x, u32 *maxima, u32 *found, u32 rows, u32 width, u32 slices, u32 each, u32 step) {
    u32 row = group_of_warp() / slices, slice = group_of_warp() % slices, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    u32 from = slice * each, best = 0;
    u32 end = from + each < width ? from + each : width;
    const float *own = x + (u64)row * width;
#pragma unroll 4
    for (u32 i = from + lane; i < end; i += WARP) {
        u32 rank = rank_of_logit(own[i]);
        best = rank > best ? rank : best;
    }
    for (int by = WARP / 2; by > 0; by /= 2) {
        u32 other = __shfl_xor_sync(ALL, best, by);
        best = other > best ? other : best;
    }
    if (lane != 0) return;
    maxima[row * slices + slice] = best;
    if (slice == 0) found[(u64)row * step] = 0;
}

// The highest rank that at least `best` of these maxima have. For all threads of a warp.
__device__ inline u32 least_rank(const u32 *maxima, u32 slices, u32 best) {
    u32 own[SLICES / WARP], least = 0;
#pragma unroll
    for (u32 i = 0; i < SLICES / WARP; i++) {
        u32 slice = i * WARP + threadIdx.x % WARP;
        own[i] = slice < slices ? maxima[slice] : 0;
    }
    for (u32 bit = 1u << 31; bit > 0; bit /= 2) {
        u32 tried = least | bit, count = 0;
#pragma unroll
        for (u32 i = 0; i < SLICES / WARP; i++) count += own[i] >= tried;
        for (int by = WARP / 2; by > 0; by /= 2) count += __shfl_xor_sync(ALL, count, by);
        if (count >= best) least = tried;
    }
    return least;
}

// Collects the values of each row that are among the `best` or may be: each of as many slices has one that is not lower than the lowest of
// them. A row of `found` is their number, and for each of the first `most` its place in the row and its value.
extern "C" __global__ void collect_best(
    const float *x, const u32 *maxima, u32 *found, u32 rows, u32 width, u32 slices, u32 each, u32 best,
    u32 most) {
    u32 row = group_of_warp() / COLLECTORS, first = group_of_warp() % COLLECTORS, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    maxima += row * slices;
    found += (u64)row * (1 + 2 * most);
    const float *own = x + (u64)row * width;
    u32 least = least_rank(maxima, slices, best);
    for (u32 slice = first; slice < slices; slice += COLLECTORS) {
        if (maxima[slice] < least) continue;
        u32 from = slice * each, end = from + each < width ? from + each : width;
        for (u32 i = from + lane; i < end; i += WARP) {
            float value = own[i];
            if (rank_of_logit(value) < least) continue;
            u32 place = atomicAdd(found, 1u);
            if (place >= most) continue;
            found[1 + 2 * place] = i;
            found[2 + 2 * place] = __float_as_uint(value);
        }
    }
}

// What a token is drawn by.
struct DrawKernelArgs {
    // From 0 to below 1.
    double unit;
    // 0: the best.
    float temperature;
    float top_p;
    float min_p;
    u32 top_k;
};
static_assert(sizeof(DrawKernelArgs) == 24, "must match the layout in Rust");

// The most logits of a draw: a thread has one.
constexpr u32 DRAWN_AMONG = 128;

// e^((logit - best) / temperature)
__device__ inline double weight_of_logit(float logit, float best, float temperature) {
    return exp(((double)logit - (double)best) / (double)temperature);
}

// The sum of the weights of each slice of a row, of `each` logits. A warp has a slice.
extern "C" __global__ void weigh_slices(
    const float *x, const u32 *found, const DrawKernelArgs *draw, double *sums, u32 width, u32 slices, u32 each, u32 most) {
    u32 slice = group_of_warp(), lane = threadIdx.x % WARP;
    if (slice >= slices) return;
    float best = minus_infinity();
    for (u32 i = lane; i < min(found[0], most); i += WARP) best = larger(best, __uint_as_float(found[2 + 2 * i]));
    for (int by = WARP / 2; by > 0; by /= 2) best = larger(best, __shfl_xor_sync(ALL, best, by));
    double sum = 0.0;
    u32 from = slice * each, end = from + each < width ? from + each : width;
    for (u32 i = from + lane; i < end; i += WARP) sum += weight_of_logit(x[i], best, draw->temperature);
    for (int by = WARP / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL, sum, by);
    if (lane == 0) sums[slice] = sum;
}

// The best logits of a row with their weights, in falling order: what a token is drawn from.
struct Candidates {
    const u32 *ids;
    const double *weights;
    u32 count;

    __device__ double sum() const {
        double sum = 0.0;
        for (u32 i = 0; i < count; i++) sum += weights[i];
        return sum;
    }

    // Keeps the first that do not have `enough` weight before them.
    __device__ void keep_weight(double enough) {
        double before = 0.0;
        u32 kept = 0;
        while (kept < count && before < enough) before += weights[kept++];
        count = kept;
    }

    __device__ void keep_heavy(double least) {
        while (count > 0 && weights[count - 1] < least) count--;
    }

    // The one that a draw meets.
    __device__ u32 drawn(double unit) const {
        u32 last = 0;
        double left = unit * sum();
        for (u32 i = 0; i < count; i++) {
            if (weights[i] > 0.0) last = i;
            left -= weights[i];
            if (left < 0.0) break;
        }
        return ids[last];
    }

    // As drawn, in the order of ids.
    __device__ u32 drawn_by_id(double unit) const {
        double left = unit * sum();
        u32 place = 0;
        for (u32 n = 0; n < count; n++) {
            u32 next = count;
            for (u32 i = 0; i < count; i++) {
                bool is_behind = n == 0 || ids[i] > ids[place];
                if (is_behind && (next == count || ids[i] < ids[next])) next = i;
            }
            place = next;
            left -= weights[place];
            if (left < 0.0) break;
        }
        return ids[place];
    }
};

// A row of which all may be drawn, and the sums of the weights of its slices.
struct WholeRow {
    const float *x;
    const double *sums;
    u32 width;
    u32 slices;
    u32 each;

    // The sum of the share of slices of a thread.
    __device__ double share(u32 thread) const {
        u32 count = (slices + DRAWN_AMONG - 1) / DRAWN_AMONG, end = min((thread + 1) * count, slices);
        double sum = 0.0;
        for (u32 slice = thread * count; slice < end; slice++) sum += sums[slice];
        return sum;
    }

    // The slice that a draw meets, and what is left of it there: `shares` are those of all threads.
    __device__ u32 slice(const double *shares, double &left) const {
        u32 thread = 0, count = (slices + DRAWN_AMONG - 1) / DRAWN_AMONG;
        while (thread + 1 < DRAWN_AMONG && (thread + 1) * count < slices && left - shares[thread] >= 0.0) left -= shares[thread++];
        u32 slice = thread * count;
        while (slice + 1 < slices && left - sums[slice] >= 0.0) left -= sums[slice++];
        return slice;
    }
};

// Draws a token as a sampler does, among the best logits of a row or, if there is the row `x` itself, from all of it: out is its id, then
// `found`, a row that collect_best has written, of 1 + 2 * `most` words, then `count_changed` words that change_logits has written. `last` gets
// the id too. One block of DRAWN_AMONG threads, and at most one less are in the row.
extern "C" __global__ void draw_token(
    const u32 *found, const DrawKernelArgs *draw, u32 *out, u32 *last_drawn, u32 most, const u32 *changed, u32 count_changed, const float *x,
    const double *sums, u32 width, u32 slices, u32 each) {
    __shared__ u32 ids[DRAWN_AMONG];
    __shared__ float logits[DRAWN_AMONG];
    __shared__ double weights[DRAWN_AMONG];
    __shared__ double shares[DRAWN_AMONG];
    __shared__ double left;
    __shared__ u32 slice;
    u32 own = threadIdx.x, words = 1 + 2 * most, count = min(found[0], most);
    for (u32 i = own; i < words; i += DRAWN_AMONG) out[1 + i] = found[i];
    for (u32 i = own; i < count_changed; i += DRAWN_AMONG) out[1 + words + i] = changed[i];
    const DrawKernelArgs by = *draw;
    WholeRow all = {x, sums, width, slices, each};
    bool is_greedy = by.temperature == 0.0f, from_all = x && !is_greedy && count > 0;
    // Every token may be drawn.
    bool from_any = from_all && by.top_p == 1.0f && by.min_p == 0.0f;
    // Equal logits are in the order of ids. Both zeros are equal where the best is taken.
    auto order = [&](u32 i) {
        float logit = __uint_as_float(found[2 + 2 * i]);
        return (u64)place_in_order(is_greedy ? add_rn(logit, 0.0f) : logit) << 32 | ~found[1 + 2 * i];
    };
    if (own < count) {
        u32 rank = 0;
        for (u32 i = 0; i < count; i++) rank += order(i) > order(own);
        ids[rank] = found[1 + 2 * own];
        logits[rank] = __uint_as_float(found[2 + 2 * own]);
    }
    shares[own] = from_all ? all.share(own) : 0.0;
    __syncthreads();
    if (own < count) weights[own] = weight_of_logit(logits[own], logits[0], by.temperature);
    __syncthreads();
    if (own == 0) {
        double sum = 0.0;
        for (u32 i = 0; i < DRAWN_AMONG; i++) sum += shares[i];
        // Those that are equal to the last of the best k are kept.
        u32 kept = count;
        if (!x && !is_greedy && by.top_k < count) {
            kept = by.top_k;
            while (kept < count && logits[kept] >= logits[by.top_k - 1]) kept++;
        }
        Candidates best = {ids, weights, kept};
        if (by.top_p != 1.0f) best.keep_weight((double)by.top_p * (from_all ? sum : best.sum()));
        if (by.min_p > 0.0f) best.keep_heavy((double)by.min_p);
        bool in_order_of_ids = from_all && by.top_p == 1.0f;
        u32 token = 0;
        if (count > 0 && is_greedy) token = ids[0];
        else if (count > 0 && !from_any) token = in_order_of_ids ? best.drawn_by_id(by.unit) : best.drawn(by.unit);
        out[0] = *last_drawn = token;
        left = by.unit * sum;
        slice = from_all ? all.slice(shares, left) : 0;
    }
    if (!from_any) return;
    // Those of one slice are left.
    __syncthreads();
    u32 first = slice * each, end = min(first + each, width), last = ids[0];
    for (u32 from = first; from < end; from += DRAWN_AMONG) {
        weights[own] = from + own < end ? weight_of_logit(x[from + own], logits[0], by.temperature) : 0.0;
        __syncthreads();
        for (u32 i = 0; own == 0 && left >= 0.0 && i < DRAWN_AMONG && from + i < end; i++) {
            if (weights[i] > 0.0) last = from + i;
            left -= weights[i];
        }
        __syncthreads();
    }
    if (own == 0) out[0] = *last_drawn = last;
}
