// Softmax attention of a few queries over remembered rows, in three launches with scores between them; and what brings
// rows to their places.
#include "common.cuh"

// Queries that look at one head of keys: keys and values are read once for so many of them.
constexpr u32 FEW = 4;
// Scores whose sums are interleaved.
constexpr u32 SUMS = 8;
// Values that a thread asks for before it needs the first.
constexpr u32 AHEAD = 32;

// Who looks at what.
struct Look {
    // [queries, heads, key_width]
    const float *queries;
    // [key heads, positions, numbers as they are stored], of which the first key_width or value_width count
    const u8 *keys;
    const u8 *values;
    // Bytes from one head's first row to the next head's.
    u64 key_head;
    u64 value_head;
    // [queries, 2]: the first position that is seen, and the one behind the last.
    const u32 *seen;
    // [heads], or null
    const float *sinks;
    // [few · FEW, stride]: of each launch's queries, from the first position on that any of their few sees.
    float *scores;
    // [few · FEW]: what makes them sum to one.
    float *shares;
    // [queries, heads, value_width]
    float *out;
    u32 count;
    u32 heads;
    // Query heads that look at one head of keys.
    u32 group;
    // Bytes from one row to the next.
    u32 key_row;
    u32 value_row;
    u32 key_width;
    u32 value_width;
    u32 stride;
    float scale;
    u32 unused;
};
static_assert(sizeof(Look) == 120, "as on the other side");

// At most FEW of the queries that look at one head of keys. They are counted query by query, and within a query by head.
struct Few {
    const Look &look;
    u32 kv;
    u32 first;
    u32 count;
    // The positions that any of them sees.
    u32 from;
    u32 to;

    __device__ Few(const Look &look, u32 number) : look(look) {
        u32 pairs = look.count * look.group, each = (pairs + FEW - 1) / FEW;
        kv = number / each;
        first = number % each * FEW;
        count = min(FEW, pairs - first);
        from = start(0);
        to = end(0);
        for (u32 i = 1; i < count; i++) {
            from = min(from, start(i));
            to = to < end(i) ? end(i) : to;
        }
    }

    __device__ u32 query(u32 i) const { return (first + i) / look.group; }
    __device__ u32 head(u32 i) const { return kv * look.group + (first + i) % look.group; }
    __device__ u64 pair(u32 i) const { return (u64)query(i) * look.heads + head(i); }
    __device__ u32 start(u32 i) const { return look.seen[2 * query(i)]; }
    __device__ u32 end(u32 i) const { return look.seen[2 * query(i) + 1]; }

    // Their scores among those of the launch.
    __device__ float *scores() const { return look.scores + (u64)blockIdx.y * FEW * look.stride; }
};

// Each query with each key, in the order of a product. A warp has eight keys, two at a time; the grid's y are the few.
template <typename Kind> __device__ void scores_of(const Look &look, u32 first_few) {
    Few few(look, first_few + blockIdx.y);
    u32 lane = threadIdx.x % LANES, width = look.key_width, body = width / LANES * LANES;
    u64 at = few.from + (u64)group_of_warp() * GROUP;
    if (at >= few.to) return;
    const u8 *keys = look.keys + few.kv * look.key_head;
    const float *x[FEW];
    for (u32 t = 0; t < FEW; t++) x[t] = look.queries + few.pair(min(t, few.count - 1)) * width;
    float *scores = few.scores() - few.from;
    for (u32 pair = 0; pair < GROUP; pair += 2) {
        u64 wanted = at + threadIdx.x % WARP / LANES + pair;
        const u8 *key = keys + min((u32)wanted, few.to - 1) * (u64)look.key_row;
        float sums[FEW] = {};
#pragma unroll 4
        for (u32 i = lane; i < body; i += LANES) {
            float number = Kind::widen(key, i);
            for (u32 t = 0; t < FEW; t++) sums[t] = plus(sums[t], times(number, x[t][i]));
        }
        for (u32 t = 0; t < FEW; t++) {
            float sum = sum_of_lanes(sums[t]);
            for (u32 i = body; i < width; i++) sum = plus(sum, times(Kind::widen(key, i), x[t][i]));
            bool mine = lane == 0 && wanted < few.to && t < few.count;
            if (mine) scores[t * (u64)look.stride + wanted] = times(sum, look.scale);
        }
    }
}

extern "C" __global__ void scores_f32(const Look *look, u32 first_few) { scores_of<F32>(*look, first_few); }

extern "C" __global__ void scores_f16(const Look *look, u32 first_few) { scores_of<F16>(*look, first_few); }

// What is no number is never the larger one.
__device__ inline float larger(float a, float b) { return b > a ? b : a; }

// Each score becomes e^(score - most). A warp has a query: the grid's x says which of the few that y is.
extern "C" __global__ void soften(const Look *looks, u32 first_few) {
    const Look &look = *looks;
    Few few(look, first_few + blockIdx.y);
    u32 i = blockIdx.x, lane = threadIdx.x;
    if (i >= few.count) return;
    u32 length = few.end(i) - few.start(i), body = length / SUMS * SUMS;
    float *scores = few.scores() + (u64)i * look.stride + (few.start(i) - few.from);
    float most = __uint_as_float(0xFF800000u);
#pragma unroll 8
    for (u32 j = lane; j < length; j += WARP) most = larger(most, scores[j]);
    for (int step = WARP / 2; step > 0; step /= 2) most = larger(most, __shfl_xor_sync(ALL, most, step));
    if (look.sinks) most = larger(most, look.sinks[few.head(i)]);

    // In eight interleaved sums, those in order, then the tail, which is part of what was computed last.
    float sum = 0.0f, power = 0.0f;
#pragma unroll 4
    for (u32 from = 0; from < length; from += WARP) {
        u32 j = from + lane;
        if (j < length) scores[j] = power = exp_in_steps(minus(scores[j], most));
        for (u32 chunk = 0; chunk < WARP; chunk += SUMS) {
            float other = __shfl_sync(ALL, power, chunk + lane % SUMS);
            if (from + chunk < body) sum = plus(sum, other);
        }
    }
    float all = 0.0f;
    for (u32 j = 0; j < SUMS; j++) all = plus(all, __shfl_sync(ALL, sum, j));
    for (u32 j = body; j < length; j++) all = plus(all, __shfl_sync(ALL, power, j % WARP));
    if (look.sinks) all = plus(all, exp_in_steps(minus(look.sinks[few.head(i)], most)));
    if (lane == 0) look.shares[(u64)blockIdx.y * FEW + i] = over(1.0f, all);
}

// A thread has a column of values for each of the few, which are the grid's y; positions come in order.
template <typename Kind> __device__ void blend_of(const Look &look, u32 first_few) {
    Few few(look, first_few + blockIdx.y);
    u32 column = index_of_thread();
    if (column >= look.value_width) return;
    const u8 *values = look.values + few.kv * look.value_head;
    const float *scores[FEW];
    u32 starts[FEW], ends[FEW], low = few.from, high = few.to;
    float sums[FEW] = {};
    for (u32 t = 0; t < FEW; t++) {
        // Beyond the last one is another time the last one.
        u32 i = min(t, few.count - 1);
        scores[t] = few.scores() + (u64)i * look.stride - few.from;
        starts[t] = few.start(i);
        ends[t] = few.end(i);
        low = low < starts[t] ? starts[t] : low;
        high = min(high, ends[t]);
    }
    for (u32 at = few.from; at < few.to; at += AHEAD) {
        float ahead[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            ahead[i] = Kind::widen(values + (u64)min(at + i, few.to - 1) * look.value_row, column);
        }
        if (low <= at && at + AHEAD <= high) { // All of them see all of it.
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                for (u32 t = 0; t < FEW; t++) sums[t] = plus(sums[t], times(scores[t][at + i], ahead[i]));
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                for (u32 t = 0; t < FEW; t++) {
                    bool sees = starts[t] <= at + i && at + i < ends[t];
                    if (sees) sums[t] = plus(sums[t], times(scores[t][at + i], ahead[i]));
                }
            }
        }
    }
    for (u32 t = 0; t < FEW; t++) {
        float share = look.shares[(u64)blockIdx.y * FEW + min(t, few.count - 1)];
        if (t < few.count) look.out[few.pair(t) * look.value_width + column] = times(sums[t], share);
    }
}

extern "C" __global__ void blend_f32(const Look *look, u32 first_few) { blend_of<F32>(*look, first_few); }

extern "C" __global__ void blend_f16(const Look *look, u32 first_few) { blend_of<F16>(*look, first_few); }

// Copies rows of so many halves, count for each head, which the grid's y is. Strides are in halves.
extern "C" __global__ void copy_rows(
    const u16 *from, u16 *to, u64 from_head, u64 from_row, u64 to_head, u32 row, u32 count) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, at = i / row, half = i % row;
    if (at < count) to[blockIdx.y * to_head + at * row + half] = from[blockIdx.y * from_head + at * from_row + half];
}
