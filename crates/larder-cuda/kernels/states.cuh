// Recurrent states, and the windows of convolutions in them.
#pragma once
#include "activations.cuh"

// Consecutive tokens of a sequence, and its state: the window of the convolution, then the state of the recurrence.
struct StateSpan {
    float *state;
    u32 first_row;
    u32 tokens;
};
static_assert(sizeof(StateSpan) == 16, "must match the layout in Rust");

// What a convolution reads of one channel.
struct Channel {
    const float *input;
    // Values from one token to the next.
    u32 stride;
    // The column in the window.
    float *window;
    u32 channels;
    // Inputs in the window.
    u32 kept;

    // The input at token `token - kept` of the span.
    __device__ float at(u32 token) const {
        return token < kept ? window[(u64)token * channels] : input[(u64)(token - kept) * stride];
    }

    // Writes the window after `tokens` tokens to a column.
    __device__ void write_window(u32 tokens, float *out) const {
        for (u32 i = 0; i < kept; i++) out[(u64)i * channels] = at(tokens + i);
    }
};
