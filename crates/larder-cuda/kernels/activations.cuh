// Functions of single values, in the same steps as on the CPU.
#pragma once
#include "common.cuh"

// What gates are passed through before values are multiplied by them.
enum GateFunction : u32 { GATE_SIGMOID, GATE_SILU, GATE_SOFTPLUS, GATE_IDENTITY };

// The error function.
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

// The hyperbolic tangent.
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

// ln(1 + e^x): max(x, 0) + ln(1 + t) with t = e^-|x|, and the logarithm as 2 artanh(t / (2 + t)).
__device__ inline float softplus_of(float x) {
    float t = exp_in_steps(-fabsf(x)), s = div_rn(t, add_rn(2.0f, t)), square = mul_rn(s, s);
    const float c[7] = {1.0f / 13.0f, 1.0f / 11.0f, 1.0f / 9.0f, 1.0f / 7.0f, 1.0f / 5.0f, 1.0f / 3.0f, 1.0f};
    float p = 1.0f / 15.0f;
    for (int i = 0; i < 7; i++) p = add_rn(mul_rn(p, square), c[i]);
    return add_rn(x < 0.0f ? 0.0f : x, mul_rn(mul_rn(2.0f, s), p));
}

// The value of a gate.
__device__ inline float gate_of(float x, u32 function) {
    if (function == GATE_IDENTITY) return x;
    return function == GATE_SIGMOID ? sigmoid(x) : function == GATE_SILU ? silu_of(x) : softplus_of(x);
}
