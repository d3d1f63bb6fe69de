// The kernels on a CPU, for tests on machines without a GPU: one warp at a time, its 32 lanes as coroutines.
//
// A lane runs until it needs a value of another lane; then the next lane runs, and so on in a circle. So the lanes of a
// warp synchronise where they do on a GPU. Warps and blocks, whose order is unspecified, run one after another, or up to where they wait
// for the other warps of their block. Each thread of the CPU has an emulated GPU of its own.
//
// c++ -std=c++20 -O2 -ffp-contract=off -shared -fPIC -I FOLDER emulate.cpp
//
// FOLDER has the code books in code_books.cuh, which the crate writes.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define SWITCH_BY_UCONTEXT
#endif
#ifdef SWITCH_BY_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

[[noreturn]] void fail(const char *message) {
    fprintf(stderr, "emulated GPU: %s\n", message);
    abort();
}

// ---- Lanes: coroutines with a stack each ----

// The saved context of a suspended coroutine.
struct Context {
#ifdef SWITCH_BY_UCONTEXT
    ucontext_t ucontext;
#else
    void *stack;
#endif
};

#ifdef SWITCH_BY_UCONTEXT

void switch_to(Context &from, Context &to) { swapcontext(&from.ucontext, &to.ucontext); }

void prepare_context(Context &context, char *stack, size_t bytes, void (*entry)()) {
    getcontext(&context.ucontext);
    context.ucontext.uc_stack.ss_sp = stack;
    context.ucontext.uc_stack.ss_size = bytes;
    context.ucontext.uc_link = nullptr;
    makecontext(&context.ucontext, entry, 0);
}

#else

// Pushes the callee-saved registers, stores the stack pointer in *from, and restores both from the other stack.
// swapcontext would do so too, but with a system call for the signal mask each time.
extern "C" void larder_switch(void **from, void *to) __asm__("larder_switch") __attribute__((visibility("hidden")));

#if defined(__x86_64__)
constexpr size_t SAVED = 7 * 8, RETURN_AT = 6 * 8, ABOVE = 8;
__asm__(R"(
.text
larder_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
#else
constexpr size_t SAVED = 20 * 8, RETURN_AT = 11 * 8, ABOVE = 0;
__asm__(R"(
.text
.p2align 2
larder_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#endif

void switch_to(Context &from, Context &to) { larder_switch(&from.stack, to.stack); }

// Makes the context of a coroutine that is suspended before its first instruction.
void prepare_context(Context &context, char *stack, size_t bytes, void (*entry)()) {
    uintptr_t top = (uintptr_t)(stack + bytes) / 16 * 16;
    char *saved = (char *)(top - ABOVE - SAVED);
    memset(saved, 0, SAVED + ABOVE);
    memcpy(saved + RETURN_AT, &entry, sizeof entry);
    context.stack = saved;
}

#endif

// ---- Warps and blocks ----

constexpr unsigned LANES_OF_WARP = 32, MAX_WARPS = 32, WORDS_OF_EXCHANGE = 6;
constexpr size_t STACK_BYTES = 64 * 1024;

struct Dim {
    unsigned x, y, z;
};

// A warp of the block that is running.
struct Warp {
    Context lanes[LANES_OF_WARP];
    // The running lane, and how many have ended, or wait for the other warps of the block.
    unsigned lane, ended, waiting;
    // Two sets of exchanged values: a lane may reach the next exchange before others have read from this one.
    uint32_t values[2][LANES_OF_WARP][WORDS_OF_EXCHANGE];
    unsigned set;
    std::unique_ptr<char[]> stacks;
};

// The state of the block that is running, and the indices of the running lane.
struct Gpu {
    Dim grid, block, block_index, thread_index;
    void (*call)(void **);
    void **arguments;
    Context caller;
    Warp *warp;
};

thread_local Gpu gpu;

// The warps of a block; most kernels need the first only. Freed when the thread ends.
thread_local std::unique_ptr<Warp> warps[MAX_WARPS];

void resume_lane(Gpu &gpu, unsigned lane) {
    Warp &warp = *gpu.warp;
    Context &from = warp.lanes[warp.lane];
    gpu.thread_index.x += lane - warp.lane;
    warp.lane = lane;
    switch_to(from, warp.lanes[lane]);
}

// The loop of a lane: runs the kernel for one warp after another.
void lane_main() {
    Gpu &gpu = emulator::gpu;
    while (true) {
        gpu.call(gpu.arguments);
        Warp &warp = *gpu.warp;
        warp.ended++;
        if (warp.lane + 1 < LANES_OF_WARP) resume_lane(gpu, warp.lane + 1);
        else if (warp.ended == LANES_OF_WARP) switch_to(warp.lanes[warp.lane], gpu.caller);
        else fail("some lanes of a warp wait for lanes that have ended");
    }
}

// Runs a warp from where its first lane is, until all lanes have ended or wait for other warps.
void run_warp(Gpu &gpu, Warp &warp, unsigned first) {
    gpu.warp = &warp;
    gpu.thread_index = {first, 0, 0};
    warp.lane = warp.waiting = 0;
    switch_to(gpu.caller, warp.lanes[0]);
}

Warp &begin_warp(unsigned index) {
    std::unique_ptr<Warp> &warp = warps[index];
    if (!warp) {
        warp.reset(new Warp());
        warp->stacks.reset(new char[LANES_OF_WARP * STACK_BYTES]);
        for (unsigned i = 0; i < LANES_OF_WARP; i++) {
            prepare_context(warp->lanes[i], warp->stacks.get() + i * STACK_BYTES, STACK_BYTES, lane_main);
        }
    }
    warp->ended = 0;
    return *warp;
}

// Runs the warps of a block one after another. If the first waits for the others, all run up to there, and so on.
void run_block(Gpu &gpu, unsigned threads) {
    unsigned count = threads / LANES_OF_WARP, waiting = 0, ended = 0;
    for (unsigned i = 0; i < count; i++) {
        Warp &warp = begin_warp(waiting);
        run_warp(gpu, warp, i * LANES_OF_WARP);
        if (warp.ended == LANES_OF_WARP) ended++;
        else waiting++;
        if (waiting && ended) fail("some warps of a block wait for warps that have ended");
    }
    while (waiting) {
        ended = 0;
        for (unsigned i = 0; i < count; i++) {
            run_warp(gpu, *warps[i], i * LANES_OF_WARP);
            if (warps[i]->ended == LANES_OF_WARP) ended++;
        }
        if (ended == count) return;
        if (ended) fail("some warps of a block wait for warps that have ended");
    }
}

void run_grid(Gpu &gpu, unsigned grid_x, unsigned grid_y, unsigned block) {
    if (block % LANES_OF_WARP != 0) fail("the block size is not a multiple of the warp size");
    if (block > LANES_OF_WARP * MAX_WARPS) fail("a block has too many threads");
    gpu.grid = {grid_x, grid_y, 1};
    gpu.block = {block, 1, 1};
    for (unsigned y = 0; y < grid_y; y++) {
        for (unsigned x = 0; x < grid_x; x++) {
            gpu.block_index = {x, y, 0};
            run_block(gpu, block);
        }
    }
}

// Waits until all lanes of all warps of the block are here.
void wait_for_block() {
    Gpu &gpu = emulator::gpu;
    Warp &warp = *gpu.warp;
    if (warp.ended) fail("a lane waits for lanes that have ended");
    warp.waiting++;
    if (warp.lane + 1 < LANES_OF_WARP) resume_lane(gpu, warp.lane + 1);
    else if (warp.waiting == LANES_OF_WARP) switch_to(warp.lanes[warp.lane], gpu.caller);
    else fail("some lanes of a warp wait for its block, and others do not");
}

// Publishes words, waits until every lane has published its own, and returns those of all lanes.
template <size_t COUNT> const uint32_t (*publish(const uint32_t (&words)[COUNT]))[WORDS_OF_EXCHANGE] {
    static_assert(COUNT <= WORDS_OF_EXCHANGE);
    Gpu &gpu = emulator::gpu;
    Warp &warp = *gpu.warp;
    if (warp.ended) fail("a lane waits for lanes that have ended");
    if (warp.waiting) fail("a lane waits for lanes that wait for their block");
    if (warp.lane == 0) warp.set ^= 1;
    auto &values = warp.values[warp.set];
    memcpy(values[warp.lane], words, sizeof words);
    resume_lane(gpu, (warp.lane + 1) % LANES_OF_WARP);
    return values;
}

// Publishes a value, and returns that of lane_wanted.
template <typename T> T exchange(T value, unsigned lane_wanted) {
    static_assert(sizeof(T) == 4);
    uint32_t word[1];
    memcpy(word, &value, 4);
    T wanted;
    memcpy(&wanted, publish(word)[lane_wanted], 4);
    return wanted;
}

} // namespace emulator

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

// A lane whose source would be outside its segment of the warp keeps its own value.
template <typename T> T __shfl_down_sync(unsigned, T value, unsigned by, unsigned width) {
    unsigned lane = emulator::gpu.warp->lane;
    return emulator::exchange(value, lane % width + by < width ? lane + by : lane);
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
#define FORMAT(name) KERNEL(name##_matvec), KERNEL(name##_matmul), KERNEL(name##_tiles)

constexpr Kernel KERNELS[] = {
    FORMAT(q8_0), FORMAT(q4_0), FORMAT(q4_1), FORMAT(q5_0),
    FORMAT(q5_1), FORMAT(iq4_nl), FORMAT(mxfp4), FORMAT(q2_k),
    FORMAT(q3_k), FORMAT(q4_k), FORMAT(q5_k), FORMAT(q6_k),
    FORMAT(iq4_xs), FORMAT(nvfp4), FORMAT(iq3_xxs), FORMAT(iq3_s),
    FORMAT(iq2_xxs), FORMAT(iq2_xs), FORMAT(iq2_s), FORMAT(q2_0),
    FORMAT(tq2_0), FORMAT(q1_0), FORMAT(iq1_s), FORMAT(iq1_m),
    FORMAT(tq1_0),
    KERNEL(f32_matmul), KERNEL(f16_matmul), KERNEL(bf16_matmul),
    KERNEL(silu), KERNEL(relu), KERNEL(relu2), KERNEL(gelu), KERNEL(gelu_tanh),
    KERNEL(silu_alone), KERNEL(relu_alone), KERNEL(relu2_alone), KERNEL(gelu_alone), KERNEL(gelu_tanh_alone),
    KERNEL(clamped_swiglu), KERNEL(clamped_silu), KERNEL(limited_silu),
    KERNEL(quantise), KERNEL(add_biases), KERNEL(read_all),
    KERNEL(scores_f32), KERNEL(scores_f16), KERNEL(scores_q8_0),
    KERNEL(weighted_sum_f32), KERNEL(weighted_sum_f16), KERNEL(weighted_sum_q8_0),
    KERNEL(partial_sums_f32), KERNEL(partial_sums_f16), KERNEL(partial_sums_q8_0), KERNEL(add_partial_sums),
    KERNEL(flash_f32), KERNEL(flash_f16), KERNEL(flash_q8_0),
    KERNEL(copy_rows), KERNEL(copy_bytes), KERNEL(add_scaled), KERNEL(add_norm), KERNEL(rms_norm), KERNEL(sum_experts),
    KERNEL(sum_experts_norm), KERNEL(choose_experts), KERNEL(best_of_slices), KERNEL(collect_best), KERNEL(take_out), KERNEL(layer_norm), KERNEL(scan_channels), KERNEL(scale_columns), KERNEL(scale_inputs),
    KERNEL(bend), KERNEL(gate_values), KERNEL(convolve), KERNEL(delta_rule), KERNEL(delta_rule_wide), KERNEL(scan_states), KERNEL(norm_gate),
    KERNEL(new_heads_f32), KERNEL(new_heads_f16), KERNEL(new_heads_q8_0),
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
