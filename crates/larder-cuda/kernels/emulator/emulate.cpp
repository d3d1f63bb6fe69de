// The kernels on a CPU, for tests on machines without a GPU: one warp at a time, its 32 lanes as coroutines.
//
// A lane runs until it needs a value of another lane; then the next lane runs, and so on in a circle. So the lanes of a
// warp synchronise where they do on a GPU. Warps and blocks, whose order is unspecified, run one after another, or up to where they wait
// for the other warps of their block. The caller runs one kernel at a time.
//
// c++ -std=c++20 -O2 -ffp-contract=off -shared -fPIC -fsanitize=alignment -fsanitize-undefined-trap-on-error -I FOLDER emulate.cpp
//
// FOLDER has the code books in code_books.cuh, which the crate writes. With -mfma fused operations are instructions, not calls.
#include "lanes.hpp"
#include <cmath>
#include <utility>

// ---- Keywords and functions of CUDA ----

#define EMULATED
#define __device__
#define __global__
#define __align__(n) alignas(n)
#define __launch_bounds__(threads)
#define gridDim (emulator::gpu.grid)
#define blockDim (emulator::gpu.block)
#define blockIdx (emulator::gpu.block_index)
#define threadIdx (emulator::gpu.thread_index)

namespace {

using std::exp;
using std::isfinite;
using std::sqrt;

template <typename To, typename From> To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

int min(int a, int b) { return b < a ? b : a; }
unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }

float __fmul_rn(float a, float b) { return a * b; }
float __fadd_rn(float a, float b) { return a + b; }
float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
float __fsub_rn(float a, float b) { return a - b; }
float __fdiv_rn(float a, float b) { return a / b; }
float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }

int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; i++) sum += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
    return sum;
}

int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Four of the bytes of a (the first four) and b, each chosen by three bits of the selector.
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned chosen = 0;
    for (int i = 0; i < 4; i++) {
        unsigned place = selector >> 4 * i & 15;
        if (place > 7) emulator::fail("a selector asks for the sign of a byte, which is not emulated");
        chosen |= (unsigned)(bytes >> 8 * place & 255) << 8 * i;
    }
    return chosen;
}

float widen_half(unsigned short half) {
    unsigned sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    return __uint_as_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

// Rounds to the nearest number, to an even one in the middle.
unsigned short narrow_half(float value) {
    unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return sign | 0x7E00u | (size >> 13 & 0x3FFu);
    if (size >= 0x477FF000u) return sign | 0x7C00u;
    if (size < 0x38800000u) return sign | (unsigned)std::rint(std::fabs(value) * 0x1p24f);
    return sign | (size - 0x38000000u + 0xFFFu + (size >> 13 & 1)) >> 13;
}

template <typename T> T __shfl_sync(unsigned, T value, int lane) { return emulator::exchange(value, lane % 32); }

template <typename T> T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulator::exchange(value, emulator::gpu.warp->lane ^ mask);
}

double __shfl_xor_sync(unsigned all, double value, int mask) {
    uint64_t bits = same_bits<uint64_t>(value);
    uint64_t low = __shfl_xor_sync(all, (unsigned)bits, mask), high = __shfl_xor_sync(all, (unsigned)(bits >> 32), mask);
    return same_bits<double>(high << 32 | low);
}

// A lane whose source would be outside its segment of the warp keeps its own value.
template <typename T> T __shfl_down_sync(unsigned, T value, unsigned by, unsigned width) {
    unsigned lane = emulator::gpu.warp->lane;
    return emulator::exchange(value, lane % width + by < width ? lane + by : lane);
}

// A bit for each lane.
unsigned __ballot_sync(unsigned, int is_set) {
    const uint32_t own[1] = {is_set ? 1u : 0u};
    auto words = emulator::publish(own);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < emulator::LANES_OF_WARP; lane++) bits |= words[lane][0] << lane;
    return bits;
}

// The instruction mma.m16n8k32 for signed bytes, as the PTX manual places the fragments: byte i of a[2 * h + r] is of row lane / 4 + 8 * r
// and column 4 * (lane % 4) + 16 * h + i, byte i of b[h] of the same column and of row lane / 4; sums[2 * r + c] is of row lane / 4 + 8 * r
// of a, and row 2 * (lane % 4) + c of b.
void emulated_mma(int (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const uint32_t own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    unsigned lane = emulator::gpu.warp->lane;
    auto words = emulator::publish(own);
    for (int r = 0; r < 2; r++) {
        for (int c = 0; c < 2; c++) {
            int sum = 0;
            for (unsigned from = 0; from < 4; from++) {
                const uint32_t *of_a = words[lane / 4 * 4 + from], *of_b = words[(lane % 4 * 2 + c) * 4 + from];
                for (int h = 0; h < 2; h++) {
                    for (int i = 0; i < 4; i++) sum += (int8_t)(of_a[2 * h + r] >> 8 * i) * (int8_t)(of_b[4 + h] >> 8 * i);
                }
            }
            sums[2 * r + c] = sum;
        }
    }
}

// The instruction mma.m16n8k16 for halves with single-precision sums: half i of a[2 * h + r] is of row lane / 4 + 8 * r and column
// 2 * (lane % 4) + 8 * h + i, half i of b[h] of the same column and of row lane / 4; sums as above. Devices round the sums of products as
// they like; here they are rounded once.
void emulated_half_mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const uint32_t own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    unsigned lane = emulator::gpu.warp->lane;
    auto words = emulator::publish(own);
    for (int r = 0; r < 2; r++) {
        for (int c = 0; c < 2; c++) {
            double sum = sums[2 * r + c];
            for (unsigned from = 0; from < 4; from++) {
                const uint32_t *of_a = words[lane / 4 * 4 + from], *of_b = words[(lane % 4 * 2 + c) * 4 + from];
                for (int h = 0; h < 2; h++) {
                    for (int i = 0; i < 2; i++) {
                        sum += (double)widen_half(of_a[2 * h + r] >> 16 * i) * widen_half(of_b[4 + h] >> 16 * i);
                    }
                }
            }
            sums[2 * r + c] = (float)sum;
        }
    }
}

float emulated_exp2(float x) { return std::exp2(x); }

void __syncwarp() { emulator::exchange(0, 0); }

void __syncthreads() { emulator::wait_for_block(); }

unsigned atomicXor(unsigned *at, unsigned value) {
    unsigned before = *at;
    *at = before ^ value;
    return before;
}

unsigned atomicAdd(unsigned *at, unsigned value) {
    unsigned before = *at;
    *at = before + value;
    return before;
}

#include "../attention.cu"
#include "../flash.cu"
#include "../new_heads.cu"
#include "../elementwise.cu"
#include "../small_blocks.cu"
#include "../large_blocks.cu"
#include "../code_books.cu"
#include "../floats.cu"
#include "../rows.cu"
#include "../routing.cu"
#include "../sampling.cu"
#include "../recurrent.cu"
#include "../cca.cu"
#include "../topk_rows.cu"
#include "../hyper_connections.cu"

// ---- Launches ----

template <typename... A, size_t... I>
void call_with(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*(A *)arguments[I]...);
}

template <typename... A> void call(void (*kernel)(A...), void **arguments) {
    call_with(kernel, arguments, std::index_sequence_for<A...>());
}

struct Kernel {
    const char *name;
    void (*call)(void **arguments);
};

#define KERNEL(name) {#name, [](void **arguments) { call(name, arguments); }}
#define FORMAT(name) KERNEL(name##_matvec), KERNEL(name##_matmul), KERNEL(name##_tiles), KERNEL(name##_row)

constexpr Kernel KERNELS[] = {
    FORMAT(q8_0), FORMAT(q4_0), FORMAT(q4_1), FORMAT(q5_0),
    FORMAT(q5_1), FORMAT(iq4_nl), FORMAT(mxfp4), FORMAT(q2_k),
    FORMAT(q3_k), FORMAT(q4_k), FORMAT(q5_k), FORMAT(q6_k),
    FORMAT(iq4_xs), FORMAT(nvfp4), FORMAT(iq3_xxs), FORMAT(iq3_s),
    FORMAT(iq2_xxs), FORMAT(iq2_xs), FORMAT(iq2_s), FORMAT(q2_0),
    FORMAT(tq2_0), FORMAT(q1_0), FORMAT(iq1_s), FORMAT(iq1_m),
    FORMAT(tq1_0),
    KERNEL(f32_matmul), KERNEL(f16_matmul), KERNEL(bf16_matmul), KERNEL(f32_row), KERNEL(f16_row), KERNEL(bf16_row),
    KERNEL(silu), KERNEL(relu), KERNEL(relu2), KERNEL(gelu), KERNEL(gelu_tanh),
    KERNEL(silu_alone), KERNEL(relu_alone), KERNEL(relu2_alone), KERNEL(gelu_alone), KERNEL(gelu_tanh_alone),
    KERNEL(clamped_swiglu), KERNEL(clamped_silu), KERNEL(limited_silu),
    KERNEL(quantise), KERNEL(add_biases), KERNEL(read_all),
    KERNEL(scores_f32), KERNEL(scores_f16), KERNEL(scores_q8_0),
    KERNEL(weighted_sum_f32), KERNEL(weighted_sum_f16), KERNEL(weighted_sum_q8_0),
    KERNEL(partial_sums_f32), KERNEL(partial_sums_f16), KERNEL(partial_sums_q8_0), KERNEL(add_partial_sums), KERNEL(add_bias),
    KERNEL(flash_f32), KERNEL(flash_f16), KERNEL(flash_q8_0),
    KERNEL(copy_rows), KERNEL(copy_bytes), KERNEL(add_scaled), KERNEL(add_norm), KERNEL(rms_norm), KERNEL(sum_experts),
    KERNEL(sum_experts_norm), KERNEL(choose_experts), KERNEL(take_row), KERNEL(best_of_slices), KERNEL(collect_best), KERNEL(weigh_slices), KERNEL(draw_token), KERNEL(change_logits), KERNEL(take_out), KERNEL(layer_norm), KERNEL(scan_channels), KERNEL(scale_columns), KERNEL(side_by_side), KERNEL(scale_inputs),
    KERNEL(softcap), KERNEL(gate_values), KERNEL(convolve), KERNEL(delta_rule), KERNEL(delta_rule_wide), KERNEL(scan_states), KERNEL(norm_gate),
    KERNEL(new_heads_f32), KERNEL(new_heads_f16), KERNEL(new_heads_q8_0),
    KERNEL(index_scores_f32), KERNEL(index_scores_f16), KERNEL(index_scores_q8_0), KERNEL(choose_rows), KERNEL(best_of_blocks),
    KERNEL(pool_blocks_f32), KERNEL(pool_blocks_f16), KERNEL(pool_blocks_q8_0),
    KERNEL(stream_weights), KERNEL(read_streams), KERNEL(write_streams), KERNEL(stream_gates), KERNEL(gated_mean), KERNEL(add_scaled_sides), KERNEL(gate_by_keys),
    KERNEL(convolve_heads), KERNEL(mix_heads),
};

} // namespace

// Runs a kernel to its end. Returns 0, or 1 if no kernel has this name. `arguments` are pointers to the values of the
// arguments; device addresses are plain addresses.
extern "C" int larder_launch(const char *name, unsigned grid_x, unsigned grid_y, unsigned block, void **arguments) {
    for (const Kernel &kernel : KERNELS) {
        if (strcmp(kernel.name, name) != 0) continue;
        emulator::gpu.call = kernel.call;
        emulator::gpu.arguments = arguments;
        emulator::run_grid(emulator::gpu, grid_x, grid_y, block);
        return 0;
    }
    return 1;
}
