// Element-wise kernels between products: biases, activation functions, quantisation. Also the kernel that measures
// memory bandwidth, and the one that makes short copies between the device and main memory.
#include "activations.cuh"

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

// x = cap * tanh(x / cap)
extern "C" __global__ void softcap(float *x, u32 count, float cap) {
    u32 i = index_of_thread();
    if (i < count) x[i] = mul_rn(tanh_in_steps(div_rn(x[i], cap)), cap);
}

// Values times a function of their gates, of which each is for `shared` consecutive values.
extern "C" __global__ void gate_values(
    const float *x, const float *gates, float *out, Block *blocks, u32 count, u32 shared, u32 function) {
    u32 i = index_of_thread();
    if (i < count) store(mul_rn(x[i], gate_of(gates[i / shared], function)), out, blocks);
}

// Adds the bias of each product to every token. The grid's y is the product.
extern "C" __global__ void add_biases(const BiasKernelArgs *biases) {
    BiasKernelArgs args = biases[blockIdx.y];
    u32 i = index_of_thread();
    if (args.bias && i < args.tokens * args.cols) args.out[i] = add_rn(args.out[i], args.bias[i % args.cols]);
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
