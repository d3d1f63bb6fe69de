// Kernels on rows of activations that stay on the device: residual additions, norms, weighted sums of experts.
#include "common.cuh"

// out = x + factor * y; y has `period` values, which repeat.
extern "C" __global__ void add_scaled(const float *x, const float *y, float *out, u32 count, u32 period, float factor) {
    u32 i = index_of_thread();
    if (i >= count) return;
    float value = y[i % period];
    // Plus zero, as on the CPU: it turns -0 into 0.
    if (factor != 1.0f) value = add_rn(mul_rn(value, factor), 0.0f);
    out[i] = add_rn(x[i], value);
}

// out = x / sqrt(mean(x^2) + eps) * weight for each row. A warp has a row.
extern "C" __global__ void rms_norm(const float *x, const float *weight, float *out, u32 rows, u32 width, double eps) {
    u32 row = group_of_warp(), lane = threadIdx.x % WARP;
    if (row >= rows) return;
    x += (u64)row * width;
    out += (u64)row * width;
    float scale = rms_scale(x, width, eps);
    for (u32 i = lane; i < width; i += WARP) out[i] = mul_rn(mul_rn(x[i], scale), weight[i]);
}

// What an expert adds to the output of a token.
struct ExpertTerm {
    // [width], or null: the place has no expert
    const float *output;
    float weight;
};
static_assert(sizeof(ExpertTerm) == 16, "must match the layout in Rust");

// out[token] = the sum of the token's k terms, in their order
extern "C" __global__ void sum_experts(const ExpertTerm *terms, float *out, u32 tokens, u32 k, u32 width) {
    u32 i = index_of_thread();
    if (i >= tokens * width) return;
    u32 column = i % width;
    float sum = 0.0f;
    for (u32 rank = 0; rank < k; rank++) {
        ExpertTerm term = terms[i / width * k + rank];
        if (term.output) sum = add_rn(sum, mul_rn(term.weight, term.output[column]));
    }
    out[i] = sum;
}
