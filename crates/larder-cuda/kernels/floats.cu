// Products with weights in float formats. Each output is summed in 16 interleaved lanes, then pairwise, then the tail.
#include "common.cuh"

// One row with TOKENS tokens at a time, so that weights are read once for them. Computed by half a warp; the other half
// has another row, or computes the same one and does not store it.
template <typename Kind, int TOKENS> __device__ void one_row(const ProductKernelArgs &p, u32 wanted) {
    u32 lane = threadIdx.x % LANES, row = min(wanted, p.rows - 1), body = p.cols / LANES * LANES;
    const u8 *weights = p.weights + (u64)row * p.cols * Kind::BYTES;
    for (u32 from = 0; from < p.tokens; from += TOKENS) {
        float sums[TOKENS];
        const float *x[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            sums[t] = 0.0f;
            x[t] = (const float *)p.x + p.x_at(min(from + t, p.tokens - 1));
        }
#pragma unroll(TOKENS == 1 ? 8 : 4)
        for (u32 i = lane; i < body; i += LANES) {
            float weight = Kind::widen(weights, i);
            for (int t = 0; t < TOKENS; t++) sums[t] = fma_rn(weight, x[t][i], sums[t]);
        }
        for (int t = 0; t < TOKENS; t++) {
            float sum = sum_of_lanes(sums[t]);
            for (u32 i = body; i < p.cols; i++) sum = fma_rn(Kind::widen(weights, i), x[t][i], sum);
            bool mine = lane == 0 && wanted < p.rows && from + t < p.tokens;
            if (mine) p.out[(u64)(from + t) * p.out_stride + row] = sum;
        }
    }
}

// A warp has eight rows, two at a time.
template <typename Kind> __device__ void floats_matmul(const ProductKernelArgs *products, u32 count, u32 groups) {
    u32 group = group_of_warp();
    if (group >= groups) return;
    const ProductKernelArgs &p = *find(products, count, group);
    if (!p.weights) return;
    u32 first = (group - p.first_group) * GROUP + threadIdx.x % WARP / LANES;
    for (u32 pair = 0; pair < GROUP; pair += 2) {
        if (p.tokens == 1) one_row<Kind, 1>(p, first + pair);
        else one_row<Kind, 4>(p, first + pair);
    }
}

extern "C" __global__ void f32_matmul(const ProductKernelArgs *products, u32 count, u32 groups) {
    floats_matmul<F32>(products, count, groups);
}

extern "C" __global__ void f16_matmul(const ProductKernelArgs *products, u32 count, u32 groups) {
    floats_matmul<F16>(products, count, groups);
}

extern "C" __global__ void bf16_matmul(const ProductKernelArgs *products, u32 count, u32 groups) {
    floats_matmul<Bf16>(products, count, groups);
}

// A row of a matrix as floats: out [cols].
template <typename Kind> __device__ void row_of_floats(const MatrixKernelArgs &m, const u32 *number, float *out) {
    u32 i = index_of_thread();
    if (i >= m.cols) return;
    float value = Kind::widen(m.weights + (u64)min(*number, m.rows - 1) * m.cols * Kind::BYTES, i);
    out[i] = m.finished(value);
}

#define ROW_OF_FLOATS(name, Kind)                                                                                      \
    extern "C" __global__ void name##_row(                                                                             \
        const u8 *weights, const u32 *number, float *out, u32 rows, u32 cols, u32 interleaved, u32 scale_at) {         \
        row_of_floats<Kind>({weights, rows, cols, interleaved, scale_at}, number, out);                                    \
    }

ROW_OF_FLOATS(f32, F32)
ROW_OF_FLOATS(f16, F16)
ROW_OF_FLOATS(bf16, Bf16)
