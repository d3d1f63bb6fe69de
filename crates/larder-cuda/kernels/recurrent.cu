// Causal convolutions and recurrences, on states that stay on the device, and the norm behind them.
#include "states.cuh"

// The most inputs of a convolution.
constexpr u32 MAX_INPUTS = 3;
// Added to the sum of squares of a query or key, under the root.
constexpr float UNIT_EPS = 1e-6f;

// The arguments of a convolution.
struct ConvolutionArgs {
    // [tokens, widths[i]], whose columns side by side are the channels
    const float *inputs[MAX_INPUTS];
    // [width, channels]
    const float *taps;
    // [channels], or null
    const float *bias;
    // [tokens, channels]
    float *out;
    const StateSpan *spans;
    // [tokens]: the state that gets a copy of the window after a token, or null
    float *const *copies;
    u32 widths[MAX_INPUTS];
    u32 channels;
    u32 width;
    // Distance in tokens of the inputs that are added up.
    u32 dilation;
    // Whether silu follows.
    u32 silu;
    u32 unused;
};
static_assert(sizeof(ConvolutionArgs) == 96, "must match the layout in Rust");

// Convolves one channel of the tokens of a span, which is the grid's y, and updates its window.
extern "C" __global__ void convolve(const ConvolutionArgs *args_in_memory) {
    const ConvolutionArgs &args = *args_in_memory;
    u32 channel = index_of_thread(), part = 0, column = channel;
    if (channel >= args.channels) return;
    while (column >= args.widths[part]) column -= args.widths[part++];
    StateSpan span = args.spans[blockIdx.y];
    u32 stride = args.widths[part];
    const float *input = args.inputs[part] + (u64)span.first_row * stride + column;
    Channel own = {input, stride, span.state + channel, args.channels, (args.width - 1) * args.dilation};
    for (u32 t = 0; t < span.tokens; t++) {
        float sum = args.bias ? args.bias[channel] : 0.0f;
        for (u32 tap = 0; tap < args.width; tap++) {
            sum = add_rn(sum, mul_rn(args.taps[(u64)tap * args.channels + channel], own.at(t + tap * args.dilation)));
        }
        u64 row = span.first_row + t;
        args.out[row * args.channels + channel] = args.silu ? silu_of(sum) : sum;
        if (args.copies[row]) own.write_window(t + 1, args.copies[row] + channel);
    }
    // In ascending order, so that nothing is overwritten before it is read.
    own.write_window(span.tokens, own.window);
}

// How the decay of a channel follows from its product.
enum DecayForm : u32 { DECAY_SOFTPLUS, DECAY_BOUNDED };

// The arguments of the delta rule.
struct DeltaArgs {
    // [tokens, 2 * k_heads * k_dim + v_heads * v_dim]: queries, keys, values, after the convolution
    const float *qkv;
    // [tokens, v_heads]
    const float *strengths;
    // [tokens, v_heads * decays_each]
    const float *decays;
    // [v_heads * decays_each], added to a row of these
    const float *bias;
    // [v_heads]
    const float *rates;
    // [tokens, v_heads, v_dim]
    float *out;
    const StateSpan *spans;
    // [tokens]: the state that gets a copy after a token, or null
    float *const *copies;
    u32 k_heads;
    u32 v_heads;
    u32 k_dim;
    u32 v_dim;
    // Whether value head h uses key head h % k_heads.
    u32 tiled;
    // The place of the recurrence in a state.
    u32 recurrence_at;
    // One for a head, or k_dim: one per channel of the keys.
    u32 decays_each;
    u32 form;
    float bound;
    // Length of a query.
    float query_length;
    u32 count;
    u32 unused;
};
static_assert(sizeof(DeltaArgs) == 112, "must match the layout in Rust");

// The length of a vector, for all threads of a warp.
__device__ inline float length_of(const float *x, u32 width) {
    float squares = sum_of_squares([x](u32 i) { return x[i]; }, width);
    return (float)sqrt((double)add_rn(squares, UNIT_EPS));
}

// A decay, from its product with the bias.
__device__ inline float decay_of(float product, float rate, const DeltaArgs &args) {
    if (args.form == DECAY_BOUNDED) return exp_in_steps(mul_rn(args.bound, sigmoid(mul_rn(rate, product))));
    return exp_in_steps(mul_rn(-rate, softplus_of(product)));
}

// A token, for one value head.
struct DeltaToken {
    const float *query;
    const float *key;
    const float *values;
    // [decays_each] each
    const float *decays;
    const float *bias;
    float query_length;
    float key_length;
    float rate;
    float strength;

    __device__ DeltaToken(const DeltaArgs &args, u64 row, u32 head) {
        u32 of_key = (args.tiled ? head % args.k_heads : head / (args.v_heads / args.k_heads)) * args.k_dim;
        u32 keys = args.k_heads * args.k_dim, place = head * args.decays_each;
        const float *qkv = args.qkv + row * (2 * keys + args.v_heads * args.v_dim);
        query = qkv + of_key;
        key = query + keys;
        values = qkv + 2 * keys + head * args.v_dim;
        decays = args.decays + row * args.v_heads * args.decays_each + place;
        bias = args.bias + place;
        query_length = length_of(query, args.k_dim);
        key_length = length_of(key, args.k_dim);
        rate = args.rates[head];
        strength = sigmoid(args.strengths[row * args.v_heads + head]);
    }

    __device__ float key_at(u32 i) const { return div_rn(key[i], key_length); }

    __device__ float query_at(u32 i, float length) const { return mul_rn(div_rn(query[i], query_length), length); }

    __device__ float decay_at(u32 i, const DeltaArgs &args) const {
        u32 at = args.decays_each == 1 ? 0 : i;
        return decay_of(add_rn(decays[at], bias[at]), rate, args);
    }
};

// A column of the state of one value head, in registers: it is read and written once for all tokens of a span. Loops over it have to be
// unrolled, so that every index is a constant.
struct KeptColumn {
    // The most rows.
    static constexpr u32 ROWS = 128;
    float rows[ROWS];

    __device__ KeptColumn(float *state, u32 count, u32 stride) {
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) rows[i] = i < count ? state[(u64)i * stride] : 0.0f;
    }

    __device__ float get(u32 i) const { return rows[i]; }
    __device__ void set(u32 i, float value) { rows[i] = value; }

    // Writes the column to a state.
    __device__ void write(float *to, u32 count, u32 stride) const {
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            if (i < count) to[(u64)i * stride] = rows[i];
        }
    }
};

// A column of any number of rows, which stays in memory.
struct ColumnInMemory {
    static constexpr u32 ROWS = 0;
    float *state;
    u32 stride;

    __device__ ColumnInMemory(float *state, u32, u32 stride) : state(state), stride(stride) {}

    __device__ float get(u32 i) const { return state[(u64)i * stride]; }
    __device__ void set(u32 i, float value) { state[(u64)i * stride] = value; }

    __device__ void write(float *to, u32 count, u32) const {
        for (u32 i = 0; to != state && i < count; i++) to[(u64)i * stride] = get(i);
    }
};

// A warp takes in the tokens of a span with 32 columns of the state of one value head. Each thread finds the factors of one of 32 rows of
// the state, and all get them from it.
template <typename Column> __device__ void delta_rule_of(const DeltaArgs &args) {
    u32 lane = threadIdx.x % WARP, pieces = (args.v_dim + WARP - 1) / WARP, index = group_of_warp(), k_dim = args.k_dim;
    if (index >= args.count * args.v_heads * pieces) return;
    u32 head = index / pieces % args.v_heads, wanted = index % pieces * WARP + lane;
    // Threads behind the last column read it too, and write nothing.
    bool is_used = wanted < args.v_dim;
    u32 own = min(wanted, args.v_dim - 1);
    StateSpan span = args.spans[index / pieces / args.v_heads];
    u64 place = args.recurrence_at + (u64)head * k_dim * args.v_dim + own;
    Column column(span.state + place, k_dim, args.v_dim);
    for (u32 t = 0; t < span.tokens; t++) {
        u64 row = span.first_row + t;
        DeltaToken token(args, row, head);
        float known = 0.0f, out = 0.0f;
#pragma unroll
        for (u32 from = 0; from < (Column::ROWS ? Column::ROWS : k_dim); from += WARP) {
            if (from >= k_dim) break;
            u32 i = min(from + lane, k_dim - 1);
            float factor = mul_rn(token.key_at(i), token.decay_at(i, args));
#pragma unroll
            for (u32 at = 0; at < WARP; at++) {
                if (from + at >= k_dim) break;
                known = add_rn(known, mul_rn(__shfl_sync(ALL, factor, at), column.get(from + at)));
            }
        }
        float correction = mul_rn(sub_rn(token.values[own], known), token.strength);
#pragma unroll
        for (u32 from = 0; from < (Column::ROWS ? Column::ROWS : k_dim); from += WARP) {
            if (from >= k_dim) break;
            u32 i = min(from + lane, k_dim - 1);
            float decay = token.decay_at(i, args), key = token.key_at(i), query = token.query_at(i, args.query_length);
#pragma unroll
            for (u32 at = 0; at < WARP; at++) {
                if (from + at >= k_dim) break;
                float added = mul_rn(__shfl_sync(ALL, key, at), correction);
                float value = add_rn(mul_rn(__shfl_sync(ALL, decay, at), column.get(from + at)), added);
                out = add_rn(out, mul_rn(__shfl_sync(ALL, query, at), value));
                if (is_used) column.set(from + at, value);
            }
        }
        if (!is_used) continue;
        args.out[(row * args.v_heads + head) * args.v_dim + own] = out;
        if (args.copies[row]) column.write(args.copies[row] + place, k_dim, args.v_dim);
    }
    if (is_used) column.write(span.state + place, k_dim, args.v_dim);
}

// Keys are at most as wide as the column in registers.
extern "C" __global__ void __launch_bounds__(128) delta_rule(const DeltaArgs *args) { delta_rule_of<KeptColumn>(*args); }

// Keys of any width.
extern "C" __global__ void delta_rule_wide(const DeltaArgs *args) { delta_rule_of<ColumnInMemory>(*args); }

// The arguments of the recurrence of Mamba 2.
struct ScanArgs {
    // [tokens, heads * head_dim + 2 * groups * state]: x, B and C, after the convolution
    const float *convolved;
    // [tokens, heads]
    const float *steps;
    // [heads], added to these
    const float *step_bias;
    // [heads]: the logarithm of a decay per step
    const float *rates;
    // [heads]: factors on x beside the state
    const float *skips;
    // [tokens, heads, head_dim]
    float *out;
    const StateSpan *spans;
    // [tokens]: the state that gets a copy after a token, or null
    float *const *copies;
    u32 heads;
    u32 head_dim;
    u32 groups;
    // Values of a row of the state.
    u32 state;
    // The place of the recurrence in a state.
    u32 recurrence_at;
    u32 count;
    // The smallest and the largest step.
    float least;
    float most;
};
static_assert(sizeof(ScanArgs) == 96, "must match the layout in Rust");

// A warp takes in the tokens of a span with one row of the state of a head.
extern "C" __global__ void scan_states(const ScanArgs *args_in_memory) {
    const ScanArgs &args = *args_in_memory;
    u32 inner = args.heads * args.head_dim, row = group_of_warp() % inner, number = group_of_warp() / inner;
    if (number >= args.count) return;
    StateSpan span = args.spans[number];
    u32 head = row / args.head_dim, group = head / (args.heads / args.groups), both = args.groups * args.state;
    u64 place = args.recurrence_at + (u64)row * args.state;
    float *state = span.state + place;
    for (u32 t = 0; t < span.tokens; t++) {
        u64 token = span.first_row + t;
        const float *x = args.convolved + token * (inner + 2 * both), *b = x + inner + group * args.state, *c = b + both;
        float step = softplus_of(add_rn(args.steps[token * args.heads + head], args.step_bias[head]));
        step = step < args.least ? args.least : step > args.most ? args.most : step;
        float decay = exp_in_steps(mul_rn(step, args.rates[head])), input = mul_rn(step, x[row]);
        float *copy = args.copies[token] ? args.copies[token] + place : nullptr;
        auto read = [=](u32 i) {
            float value = add_rn(mul_rn(state[i], decay), mul_rn(input, b[i]));
            state[i] = value;
            if (copy) copy[i] = value;
            return mul_rn(value, c[i]);
        };
        float sum = sum_of_terms(read, args.state);
        if (threadIdx.x % WARP == 0) args.out[token * inner + row] = add_rn(sum, mul_rn(args.skips[head], x[row]));
    }
}

// The arguments of the recurrence of Mamba 1.
struct ChannelScanArgs {
    // [tokens, channels], after the convolution
    const float *x;
    // [tokens, channels]: steps of time are the softplus of these
    const float *steps;
    // [tokens, state], and so c
    const float *b;
    const float *c;
    // [channels, state]: the logarithm of a decay per step
    const float *rates;
    // [channels]: factors on x beside the state
    const float *skips;
    // [tokens, channels]
    float *out;
    const StateSpan *spans;
    // [tokens]: the state that gets a copy after a token, or null
    float *const *copies;
    u32 channels;
    // Values of a row of the state.
    u32 state;
    // The place of the recurrence in a state.
    u32 recurrence_at;
    u32 count;
};
static_assert(sizeof(ChannelScanArgs) == 88, "must match the layout in Rust");

// A warp takes in the tokens of a span with the row of the state of a channel.
extern "C" __global__ void scan_channels(const ChannelScanArgs *args_in_memory) {
    const ChannelScanArgs &args = *args_in_memory;
    u32 channel = group_of_warp() % args.channels, number = group_of_warp() / args.channels;
    if (number >= args.count) return;
    StateSpan span = args.spans[number];
    u64 place = args.recurrence_at + (u64)channel * args.state;
    float *state = span.state + place;
    const float *rates = args.rates + (u64)channel * args.state;
    for (u32 t = 0; t < span.tokens; t++) {
        u64 token = span.first_row + t, at = token * args.channels + channel;
        const float *b = args.b + token * args.state, *c = args.c + token * args.state;
        float x = args.x[at], step = softplus_of(args.steps[at]), input = mul_rn(step, x);
        float *copy = args.copies[token] ? args.copies[token] + place : nullptr;
        auto read = [=](u32 i) {
            float value = add_rn(mul_rn(state[i], exp_in_steps(mul_rn(step, rates[i]))), mul_rn(input, b[i]));
            state[i] = value;
            if (copy) copy[i] = value;
            return mul_rn(value, c[i]);
        };
        float sum = sum_of_terms(read, args.state);
        if (threadIdx.x % WARP == 0) args.out[at] = add_rn(sum, mul_rn(args.skips[channel], x));
    }
}

// The RMS norm of each part of `width` values, times a function of gates: weight * (x / sqrt(mean(x^2) + eps)) * f(gate). If gates come
// first it is the norm of x * f(gate). Part i has the weights of part i % weights. Unless blocks is null the same, quantised; then the
// width is a multiple of 32. A warp has 32 values.
extern "C" __global__ void norm_gate(
    const float *x, const float *gates, const float *weight, float *out, Block *blocks, u32 parts, u32 width,
    u32 weights, u32 function, u32 gate_first, double eps) {
    u32 each = (width + WARP - 1) / WARP, part = group_of_warp() / each;
    if (part >= parts) return;
    const float *own = x + (u64)part * width, *of_own = gates + (u64)part * width;
    auto at = [=](u32 i) { return gate_first ? mul_rn(own[i], gate_of(of_own[i], function)) : own[i]; };
    float scale = rms_scale(at, width, eps);
    u32 i = group_of_warp() % each * WARP + threadIdx.x % WARP;
    if (i >= width) return;
    float value = mul_rn(mul_rn(at(i), scale), weight[(u64)(part % weights) * width + i]);
    if (!gate_first) value = mul_rn(value, gate_of(of_own[i], function));
    u64 place = (u64)part * width + i;
    out[place] = value;
    if (blocks) quantise_block(value, blocks[place / BLOCK]);
}
