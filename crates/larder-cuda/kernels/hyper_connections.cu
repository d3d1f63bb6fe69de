// Residual streams: several of them, and additions that are more than a sum.
#include "activations.cuh"

// The least value whose root a gate by keys takes.
constexpr float LEAST_ROOT = 1e-6f;

// The softmax of each row of a matrix, of which rows and columns are then normalised in turns: each lane has an element, row by row. For all
// threads of a warp.
__device__ inline float balanced(float value, u32 count, u32 iterations, float eps) {
    u32 lane = threadIdx.x % WARP, row = min(lane / count, count - 1) * count, column = lane % count;
    float most = minus_infinity();
    for (u32 i = 0; i < count; i++) {
        float other = __shfl_sync(ALL, value, row + i);
        most = larger(most, other);
    }
    value = exp_in_steps(sub_rn(value, most));
    for (u32 turn = 0; turn < 2 * iterations; turn++) {
        bool of_rows = turn % 2 == 0;
        float sum = 0.0f;
        for (u32 i = 0; i < count; i++) {
            float other = __shfl_sync(ALL, value, of_rows ? row + i : column + i * count);
            sum = i == 0 ? other : add_rn(sum, other);
        }
        // The first time, rows are those of a softmax.
        if (turn == 0) value = add_rn(div_rn(value, sum), eps);
        else value = div_rn(value, add_rn(sum, eps));
    }
    return value;
}

// weights[t, i] of products[t, i] times their scale plus base[i]: the first `count` of a row are to read the streams, and if there are more,
// the next to write them, and the others the matrix [from, to] that mixes them. A warp has a token.
extern "C" __global__ void stream_weights(
    const float *products, const float *base, float *weights, u32 tokens, u32 width, u32 count, u32 iterations, float eps, float read_scale,
    float write_scale, float mix_scale) {
    u32 token = group_of_warp(), lane = threadIdx.x % WARP, vectors = width == count ? count : 2 * count;
    if (token >= tokens) return;
    products += (u64)token * width;
    weights += (u64)token * width;
    for (u32 i = lane; i < vectors; i += WARP) {
        float weight = sigmoid(add_rn(mul_rn(products[i], i < count ? read_scale : write_scale), base[i]));
        weights[i] = i < count ? add_rn(weight, eps) : mul_rn(2.0f, weight);
    }
    if (width == vectors) return;
    u32 at = vectors + min(lane, count * count - 1);
    float value = balanced(add_rn(mul_rn(products[at], mix_scale), base[at]), count, iterations, eps);
    if (lane < count * count) weights[at] = value;
}

// out[t, i]: the sum over the streams of a weight times the stream, or their mean where there are no weights.
extern "C" __global__ void read_streams(
    const float *streams, const float *weights, float *out, u32 tokens, u32 hidden, u32 count, u32 weight_stride) {
    u32 at = index_of_thread(), token = at / hidden, i = at % hidden;
    if (token >= tokens) return;
    const float *own = streams + (u64)token * count * hidden + i;
    float sum = 0.0f;
    for (u32 stream = 0; stream < count; stream++) {
        float value = own[(u64)stream * hidden];
        sum = add_rn(sum, weights ? mul_rn(weights[(u64)token * weight_stride + stream], value) : value);
    }
    out[at] = weights ? sum : div_rn(sum, (float)count);
}

// out[t, s, i]: the streams, mixed by a matrix [from, to] if there is one, and the weight of each times y[t, i]. Rows of `mix` have the
// weights at `write_at`, and the matrix at `matrix_at`, or none if that is ~0.
extern "C" __global__ void write_streams(
    const float *streams, const float *y, const float *mix, float *out, u32 tokens, u32 hidden, u32 count, u32 mix_stride, u32 write_at,
    u32 matrix_at) {
    u32 at = index_of_thread(), i = at % hidden, stream = at / hidden % count, token = at / hidden / count;
    if (token >= tokens) return;
    const float *own = mix + (u64)token * mix_stride;
    float sum = streams[at];
    if (matrix_at != ~0u) {
        sum = 0.0f;
        for (u32 from = 0; from < count; from++) {
            float value = streams[((u64)token * count + from) * hidden + i];
            sum = add_rn(sum, mul_rn(own[matrix_at + from * count + stream], value));
        }
    }
    out[at] = add_rn(sum, mul_rn(own[write_at + stream], y[(u64)token * hidden + i]));
}

// out = silu(x / divisor), or 2 * sigmoid(x / divisor).
extern "C" __global__ void stream_gates(const float *x, float *out, u32 count, float divisor, u32 is_silu) {
    u32 i = index_of_thread();
    if (i >= count) return;
    float quotient = div_rn(x[i], divisor);
    out[i] = is_silu ? silu_of(quotient) : mul_rn(2.0f, sigmoid(quotient));
}

// out[t, i]: the mean over the streams of sigmoid(gate) * x.
extern "C" __global__ void gated_mean(const float *x, const float *gates, float *out, u32 tokens, u32 hidden, u32 count) {
    u32 at = index_of_thread(), token = at / hidden, i = at % hidden;
    if (token >= tokens) return;
    float sum = 0.0f;
    for (u32 stream = 0; stream < count; stream++) {
        u64 from = ((u64)token * count + stream) * hidden + i;
        sum = add_rn(sum, mul_rn(sigmoid(gates[from]), x[from]));
    }
    out[at] = div_rn(sum, (float)count);
}

// out[t, i] = (y + bias) * scale + (stream + bias) * scale, each side with a scale and a bias by channel.
extern "C" __global__ void add_scaled_sides(
    const float *stream, const float *y, float *out, u32 count, u32 hidden, const float *y_scale, const float *y_bias,
    const float *stream_scale, const float *stream_bias) {
    u32 at = index_of_thread(), i = at % hidden;
    if (at >= count) return;
    float of_y = mul_rn(add_rn(y[at], y_bias[i]), y_scale[i]);
    out[at] = add_rn(of_y, mul_rn(add_rn(stream[at], stream_bias[i]), stream_scale[i]));
}

// The values of a token for each stream, [tokens, streams, hidden], times a gate: the sigmoid of the signed root of the product of key and query,
// which is divided by the root of their width. A warp has a stream of a token.
extern "C" __global__ void gate_by_keys(
    const float *keys, const float *queries, const float *values, float *out, u32 tokens, u32 hidden, u32 count) {
    u32 number = group_of_warp(), token = number / count;
    if (token >= tokens) return;
    const float *key = keys + (u64)number * hidden, *query = queries + (u64)number * hidden;
    auto term = [=](u32 i) { return mul_rn(key[i], query[i]); };
    float product = div_rn(sum_of_terms(term, hidden), (float)sqrt((double)hidden));
    float root = (float)sqrt((double)larger(LEAST_ROOT, fabsf(product)));
    float gate = sigmoid(product > 0.0f ? root : product < 0.0f ? -root : 0.0f);
    for (u32 i = threadIdx.x % WARP; i < hidden; i += WARP) {
        out[(u64)number * hidden + i] = mul_rn(gate, values[(u64)token * hidden + i]);
    }
}
