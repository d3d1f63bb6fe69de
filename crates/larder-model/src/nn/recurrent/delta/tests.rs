//! Both mixers against a plain model in f64, with sequences divided in several ways, and as chains on a device.

use super::*;
use crate::nn::sampled::{HIDDEN, RandomWeights, check};
use crate::ops::ChannelDecay;
use crate::weights::WeightLoader;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// The convolution of the inputs so far, after silu, for each of them; `kernel [channels, width]`.
fn convolved(kernel: &[f64], inputs: &[Vec<f64>], width: usize) -> Vec<Vec<f64>> {
    let tap = |t: usize, c: usize, back: usize| match t.checked_sub(back) {
        Some(at) => inputs[at][c] * kernel[c * width + width - 1 - back],
        None => 0.0,
    };
    let sum = |t: usize, c: usize| silu((0..width).map(|back| tap(t, c, back)).sum::<f64>());
    (0..inputs.len()).map(|t| (0..inputs[t].len()).map(|c| sum(t, c)).collect()).collect()
}

/// One token, and one head of it.
struct Token {
    query: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
    decay: Vec<f64>,
    strength: f64,
}

/// The output of a head for the last token.
fn last(tokens: &[Token]) -> Vec<f64> {
    let unit = |x: &[f64]| -> Vec<f64> {
        let length = (x.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
        x.iter().map(|v| v / length).collect()
    };
    let (k_dim, v_dim) = (tokens[0].key.len(), tokens[0].value.len());
    let (mut state, mut out) = (vec![0.0; k_dim * v_dim], vec![]);
    for Token { query, key, value, decay, strength } in tokens {
        let (query, key) = (unit(query), unit(key));
        state.iter_mut().enumerate().for_each(|(at, m)| *m *= decay[at / v_dim]);
        out = vec![0.0; v_dim];
        for j in 0..v_dim {
            let known: f64 = (0..k_dim).map(|i| key[i] * state[i * v_dim + j]).sum();
            (0..k_dim).for_each(|i| state[i * v_dim + j] += key[i] * strength * (value[j] - known));
            out[j] = (0..k_dim).map(|i| query[i] * state[i * v_dim + j]).sum::<f64>() / (k_dim as f64).sqrt();
        }
    }
    out
}

/// The norm of the output of a head, times its gates.
fn gated(y: &[f64], weight: &[f64], gates: &[f64], function: impl Fn(f64) -> f64) -> Vec<f64> {
    let length = (y.iter().map(|v| v * v).sum::<f64>() / y.len() as f64 + 1e-5).sqrt();
    y.iter().zip(weight).zip(gates).map(|((y, w), z)| y / length * w * function(*z)).collect()
}

const HEADS: DeltaHeads = DeltaHeads { k_heads: 2, v_heads: 4, k_dim: 5, v_dim: 3, tiled: false };

/// The output of a Gated DeltaNet for the last token.
fn plain_gated(weights: &RandomWeights, tokens: &[Vec<f64>], heads: DeltaHeads) -> Vec<f64> {
    let DeltaHeads { k_heads, v_heads, k_dim, v_dim, tiled } = heads;
    let rows = |name: &str| -> Vec<Vec<f64>> { tokens.iter().map(|x| weights.product(name, x)).collect() };
    let [mixed, z, b, a] = ["m.in_proj_qkv", "m.in_proj_z", "m.in_proj_b", "m.in_proj_a"].map(rows);
    let mixed = convolved(&weights.f64("m.conv1d.weight"), &mixed, 4);
    let (log, bias) = (weights.f64("m.A_log"), weights.f64("m.dt_bias"));
    let mut all = Vec::new();
    for head in 0..v_heads {
        let of_key = if tiled { head % k_heads } else { head * k_heads / v_heads } * k_dim;
        let token = |t: usize| Token {
            query: mixed[t][of_key..][..k_dim].to_vec(),
            key: mixed[t][k_heads * k_dim + of_key..][..k_dim].to_vec(),
            value: mixed[t][2 * k_heads * k_dim + head * v_dim..][..v_dim].to_vec(),
            decay: vec![(-log[head].exp() * (a[t][head] + bias[head]).exp().ln_1p()).exp(); k_dim],
            strength: sigmoid(b[t][head]),
        };
        let y = last(&(0..tokens.len()).map(token).collect::<Vec<_>>());
        all.extend(gated(&y, &weights.f64("m.norm.weight"), &z[tokens.len() - 1][head * v_dim..], silu));
    }
    weights.product("m.out_proj", &all)
}

#[test]
fn gated_delta_net_follows_the_definition_in_chunks_of_any_size() {
    for tiled in [false, true] {
        let heads = DeltaHeads { tiled, ..HEADS };
        let shape = DeltaShape { heads, conv: 4, form: DeltaForm::Separate, gate: GateFunction::Silu };
        let build = move |weights: &mut WeightLoader| GatedDeltaNet::new(weights, "m", HIDDEN, shape, 1e-5);
        check(build, |weights, tokens| plain_gated(weights, tokens, heads));
    }
}

const KIMI: KimiDeltaShape = KimiDeltaShape {
    hidden: HIDDEN,
    heads: 3,
    dim: 4,
    conv: 3,
    act: Activation::Silu,
    low_rank: true,
    decay: ChannelDecay::Softplus,
    eps: 1e-5,
    output: "o_proj",
};

/// The output of Kimi Delta Attention for the last token.
fn plain_kimi(weights: &RandomWeights, tokens: &[Vec<f64>], shape: KimiDeltaShape) -> Vec<f64> {
    let KimiDeltaShape { heads, dim, conv, low_rank, decay, .. } = shape;
    let rows = |name: &str| -> Vec<Vec<f64>> { tokens.iter().map(|x| weights.product(name, x)).collect() };
    let factored = |name: &str| -> Vec<Vec<f64>> {
        let of_rank = |x: &Vec<f64>| weights.product(&format!("m.{name}_b_proj"), x);
        if low_rank {
            rows(&format!("m.{name}_a_proj")).iter().map(of_rank).collect()
        } else {
            rows(&format!("m.{name}_proj"))
        }
    };
    let part = |name: &str| {
        let kernel = weights.f64(&format!("m.{name}_conv1d.weight"));
        convolved(&kernel, &rows(&format!("m.{name}_proj")), conv)
    };
    let ([q, k, v], b, f, z) = (["q", "k", "v"].map(part), rows("m.b_proj"), factored("f"), factored("g"));
    let (log, bias) = (weights.f64("m.A_log"), weights.f64("m.dt_bias"));
    let mut all = Vec::new();
    for head in 0..heads {
        let own = head * dim..(head + 1) * dim;
        let decay_of = |f: f64| match decay {
            ChannelDecay::Softplus => (-log[head].exp() * f.exp().ln_1p()).exp(),
            ChannelDecay::Bounded(bound) => (f64::from(bound) * sigmoid(log[head].exp() * f)).exp(),
        };
        let token = |t: usize| Token {
            query: q[t][own.clone()].to_vec(),
            key: k[t][own.clone()].to_vec(),
            value: v[t][own.clone()].to_vec(),
            decay: own.clone().map(|at| decay_of(f[t][at] + bias[at])).collect(),
            strength: sigmoid(b[t][head]),
        };
        let y = last(&(0..tokens.len()).map(token).collect::<Vec<_>>());
        all.extend(gated(&y, &weights.f64("m.o_norm.weight"), &z[tokens.len() - 1][own], sigmoid));
    }
    weights.product("m.o_proj", &all)
}

#[test]
fn kimi_delta_attention_follows_the_definition_in_chunks_of_any_size() {
    let bounded = KimiDeltaShape { low_rank: false, decay: ChannelDecay::Bounded(-5.0), conv: 2, ..KIMI };
    for shape in [KIMI, bounded] {
        let build = move |weights: &mut WeightLoader| KimiDelta::new(weights, "m", shape, &[shape.heads]);
        check(build, |weights, tokens| plain_kimi(weights, tokens, shape));
    }
}
