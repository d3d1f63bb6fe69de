// Element-wise kernels between products: biases, activation functions, quantisation. Also the kernel that measures
// memory bandwidth, and the one that makes short copies between the device and main memory.
#include "common.cuh"

// The error function in the same steps as on the CPU.
__device__ inline float erf_in_steps(float x) {
    float size = fabsf(x), square = mul_rn(x, x);
    if (size < 0.75f) {
        const float c[7] = {1.0f / 9360.0f, -1.0f / 1320.0f, 1.0f / 216.0f, -1.0f / 42.0f, 0.1f, -1.0f / 3.0f, 1.0f};
        float p = -1.0f / 75600.0f;
        for (int i = 0; i < 7; i++) p = add_rn(mul_rn(p, square), c[i]);
        return mul_rn(mul_rn(1.12837916709551257390f, x), p);
    }
    float t = div_rn(1.0f, add_rn(1.0f, mul_rn(0.5f, size)));
    const float c[4] = {0.5704438f, 0.01669021f, 0.34727642f, 0.2747535f};
    float p = -0.20925336f;
    for (int i = 0; i < 4; i++) p = add_rn(mul_rn(p, t), c[i]);
    float whole = sub_rn(1.0f, mul_rn(mul_rn(p, t), exp_in_steps(-square)));
    return x < 0.0f ? -whole : whole;
}

// The hyperbolic tangent in the same steps as on the CPU.
__device__ inline float tanh_in_steps(float x) {
    float size = fabsf(x), square = mul_rn(x, x);
    if (size < 0.7f) {
        float above = add_rn(mul_rn(add_rn(square, 105.0f), square), 945.0f);
        float below = add_rn(mul_rn(add_rn(mul_rn(15.0f, square), 420.0f), square), 945.0f);
        return mul_rn(x, div_rn(above, below));
    }
    float whole = sub_rn(1.0f, div_rn(2.0f, add_rn(exp_in_steps(mul_rn(2.0f, size)), 1.0f)));
    return x < 0.0f ? -whole : whole;
}

__device__ inline float sigmoid(float x) { return div_rn(1.0f, add_rn(1.0f, exp_in_steps(-x))); }

__device__ inline float silu_of(float x) { return mul_rn(x, sigmoid(x)); }

// NaN stays NaN.
__device__ inline float relu_of(float x) { return x < 0.0f ? 0.0f : x; }

__device__ inline float relu2_of(float x) { return mul_rn(relu_of(x), relu_of(x)); }

__device__ inline float gelu_of(float x) {
    return mul_rn(mul_rn(0.5f, x), add_rn(1.0f, erf_in_steps(mul_rn(x, 0.70710678118654752440f))));
}

__device__ inline float gelu_tanh_of(float x) {
    float cube = mul_rn(mul_rn(mul_rn(0.044715f, x), x), x);
    return mul_rn(mul_rn(0.5f, x), add_rn(1.0f, tanh_in_steps(mul_rn(0.7978846f, add_rn(x, cube)))));
}

// Stores a result, and unless blocks is null also quantises it, with those of the other threads of the warp.
__device__ inline void store(float value, float *out, Block *blocks) {
    u32 i = index_of_thread();
    out[i] = value;
    if (blocks) quantise_block(value, blocks[i / BLOCK]);
}

// gate = f(gate) * up; and x = f(x), for experts without a gate. Unless blocks is null, the first quantises its results too; then count
// is a multiple of 32, as it is for the kernels below.
#define ACTIVATION(name)                                                                                               \
    extern "C" __global__ void name(float *gate, const float *up, u32 count, Block *blocks) {                          \
        u32 i = index_of_thread();                                                                                     \
        if (i < count) store(mul_rn(name##_of(gate[i]), up[i]), gate, blocks);                                         \
    }                                                                                                                  \
    extern "C" __global__ void name##_alone(float *x, u32 count) {                                                     \
        u32 i = index_of_thread();                                                                                     \
        if (i < count) x[i] = name##_of(x[i]);                                                                         \
    }

ACTIVATION(silu)
ACTIVATION(relu)
ACTIVATION(relu2)
ACTIVATION(gelu)
ACTIVATION(gelu_tanh)

// gate = (up + 1) * gate * sigmoid(alpha * gate), both clamped by limit first
extern "C" __global__ void clamped_swiglu(
    float *gate, const float *up, u32 count, Block *blocks, float alpha, float limit) {
    u32 i = index_of_thread();
    if (i >= count) return;
    float g = gate[i], u = up[i];
    g = g > limit ? limit : g;
    u = u < -limit ? -limit : u > limit ? limit : u;
    store(mul_rn(mul_rn(add_rn(u, 1.0f), g), sigmoid(mul_rn(alpha, g))), gate, blocks);
}

// gate = silu(gate) * up; the first is clamped by limit from above, the second on both sides
extern "C" __global__ void limited_silu(float *gate, const float *up, u32 count, Block *blocks, float limit) {
    u32 i = index_of_thread();
    if (i >= count) return;
    float g = silu_of(gate[i]), u = up[i];
    g = g > limit ? limit : g;
    u = u < -limit ? -limit : u > limit ? limit : u;
    store(mul_rn(g, u), gate, blocks);
}

// gate = silu(gate) * up, both clamped by limit first
extern "C" __global__ void clamped_silu(float *gate, const float *up, u32 count, Block *blocks, float limit) {
    u32 i = index_of_thread();
    if (i >= count) return;
    float g = gate[i], u = up[i];
    g = g > limit ? limit : g;
    u = u < -limit ? -limit : u > limit ? limit : u;
    store(mul_rn(silu_of(g), u), gate, blocks);
}

// The arguments of adding the bias of one product.
struct BiasKernelArgs {
    // [cols]
    const float *bias;
    // [tokens, cols]
    float *out;
    u32 tokens;
    u32 cols;
};
static_assert(sizeof(BiasKernelArgs) == 24, "must match the layout in Rust");

// Adds the bias of each product to every token. The grid's y is the product.
extern "C" __global__ void add_biases(const BiasKernelArgs *biases) {
    BiasKernelArgs args = biases[blockIdx.y];
    u32 i = index_of_thread();
    if (i < args.tokens * args.cols) args.out[i] = add_rn(args.out[i], args.bias[i % args.cols]);
}

// Quantises activations. A warp makes a block of 32 values.
extern "C" __global__ void quantise(const float *x, Block *out, u32 blocks) {
    u32 block = group_of_warp(), lane = threadIdx.x % WARP;
    if (block >= blocks) return;
    quantise_block(x[(u64)block * BLOCK + lane], out[block]);
}

struct __align__(16) Chunk16 {
    u32 words[4];
};

// Reads all bytes, from an address that is a multiple of 16. The word of each block in out is XORed with all words that
// the block has read; each byte of the tail counts as a word.
extern "C" __global__ void read_all(const u8 *from, u64 bytes, u32 *out) {
    const Chunk16 *pieces = (const Chunk16 *)from;
    u64 all = bytes / sizeof(Chunk16), threads = (u64)gridDim.x * blockDim.x;
    u32 word = 0;
#pragma unroll 8
    for (u64 i = index_of_thread(); i < all; i += threads) {
        Chunk16 piece = pieces[i];
        word ^= piece.words[0] ^ piece.words[1] ^ piece.words[2] ^ piece.words[3];
    }
    u64 tail = all * sizeof(Chunk16) + index_of_thread();
    if (tail < bytes) word ^= from[tail];
    for (int step = 16; step > 0; step /= 2) word ^= __shfl_xor_sync(ALL, word, step);
    if (threadIdx.x % WARP == 0) atomicXor(&out[blockIdx.x], word);
}

// Copies bytes between device memory and page-locked main memory, at addresses that are multiples of 16.
extern "C" __global__ void copy_bytes(const u8 *from, u8 *to, u64 bytes) {
    const Chunk16 *pieces = (const Chunk16 *)from;
    u64 all = bytes / sizeof(Chunk16), threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = index_of_thread(); i < all; i += threads) ((Chunk16 *)to)[i] = pieces[i];
    u64 tail = all * sizeof(Chunk16) + index_of_thread();
    if (tail < bytes) to[tail] = from[tail];
}
