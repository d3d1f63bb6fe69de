// Convolved queries and keys, and values of the token before, on states that stay on the device.
#include "states.cuh"

// The arguments of the convolutions of queries and keys before a product mixes the channels of a head.
struct HeadConvolutionArgs {
    // [tokens, query_width] and [tokens, key_width]: side by side the channels
    const float *queries;
    const float *keys;
    // [tokens, half]: values for the next token
    const float *delayed;
    // [width, channels]
    const float *taps;
    // [channels]
    const float *bias;
    // [half], or null
    const float *delayed_bias;
    // [tokens, heads, gathered, head_dim]: the last convolved rows, the newest last
    float *out;
    // [tokens, half]: the values of the tokens before
    float *earlier;
    const StateSpan *spans;
    // [tokens]: the state that gets a copy after a token, or null
    float *const *copies;
    u32 query_width;
    u32 key_width;
    u32 half;
    u32 head_dim;
    u32 width;
    u32 gathered;
};
static_assert(sizeof(HeadConvolutionArgs) == 104, "must match the layout in Rust");

// Hands the delayed values of a column from each token of a span to the next one.
__device__ void hand_on(const HeadConvolutionArgs &args, const StateSpan &span, u32 column, u64 recurrence_at) {
    float *kept = span.state + recurrence_at + column, value = *kept;
    float bias = args.delayed_bias ? args.delayed_bias[column] : 0.0f;
    for (u64 row = span.first_row; row < span.first_row + span.tokens; row++) {
        args.earlier[row * args.half + column] = args.delayed_bias ? add_rn(value, bias) : value;
        value = args.delayed[row * args.half + column];
        if (args.copies[row]) args.copies[row][recurrence_at + column] = value;
    }
    *kept = value;
}

// Convolves one channel of the tokens of a span, which is the grid's y, gathers for each the last of these rows, and updates the state: the
// inputs of all rows that the next token needs, then what it gets of the values.
extern "C" __global__ void convolve_heads(const HeadConvolutionArgs *args_in_memory) {
    const HeadConvolutionArgs &args = *args_in_memory;
    u32 channel = index_of_thread(), channels = args.query_width + args.key_width;
    u32 kept = args.width - 1 + args.gathered - 1;
    StateSpan span = args.spans[blockIdx.y];
    if (channel >= channels + args.half) return;
    if (channel >= channels) return hand_on(args, span, channel - channels, (u64)kept * channels);
    bool is_key = channel >= args.query_width;
    u32 stride = is_key ? args.key_width : args.query_width, column = is_key ? channel - args.query_width : channel;
    const float *input = (is_key ? args.keys : args.queries) + (u64)span.first_row * stride + column;
    Channel own = {input, stride, span.state + channel, channels, kept};
    u32 head = channel / args.head_dim, within = channel % args.head_dim, heads = channels / args.head_dim;
    for (u32 t = 0; t < span.tokens; t++) {
        u64 row = span.first_row + t;
        for (u32 i = 0; i < args.gathered; i++) {
            float sum = args.bias[channel];
            for (u32 tap = 0; tap < args.width; tap++) {
                sum = add_rn(sum, mul_rn(args.taps[(u64)tap * channels + channel], own.at(t + i + tap)));
            }
            args.out[((row * heads + head) * args.gathered + i) * args.head_dim + within] = sum;
        }
        if (args.copies[row]) own.write_window(t + 1, args.copies[row] + channel);
    }
    own.write_window(span.tokens, own.window);
}

// Brings a head to the length that is the root of its width, times a factor. For all threads of a warp.
__device__ inline void set_length(float *head, u32 width, float factor) {
    float squares = sum_of_squares([head](u32 i) { return head[i]; }, width);
    float length = (float)sqrt((double)squares), scale = div_rn((float)sqrt((double)width), larger(1.1920929e-7f, length));
    for (u32 i = threadIdx.x % WARP; i < width; i += WARP) head[i] = mul_rn(mul_rn(head[i], scale), factor);
}

// Queries and keys of what was projected and what was convolved: both get the mean of the projected query and key, keys that of all queries of
// their group; then heads get their lengths, keys times factors [kv_heads]. A warp has a key head of a token and its queries.
extern "C" __global__ void mix_heads(
    const float *queries, const float *keys, const float *mixed, const float *bias, const float *factors, float *out_queries,
    float *out_keys, u32 tokens, u32 heads, u32 kv_heads, u32 width) {
    u32 number = group_of_warp(), token = number / kv_heads, kv_head = number % kv_heads, group = heads / kv_heads;
    if (token >= tokens) return;
    u64 query_at = ((u64)token * heads + kv_head * group) * width, key_at = ((u64)token * kv_heads + kv_head) * width;
    u32 query_column = kv_head * group * width, key_column = (heads + kv_head) * width;
    const float *own = mixed + (u64)token * (heads + kv_heads) * width;
    for (u32 i = threadIdx.x % WARP; i < width; i += WARP) {
        float key = keys[key_at + i], total = 0.0f;
        for (u32 q = 0; q < group; q++) {
            u32 column = query_column + q * width + i;
            float mean = mul_rn(add_rn(queries[query_at + q * width + i], key), 0.5f);
            out_queries[query_at + q * width + i] = add_rn(add_rn(own[column], bias[column]), mean);
            total = add_rn(total, mean);
        }
        out_keys[key_at + i] = add_rn(add_rn(own[key_column + i], bias[key_column + i]), div_rn(total, (float)group));
    }
    __syncwarp();
    for (u32 q = 0; q < group; q++) set_length(out_queries + query_at + q * width, width, 1.0f);
    set_length(out_keys + key_at, width, factors[kv_head]);
}
