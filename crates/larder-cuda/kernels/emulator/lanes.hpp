// The lanes of the emulated GPU: coroutines, which synchronise where lanes do on a GPU, in warps and blocks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

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

// Blocks run one after another, and one kernel at a time: shared memory is static. Where a linker says where a section is, it has its own.
#ifdef __linux__
#define SHARED_IN_SECTION
#define __shared__ static __attribute__((section("larder_shared")))
extern "C" __attribute__((visibility("hidden"))) char __start_larder_shared[], __stop_larder_shared[];
#else
#define __shared__ static
#endif

constexpr unsigned LANES_OF_WARP = 32, MAX_WARPS = 32, WORDS_OF_EXCHANGE = 6;
constexpr unsigned MAX_GRID_Y = 65535;
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
    // How many blocks have run.
    unsigned blocks;
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

// Writes over the shared memory of the block before: what a block finds there is anything.
void spoil_shared() {
#ifdef SHARED_IN_SECTION
    memset(__start_larder_shared, 0xA5, __stop_larder_shared - __start_larder_shared);
#endif
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

// Runs the warps of a block one after another. If the first waits for the others, all run up to there, and so on. In every other block the
// last warp comes first, so that each kind of wait that a kernel leaves out is seen.
void run_block(Gpu &gpu, unsigned threads) {
    unsigned count = threads / LANES_OF_WARP, waiting = 0, ended = 0;
    bool backwards = gpu.blocks++ % 2;
    auto first_lane = [&](unsigned i) { return (backwards ? count - 1 - i : i) * LANES_OF_WARP; };
    spoil_shared();
    for (unsigned i = 0; i < count; i++) {
        Warp &warp = begin_warp(waiting);
        run_warp(gpu, warp, first_lane(i));
        if (warp.ended == LANES_OF_WARP) ended++;
        else waiting++;
        if (waiting && ended) fail("some warps of a block wait for warps that have ended");
    }
    while (waiting) {
        ended = 0;
        for (unsigned i = 0; i < count; i++) {
            run_warp(gpu, *warps[i], first_lane(i));
            if (warps[i]->ended == LANES_OF_WARP) ended++;
        }
        if (ended == count) return;
        if (ended) fail("some warps of a block wait for warps that have ended");
    }
}

void run_grid(Gpu &gpu, unsigned grid_x, unsigned grid_y, unsigned block) {
    if (grid_x == 0 || grid_y == 0 || grid_y > MAX_GRID_Y) fail("the grid has no blocks, or too many in y");
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
