// Kernels on rows of activations that stay on the device: residual additions, norms, weighted sums of experts.
#include "common.cuh"

// factor * value. Plus zero, as on the CPU: it turns -0 into 0.
__device__ inline float scaled(float value, float factor) {
    return factor != 1.0f ? add_rn(mul_rn(value, factor), 0.0f) : value;
}

// out = x + factor * y; y has `period` values, which repeat.
extern "C" __global__ void add_scaled(const float *x, const float *y, float *out, u32 count, u32 period, float factor) {
    u32 i = index_of_thread();
    if (i >= count) return;
    out[i] = add_rn(x[i], scaled(y[i % period], factor));
}

// The norm of a row whose values are at(0), at(1), …: out = value / sqrt(mean(value^2) + eps) * weight, and unless blocks is null the same,
// quantised; then the width is a multiple of 32. A warp has 32 values, and finds the scale of the whole row by itself: so the warps of a
// row need not wait for each other.
template <typename At>
__device__ void norm_values(At at, const float *weight, float *out, Block *blocks, u32 row, u32 i, u32 width, double eps) {
    float scale = rms_scale(at, width, eps);
    if (i >= width) return;
    float value = mul_rn(mul_rn(at(i), scale), weight[i]);
    u64 place = (u64)row * width + i;
    out[place] = value;
    if (blocks) quantise_block(value, blocks[place / BLOCK]);
}

// The norm of each row of x.
extern "C" __global__ void rms_norm(
    const float *x, const float *weight, float *out, Block *blocks, u32 rows, u32 width, double eps) {
    u32 each = (width + WARP - 1) / WARP, row = group_of_warp() / each;
    if (row >= rows) return;
    const float *own = x + (u64)row * width;
    u32 i = group_of_warp() % each * WARP + threadIdx.x % WARP;
    norm_values([own](u32 i) { return own[i]; }, weight, out, blocks, row, i, width, eps);
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

// What an expert adds to the output of a token.
struct ExpertTerm {
    // [width], or null: the place has no expert
    const float *output;
    float weight;
};
static_assert(sizeof(ExpertTerm) == 16, "must match the layout in Rust");

// out[token] = residual[token] + (the sum of the token's k terms, in their order, + shared[token]); either may be null
extern "C" __global__ void sum_experts(
    const ExpertTerm *terms, const float *shared, const float *residual, float *out, u32 tokens, u32 k, u32 width) {
    u32 i = index_of_thread();
    if (i >= tokens * width) return;
    u32 column = i % width;
    float sum = 0.0f;
    for (u32 rank = 0; rank < k; rank++) {
        ExpertTerm term = terms[i / width * k + rank];
        if (term.output) sum = add_rn(sum, mul_rn(term.weight, term.output[column]));
    }
    if (shared) sum = add_rn(sum, shared[i]);
    out[i] = residual ? add_rn(residual[i], sum) : sum;
}
