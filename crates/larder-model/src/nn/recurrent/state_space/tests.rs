//! Both mixers against a plain model in f64, and with sequences divided in several ways.

use super::*;
use crate::error::Result;
use crate::nn::sampled::{HIDDEN, RandomWeights, check};
use crate::ops::Activation;
use crate::weights::WeightLoader;

/// The convolution of the inputs so far, after its activation function, for the last of them.
fn convolved(drawn: &RandomWeights, inputs: &[Vec<f64>], width: usize) -> Vec<f64> {
    let (kernel, bias) = (drawn.f64("m.conv1d.weight"), drawn.f64("m.conv1d.bias"));
    let tap = |c: usize, back: usize| match inputs.len().checked_sub(back + 1) {
        Some(at) => inputs[at][c] * kernel[c * width + width - 1 - back],
        None => 0.0,
    };
    let sum = |c: usize| (0..width).map(|back| tap(c, back)).sum::<f64>() + bias.get(c).unwrap_or(&0.0);
    (0..inputs[0].len()).map(|c| silu(sum(c))).collect()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn mamba2(shape: Mamba2Shape) -> impl Fn(&mut WeightLoader) -> Result<Mamba2> {
    move |weights| Mamba2::new(weights, "m", HIDDEN, shape)
}

const SHAPE2: Mamba2Shape = Mamba2Shape {
    heads: 4,
    head_dim: 3,
    groups: 2,
    state: 11,
    conv: 4,
    conv_bias: true,
    bias: true,
    act: Activation::Silu,
    dt_limits: [0.3, 0.9],
    eps: 1e-5,
};

/// The output of Mamba 2 for the last token.
fn plain_mamba2(weights: &RandomWeights, tokens: &[Vec<f64>], shape: Mamba2Shape) -> Vec<f64> {
    let Mamba2Shape { heads, head_dim, groups, state, conv, dt_limits, eps, .. } = shape;
    let (inner, both) = (heads * head_dim, groups * state);
    let products: Vec<Vec<f64>> = tokens.iter().map(|x| weights.product("m.in_proj", x)).collect();
    let mixed: Vec<Vec<f64>> = products.iter().map(|row| row[inner..2 * inner + 2 * both].to_vec()).collect();
    let (a, bias, d) = (weights.f64("m.A_log"), weights.f64("m.dt_bias"), weights.f64("m.D"));
    let (mut states, mut y) = (vec![0.0; inner * state], vec![0.0; inner]);
    for (t, row) in products.iter().enumerate() {
        let xbc = convolved(weights, &mixed[..=t], conv);
        for head in 0..heads {
            let dt = (row[2 * inner + 2 * both + head] + bias[head]).exp().ln_1p();
            let dt = dt.clamp(f64::from(dt_limits[0]), f64::from(dt_limits[1]));
            let group = head / (heads / groups) * state;
            for r in head * head_dim..(head + 1) * head_dim {
                y[r] = d[head] * xbc[r];
                for n in 0..state {
                    let m = &mut states[r * state + n];
                    *m = *m * (-a[head].exp() * dt).exp() + dt * xbc[inner + group + n] * xbc[r];
                    y[r] += *m * xbc[inner + both + group + n];
                }
            }
        }
    }
    let z = &products[products.len() - 1][..inner];
    let (gated, norm): (Vec<f64>, _) =
        (y.iter().zip(z).map(|(y, z)| y * silu(*z)).collect(), weights.f64("m.norm.weight"));
    let width = inner / groups;
    let ones = |x: &[f64]| (x.iter().map(|v| v * v).sum::<f64>() / width as f64 + eps).sqrt();
    let normed: Vec<f64> = gated.chunks(width).flat_map(|x| x.iter().map(move |v| v / ones(x))).collect();
    weights.product("m.out_proj", &normed.iter().zip(norm).map(|(x, w)| x * w).collect::<Vec<_>>())
}

#[test]
fn mamba_2_follows_the_definition_in_chunks_of_any_size() {
    let one_group = Mamba2Shape { groups: 1, conv: 2, conv_bias: false, bias: false, ..SHAPE2 };
    for shape in [SHAPE2, Mamba2Shape { groups: 4, state: 16, dt_limits: [0.0, f32::INFINITY], ..SHAPE2 }, one_group] {
        check(mamba2(shape), |weights, tokens| plain_mamba2(weights, tokens, shape));
    }
}

const SHAPE1: Mamba1Shape = Mamba1Shape {
    inner: 70,
    state: 5,
    rank: 3,
    conv: 4,
    conv_bias: true,
    bias: true,
    act: Activation::Silu,
    eps: 1e-6,
};

/// The output of Mamba 1 for the last token.
fn plain_mamba1(weights: &RandomWeights, tokens: &[Vec<f64>], shape: Mamba1Shape) -> Vec<f64> {
    let Mamba1Shape { inner, state, rank, conv, eps, .. } = shape;
    let products: Vec<Vec<f64>> = tokens.iter().map(|x| weights.product("m.in_proj", x)).collect();
    let raw: Vec<Vec<f64>> = products.iter().map(|row| row[..inner].to_vec()).collect();
    let (a, d) = (weights.f64("m.A_log"), weights.f64("m.D"));
    let (mut states, mut y) = (vec![0.0; inner * state], vec![0.0; inner]);
    for t in 0..tokens.len() {
        let x = convolved(weights, &raw[..=t], conv);
        let rates = weights.product("m.x_proj", &x);
        let dt = weights.product("m.dt_proj", &weights.normed("m.dt_layernorm.weight", &rates[..rank], eps));
        let b = weights.normed("m.b_layernorm.weight", &rates[rank..rank + state], eps);
        let c = weights.normed("m.c_layernorm.weight", &rates[rank + state..], eps);
        for r in 0..inner {
            let dt = dt[r].exp().ln_1p();
            y[r] = d[r] * x[r];
            for n in 0..state {
                let m = &mut states[r * state + n];
                *m = *m * (-a[r * state + n].exp() * dt).exp() + dt * b[n] * x[r];
                y[r] += *m * c[n];
            }
        }
    }
    let z = &products[products.len() - 1][inner..];
    weights.product("m.out_proj", &y.iter().zip(z).map(|(y, z)| y * silu(*z)).collect::<Vec<_>>())
}

#[test]
fn mamba_1_follows_the_definition_in_chunks_of_any_size() {
    for shape in [SHAPE1, Mamba1Shape { inner: 7, state: 16, conv: 1, conv_bias: false, bias: false, ..SHAPE1 }] {
        let build = move |weights: &mut WeightLoader| Mamba1::new(weights, "m", HIDDEN, shape);
        check(build, |weights, tokens| plain_mamba1(weights, tokens, shape));
    }
}

#[test]
fn impossible_sizes_are_refused() {
    let refused = |shape: Mamba2Shape| shape.checked("n_groups").err().expect("an error").to_string();
    let huge = Mamba2Shape { heads: 1 << 24, head_dim: 1 << 24, state: 1 << 24, groups: 1, ..SHAPE2 };
    assert!(refused(huge).contains("too large"));
    assert!(refused(Mamba2Shape { groups: 3, ..SHAPE2 }).contains("n_groups 3 is not a divisor of 4 heads"));
    assert!(SHAPE2.checked("n_groups").is_ok());
}
