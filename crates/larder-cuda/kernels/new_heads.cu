// Rows of the KV cache: the heads of new tokens, with their norms and rotations, and copies.
#include "attention.cuh"

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
    // [queries, key heads, key_width], or null: there are only queries
    const float *keys;
    // [queries, key heads, value_width], or null: values are parts of keys
    const float *values;
    // [queries, heads, rest_step], of which the values from rest_first on are those of queries from split on; or null
    const float *rest;
    // [norm_width], or [heads, key_width] and [key heads, key_width] if whole; or null
    const float *query_weight;
    const float *key_weight;
    // [queries, dim / 2, 2]: cosines and sines
    const float *cos_sin;
    // [queries], factors on queries after the rotation; or null
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
    // Whether the norm is over each head after its rotation; then without a weight too.
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
    const float *cos_sin;

    __device__ float at(u32 i) const {
        if (i < args.first || i >= args.first + args.dim) return head.at(i);
        u32 place = i - args.first, half = args.dim / 2;
        u32 pair = args.interleaved ? place / 2 : place % half;
        bool is_second = args.interleaved ? place % 2 : place >= half;
        u32 one = args.first + (args.interleaved ? 2 * pair : pair), other = args.interleaved ? one + 1 : one + half;
        float a = head.at(one), b = head.at(other), cosine = cos_sin[2 * pair], sine = cos_sin[2 * pair + 1];
        return is_second ? add_rn(mul_rn(a, sine), mul_rn(b, cosine)) : sub_rn(mul_rn(a, cosine), mul_rn(b, sine));
    }
};

// Writes a head times a factor, and normalised if a norm is after the rotation; its weight may be null.
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
    const float *cos_sin = heads.cos_sin + (u64)token * heads.dim;
    if (head < args.heads) {
        u64 place = (u64)token * args.heads + head;
        u8 *out = (u8 *)(args.queries + place * width);
        NewHead query = heads.rest ? heads.query_in_parts(place, width)
                                   : heads.head(heads.queries + (u64)token * args.heads * width, head, args.heads, heads.query_weight, width);
        float factor = heads.scales ? heads.scales[token] : 1.0f;
        write_rotated<FloatRows<F32>>({query, heads, cos_sin}, heads.query_weight, out, width, factor);
        return;
    }
    head -= args.heads;
    bool is_key = head < kv_heads;
    if (!heads.keys) return; // only queries
    if (!is_key) head -= kv_heads;
    u32 position = args.seen[2 * token + 1] - 1, shift = args.page_shift, in_page = position & ((1u << shift) - 1);
    u64 row = ((u64)head << shift) + in_page, first = (u64)token * kv_heads;
    if (is_key) {
        NewHead key = heads.head(heads.keys + first * width, head, kv_heads, heads.key_weight, width);
        u8 *out = (u8 *)args.key_pages[position >> shift] + row * args.key_row_stride;
        write_rotated<Kind>({key, heads, cos_sin}, heads.key_weight, out, width, 1.0f);
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
