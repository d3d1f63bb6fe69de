// Kernels on rows of activations that stay on the device: residual additions, norms, weighted sums of experts.
#include "common.cuh"

// out = x + factor * y; y has `period` values, which repeat.
extern "C" __global__ void add_scaled(const float *x, const float *y, float *out, u32 count, u32 period, float factor) {
    u32 i = index_of_thread();
    if (i >= count) return;
    out[i] = add_rn(x ? x[i] : 0.0f, scaled(y[i % period], factor));
}

// Writes a value of a row after the norm, times its weight unless that is null; and unless blocks is null, for all threads of a warp, the
// same, quantised.
__device__ inline void write_normalised(float value, const float *weight, float *out, Block *blocks, u32 row, u32 i, u32 width) {
    if (weight) value = mul_rn(value, weight[i]);
    u64 place = (u64)row * width + i;
    out[place] = value;
    if (blocks) quantise_block(value, blocks[place / BLOCK]);
}

// The norm of a row whose values are at(0), at(1), …: out = value / sqrt(mean(value^2) + eps) * weight, which may be null, and unless blocks is null the same,
// quantised; then the width is a multiple of 32. A warp has 32 values, and finds the scale of the whole row by itself: so the warps of a
// row need not wait for each other.
template <typename At>
__device__ void norm_values(At at, const float *weight, float *out, Block *blocks, u32 row, u32 i, u32 width, double eps) {
    float scale = rms_scale(at, width, eps);
    if (i >= width) return;
    write_normalised(mul_rn(at(i), scale), weight, out, blocks, row, i, width);
}

// The norm of each row of x. Rows take weights in turns: weight [kinds, width], or null. A row has `warps` warps, each of which finds its scale.
extern "C" __global__ void rms_norm(
    const float *x, const float *weight, float *out, Block *blocks, u32 rows, u32 width, double eps, u32 kinds, u32 warps) {
    u32 row = group_of_warp() / warps;
    if (row >= rows) return;
    const float *own = x + (u64)row * width;
    if (weight) weight += (u64)(row % kinds) * width;
    float scale = rms_scale([own](u32 i) { return own[i]; }, width, eps);
    for (u32 i = group_of_warp() % warps * WARP + threadIdx.x % WARP; i < width; i += warps * WARP) {
        write_normalised(mul_rn(own[i], scale), weight, out, blocks, row, i, width);
    }
}

// sum = x + factor * y, and the norm of each row of it.
extern "C" __global__ void add_norm(
    const float *x, const float *y, float *sum, const float *weight, float *out, Block *blocks, u32 rows, u32 width,
    float factor, double eps) {
    u32 each = (width + WARP - 1) / WARP, row = group_of_warp() / each;
    if (row >= rows) return;
    u64 from = (u64)row * width;
    u32 i = group_of_warp() % each * WARP + threadIdx.x % WARP;
    auto at = [=](u32 i) { return add_rn(x[from + i], scaled(y[from + i], factor)); };
    if (i < width) sum[from + i] = at(i);
    norm_values(at, weight, out, blocks, row, i, width, eps);
}

// The layer norm of each row of x: (x - mean) / sqrt(variance + eps) * weight + bias. Warps as in norm_values.
extern "C" __global__ void layer_norm(
    const float *x, const float *weight, const float *bias, float *out, Block *blocks, u32 rows, u32 width, double eps) {
    u32 each = (width + WARP - 1) / WARP, row = group_of_warp() / each;
    if (row >= rows) return;
    const float *own = x + (u64)row * width;
    u32 i = group_of_warp() % each * WARP + threadIdx.x % WARP;
    float mean = div_rn(sum_of_terms([own](u32 i) { return own[i]; }, width), (float)width);
    auto centred = [=](u32 i) { return sub_rn(own[i], mean); };
    float scale = rms_scale(centred, width, eps);
    if (i >= width) return;
    float value = add_rn(mul_rn(mul_rn(centred(i), scale), weight[i]), bias[i]);
    u64 place = (u64)row * width + i;
    out[place] = value;
    if (blocks) quantise_block(value, blocks[place / BLOCK]);
}

// out = x * factors; there is a factor for each value of a row, the same for all rows.
extern "C" __global__ void scale_columns(const float *x, const float *factors, float *out, u32 count, u32 width) {
    u32 i = index_of_thread();
    if (i < count) out[i] = mul_rn(x[i], factors[i % width]);
}

// The inputs of experts [tokens * k, width], as weights scale them: those of token t are at weights[t * step]. Unless blocks is null, also
// quantised; then the width is a multiple of 32.
extern "C" __global__ void scale_inputs(
    const float *x, const float *weights, float *out, Block *blocks, u32 tokens, u32 k, u32 width, u32 step) {
    u32 i = index_of_thread(), place = i / width, token = place / k;
    if (token >= tokens) return;
    float value = mul_rn(x[(u64)token * width + i % width], weights[(u64)token * step + place % k]);
    out[i] = value;
    if (blocks) quantise_block(value, blocks[i / BLOCK]);
}

// Value `column` of residual + (the sum of a token's k terms, in their order, + shared); either may be null.
__device__ inline float sum_of_experts(const ExpertTerm *terms, const float *shared, const float *residual, u32 k, u32 column) {
    float sum = 0.0f;
    for (u32 rank = 0; rank < k; rank++) {
        ExpertTerm term = terms[rank];
        if (term.output) sum = add_rn(sum, mul_rn(term.weight, term.output[column]));
    }
    if (shared) sum = add_rn(sum, shared[column]);
    return residual ? add_rn(residual[column], sum) : sum;
}

// Rows of x, each followed by that of y.
extern "C" __global__ void side_by_side(const float *x, const float *y, float *out, u32 rows, u32 x_width, u32 y_width) {
    u32 at = index_of_thread(), width = x_width + y_width, row = at / width, column = at % width;
    if (row >= rows) return;
    out[at] = column < x_width ? x[(u64)row * x_width + column] : y[(u64)row * y_width + column - x_width];
}

// The sums of the experts of each token, whose first terms are at terms[token * k].
extern "C" __global__ void sum_experts(
    const ExpertTerm *terms, const float *shared, const float *residual, float *out, u32 tokens, u32 k, u32 width) {
    u32 i = index_of_thread();
    if (i >= tokens * width) return;
    u64 token = i / width, row = token * width;
    out[i] = sum_of_experts(terms + token * k, shared ? shared + row : shared, residual ? residual + row : residual, k, i % width);
}

// As sum_experts, and the norm of each row as in rms_norm. A block has a row.
extern "C" __global__ void __launch_bounds__(1024) sum_experts_norm(
    const ExpertTerm *terms, const float *shared, const float *residual, float *sums, const float *weight, float *out,
    Block *blocks, u32 k, u32 width, double eps) {
    u64 row = (u64)blockIdx.x * width;
    float *own = sums + row;
    shared = shared ? shared + row : shared;
    residual = residual ? residual + row : residual;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        own[i] = sum_of_experts(terms + (u64)blockIdx.x * k, shared, residual, k, i);
    }
    __syncthreads();
    float scale = rms_scale([own](u32 i) { return own[i]; }, width, eps);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float value = mul_rn(mul_rn(own[i], scale), weight[i]);
        out[row + i] = value;
        if (blocks) quantise_block(value, blocks[(row + i) / BLOCK]);
    }
}
