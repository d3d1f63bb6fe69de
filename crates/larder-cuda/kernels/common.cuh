// The common part of all kernels: number formats, and arithmetic whose rounding is defined.
//
// The results have the bits of the CPU kernels, so an expert gives the same output wherever it is computed. Hence
// multiplications and additions of floats are fused exactly where the definition says so, which is in products and in
// attention, and the terms of one output are added in a fixed order. No header of the CUDA toolkit is used, because it
// may not be installed where these files are compiled.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Rows of a group, interleaved or not.
constexpr int GROUP = 8;
// Activations that share a scale.
constexpr int BLOCK = 32;
constexpr int WARP = 32;
// Interleaved sums of a product of floats.
constexpr int LANES = 16;
// Interleaved sums of values that are no product: of a softmax, of the squares of a norm.
constexpr u32 SUM_LANES = 8;
constexpr u32 ALL = 0xFFFFFFFFu;

__device__ inline float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float add_rn(float a, float b) { return __fadd_rn(a, b); }
// a * b + c, rounded once.
__device__ inline float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline float sub_rn(float a, float b) { return __fsub_rn(a, b); }
__device__ inline float div_rn(float a, float b) { return __fdiv_rn(a, b); }

// 32 activations as integers: value = d * q.
struct __align__(16) Block {
    // Four signed bytes per word.
    int q[8];
    float d;
    // The sum of all q, and those of the first 16 and of the last 16.
    float sum;
    float halves[2];
    // -128 times these sums.
    int raised;
    int raised_halves[2];
    u32 zero;
};
static_assert(sizeof(Block) == 64, "must match the layout in Rust");

// The arguments of one product of a launch: out[token][row] for some rows of x.
struct ProductKernelArgs {
    // [rows, cols] as stored: a part of a slot, at a multiple of 64 bytes. Null: the product is left out.
    const u8 *weights;
    // [inputs, x_stride / 32] blocks, or [inputs, x_stride] floats, of which the first of each input are read.
    const void *x;
    // By token: its row in x. Null: token t has row t.
    const u32 *pick;
    // [tokens, out_stride], of which the first of each token are written
    float *out;
    u32 rows;
    u32 cols;
    u32 tokens;
    // Whether whole groups of eight rows are interleaved.
    u32 interleaved;
    // The number of this product's first group of rows within the launch.
    u32 first_group;
    // Values from one row of x to the next, and from the outputs of one token to those of the next.
    u32 x_stride;
    u32 out_stride;
    // Where the f32 that all weights are multiplied with is, in bytes behind the first of them; 0 if there is none.
    u32 scale_at;

    // A sum of products with a row, times the scale of the matrix.
    __device__ float finished(float sum) const {
        return scale_at ? mul_rn(sum, *(const float *)(weights + scale_at)) : sum;
    }

    // The first value of the row of a token in x.
    __device__ u64 x_at(u32 token) const { return (u64)(pick ? pick[token] : token) * x_stride; }
};
static_assert(sizeof(ProductKernelArgs) == 64, "must match the layout in Rust");

// The arguments of adding the bias of one product.
struct BiasKernelArgs {
    // [cols]; null: none is added
    const float *bias;
    // [tokens, cols]
    float *out;
    u32 tokens;
    u32 cols;
};
static_assert(sizeof(BiasKernelArgs) == 24, "must match the layout in Rust");

// A matrix of which a row is read.
struct MatrixKernelArgs {
    // [rows, cols] as stored
    const u8 *weights;
    u32 rows;
    u32 cols;
    // Whether whole groups of eight rows are interleaved.
    u32 interleaved;
    // Where the f32 that all values are multiplied with is, in bytes behind the first of them; 0 if there is none.
    u32 scale_at;

    // A value, times the scale of the matrix.
    __device__ float finished(float value) const {
        return scale_at ? mul_rn(value, *(const float *)(weights + scale_at)) : value;
    }
};

// What an expert adds to the output of a token.
struct ExpertTerm {
    // [width], or null: the place has no expert
    const float *output;
    float weight;
    // The expert, where the device has chosen it.
    u32 expert;
};
static_assert(sizeof(ExpertTerm) == 16, "must match the layout in Rust");

__device__ inline float minus_infinity() { return __uint_as_float(0xFF800000u); }

// The larger number; NaN in b is ignored.
__device__ inline float larger(float a, float b) { return b > a ? b : a; }

// Numbers in the order of floats, in which -0 is before 0.
__device__ inline u32 place_in_order(float value) {
    u32 bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The f16 number with these bits.
__device__ inline float half_of_bits(u16 bits) {
#ifdef EMULATED
    return widen_half(bits);
#else
    // As in the header cuda_fp16.h.
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

// The f16 number at an even address.
__device__ inline float half_at(const u8 *at) { return half_of_bits(*(const u16 *)at); }

// The bits of the f16 number that is nearest.
__device__ inline u16 half_of(float value) {
#ifdef EMULATED
    return narrow_half(value);
#else
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#endif
}

// The float formats.
struct F32 {
    static constexpr int BYTES = 4;
    __device__ static float widen(const u8 *row, u32 i) { return ((const float *)row)[i]; }
    __device__ static void narrow(u8 *row, u32 i, float value) { ((float *)row)[i] = value; }
};

struct F16 {
    static constexpr int BYTES = 2;
    __device__ static float widen(const u8 *row, u32 i) { return half_at(row + 2 * (u64)i); }
    __device__ static void narrow(u8 *row, u32 i, float value) { ((u16 *)row)[i] = half_of(value); }
};

struct Bf16 {
    static constexpr int BYTES = 2;
    __device__ static float widen(const u8 *row, u32 i) { return __uint_as_float((u32)((const u16 *)row)[i] << 16); }
};

// The pairwise sum of 16 lanes, in the first of them.
__device__ inline float sum_of_lanes(float sum) {
    for (int width = LANES / 2; width > 0; width /= 2) sum = add_rn(sum, __shfl_down_sync(ALL, sum, width, LANES));
    return sum;
}

// e^x in the same steps as on the CPU.
__device__ inline float exp_in_steps(float x) {
    const float round = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = add_rn(mul_rn(x, 1.44269504088896340736f), round);
    float n = sub_rn(shifted, round);
    float r = sub_rn(sub_rn(x, mul_rn(n, 0.6933594f)), mul_rn(n, -2.1219444e-4f));
    const float c[7] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
    float p = 1.0f / 5040.0f;
    for (int i = 0; i < 7; i++) p = add_rn(mul_rn(p, r), c[i]);
    u32 power = (__float_as_uint(shifted) - __float_as_uint(round) + 127u) << 23;
    return mul_rn(p, __uint_as_float(power));
}

// factor * value. Plus zero, as on the CPU: it turns -0 into 0.
__device__ inline float scaled(float value, float factor) {
    return factor != 1.0f ? add_rn(mul_rn(value, factor), 0.0f) : value;
}

// The sum of the terms at(0), at(1), …, for all threads of a warp: in eight interleaved lanes, these in order. Thread i asks for the terms i,
// i + 32, …, each once.
template <typename At> __device__ float sum_of_terms(At at, u32 width) {
    u32 lane = threadIdx.x % WARP;
    float sum = 0.0f;
#pragma unroll 4
    for (u32 from = 0; from < width; from += WARP) {
        float own = from + lane < width ? at(from + lane) : 0.0f;
        for (u32 chunk = 0; chunk < WARP; chunk += SUM_LANES) {
            u32 other = chunk + lane % SUM_LANES;
            float term = __shfl_sync(ALL, own, other);
            if (from + other < width) sum = add_rn(sum, term);
        }
    }
    float all = 0.0f;
    for (u32 i = 0; i < SUM_LANES; i++) all = add_rn(all, __shfl_sync(ALL, sum, i));
    return all;
}

// The sum of the squares of the values at(0), at(1), …, for all threads of a warp.
template <typename At> __device__ float sum_of_squares(At at, u32 width) {
    auto square = [&at](u32 i) {
        float value = at(i);
        return mul_rn(value, value);
    };
    return sum_of_terms(square, width);
}

// 1 / sqrt(mean(x^2) + eps) of the values at(0), at(1), …, for all threads of a warp.
template <typename At> __device__ float rms_scale(At at, u32 width, double eps) {
    return (float)(1.0 / sqrt((double)sum_of_squares(at, width) / (double)width + eps));
}

// Quantises the values of a warp. Every thread has one of a block.
__device__ inline void quantise_block(float value, Block &out) {
    u32 lane = threadIdx.x % WARP;
    // The bits of magnitudes are in the order of magnitudes, with NaN last.
    u32 amax_bits = __float_as_uint(fabsf(value));
    for (int step = 16; step > 0; step /= 2) {
        u32 other = __shfl_xor_sync(ALL, amax_bits, step);
        amax_bits = other > amax_bits ? other : amax_bits;
    }
    float amax = __uint_as_float(amax_bits), d = div_rn(amax, 127.0f), inverse = div_rn(127.0f, amax);
    if (!isfinite(amax)) {
        d = __uint_as_float(0x7FC00000u);
        inverse = 0.0f;
    } else if (!isfinite(inverse)) {
        d = inverse = 0.0f;
    }
    // NaN becomes the integer 0.
    float scaled = mul_rn(value, inverse);
    int q = scaled == scaled ? (int)rintf(scaled) : 0;
    int sum = q;
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    int other = __shfl_xor_sync(ALL, sum, 16), whole = sum + other;
    ((signed char *)out.q)[lane] = (signed char)q;
    if (lane == 0) {
        out.d = d;
        out.sum = (float)whole;
        out.halves[0] = (float)sum;
        out.halves[1] = (float)other;
        out.raised = -128 * whole;
        out.raised_halves[0] = -128 * sum;
        out.raised_halves[1] = -128 * other;
        out.zero = 0;
    }
}

__device__ inline u32 index_of_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// The number of the group of rows that this warp computes.
__device__ inline u32 group_of_warp() { return blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP; }

// The product that this group belongs to: the last one whose first group is not after it. An empty product has the
// first group of the next one.
__device__ inline const ProductKernelArgs *find(const ProductKernelArgs *products, u32 count, u32 group) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (products[middle].first_group <= group) low = middle;
        else high = middle;
    }
    return &products[low];
}
