// Kernels on rows of activations that stay on the device: residual additions and norms.
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

// out = x / sqrt(mean(x^2) + eps) * weight for each row. A warp has a row. The squares are summed in eight interleaved lanes, these in
// order.
extern "C" __global__ void rms_norm(const float *x, const float *weight, float *out, u32 rows, u32 width, double eps) {
    u32 row = group_of_warp(), lane = threadIdx.x % WARP;
    if (row >= rows) return;
    x += (u64)row * width;
    out += (u64)row * width;
    float sum = 0.0f;
    for (u32 from = 0; from < width; from += WARP) {
        float value = from + lane < width ? x[from + lane] : 0.0f, square = mul_rn(value, value);
        for (u32 chunk = 0; chunk < WARP; chunk += SUM_LANES) {
            u32 other = chunk + lane % SUM_LANES;
            float term = __shfl_sync(ALL, square, other);
            if (from + other < width) sum = add_rn(sum, term);
        }
    }
    float all = 0.0f;
    for (u32 i = 0; i < SUM_LANES; i++) all = add_rn(all, __shfl_sync(ALL, sum, i));
    float scale = (float)(1.0 / sqrt((double)all / (double)width + eps));
    for (u32 i = lane; i < width; i += WARP) out[i] = mul_rn(mul_rn(x[i], scale), weight[i]);
}
