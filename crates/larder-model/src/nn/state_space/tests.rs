//! Both mixers against a plain model in f64, and with sequences divided in several ways.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use larder_core::{CheckpointPolicy, NumberFormat, Rng, RowOrder, TensorMeta, TensorSpec, Tensors, TensorsError};

use super::*;
use crate::compute::ComputeContext;
use crate::nn::{Activation, ForwardPass, HandedOn, KvCache, KvFormat, KvPool, Mixer, SpanPositions};
use crate::read_ahead::ReadAhead;
use crate::step::{LayerStates, Span, TokenOrigin};
use crate::weights::WeightLoader;

const HIDDEN: usize = 6;

/// Drawn weights.
struct Drawn(BTreeMap<String, (TensorMeta, Vec<f32>)>);

impl Drawn {
    fn of(specs: Vec<TensorSpec>) -> Self {
        let mut rng = Rng::with_stream(7, 0);
        let mut draw = |spec: TensorSpec| {
            let count = spec.shape.iter().product::<usize>();
            let values = (0..count).map(|_| (2.0 * rng.unit() - 1.0) as f32).collect();
            let meta =
                TensorMeta { kind: NumberFormat::F32, order: RowOrder::Plain, shape: spec.shape, bytes: 4 * count };
            (spec.name, (meta, values))
        };
        Drawn(specs.into_iter().map(&mut draw).collect())
    }

    fn f64(&self, name: &str) -> Vec<f64> {
        self.0.get(name).map_or(vec![], |(_, values)| values.iter().map(|v| f64::from(*v)).collect())
    }

    /// `prefix.weight · x + prefix.bias`
    fn product(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        let (weight, bias) = (self.f64(&format!("{prefix}.weight")), self.f64(&format!("{prefix}.bias")));
        let rows = weight.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>());
        rows.enumerate().map(|(r, sum)| sum + bias.get(r).unwrap_or(&0.0)).collect()
    }

    /// The convolution of the inputs so far, behind its activation function, for the last of them.
    fn convolved(&self, inputs: &[Vec<f64>], width: usize) -> Vec<f64> {
        let (kernel, bias) = (self.f64("m.conv1d.weight"), self.f64("m.conv1d.bias"));
        let tap = |c: usize, back: usize| match inputs.len().checked_sub(back + 1) {
            Some(at) => inputs[at][c] * kernel[c * width + width - 1 - back],
            None => 0.0,
        };
        let sum = |c: usize| (0..width).map(|back| tap(c, back)).sum::<f64>() + bias.get(c).unwrap_or(&0.0);
        (0..inputs[0].len()).map(|c| silu(sum(c))).collect()
    }

    fn normed(&self, name: &str, x: &[f64], eps: f64) -> Vec<f64> {
        let scale = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt();
        x.iter().zip(self.f64(name)).map(|(v, w)| v / scale * w).collect()
    }
}

impl Tensors for Drawn {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.0.get(name).map(|(meta, _)| meta)
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        let bytes: Vec<u8> = self.0[name].1.iter().flat_map(|v| v.to_le_bytes()).collect();
        into.copy_from_slice(&bytes[offset..][..into.len()]);
        Ok(())
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The mixer that `build` makes of drawn weights, and these, computing on `threads` threads.
fn drawn<M: Mixer>(threads: usize, build: impl Fn(&mut WeightLoader) -> Result<M>) -> (M, Drawn) {
    let mut list = WeightLoader::list();
    build(&mut list).unwrap();
    let weights = Drawn::of(list.requested());
    let compute = Arc::new(ComputeContext::new(threads, false).unwrap());
    let mixer = build(&mut WeightLoader::load(&weights, &ReadAhead::new(&weights, &[]), compute)).unwrap();
    (mixer, weights)
}

fn inputs(tokens: usize) -> Vec<f32> {
    (0..tokens * HIDDEN).map(|i| ((i * i + 3 * i) as f32 * 0.37).sin()).collect()
}

/// Output of the mixer for sequences that are read at the same time, each in pieces of its own size.
fn outputs(mixer: &dyn Mixer, x: &[f32], pieces: &[usize]) -> Vec<Vec<f32>> {
    let pool = KvPool::new(KvFormat::F32, CheckpointPolicy { every: 5, most: 2 }, None, None);
    let mut caches: Vec<_> = pieces.iter().map(|_| KvCache::new([mixer.layer_shape()].into_iter(), &pool)).collect();
    let (tokens, mut outputs) = (x.len() / HIDDEN, vec![vec![]; pieces.len()]);
    let ids = vec![0; tokens];
    while outputs.iter().any(|out| out.len() < x.len()) {
        let (mut spans, mut positions, mut rows, mut whose) = (vec![], vec![], vec![], vec![]);
        for (i, cache) in caches.iter_mut().enumerate() {
            let done = outputs[i].len() / HIDDEN;
            let take = pieces[i].min(tokens - done);
            if take > 0 {
                positions.push(SpanPositions { start: done, tokens: take, first_row: rows.len() / HIDDEN });
                rows.extend_from_slice(&x[done * HIDDEN..][..take * HIDDEN]);
                spans.push(Span::new(&ids[done..][..take], cache));
                whose.push(i);
            }
        }
        let n = rows.len() / HIDDEN;
        let origins = vec![TokenOrigin::default(); n];
        let (handed_on, router_state) = (HandedOn::default(), HandedOn::default());
        let (tokens, ropes) = (vec![0; n], vec![]);
        let pass = ForwardPass { spans: positions, origins, tokens, ropes, handed_on, router_state };
        let rows = Tensor::from_vec(rows, (n, HIDDEN), &Device::Cpu).unwrap();
        let out = mixer.forward(&rows, &mut LayerStates::new(&mut spans, 0), &pass).unwrap();
        let out: Vec<f32> = out.flatten_all().unwrap().to_vec1().unwrap();
        for (i, span) in whose.into_iter().zip(&pass.spans) {
            outputs[i].extend_from_slice(span.rows(&out, HIDDEN));
        }
    }
    outputs
}

/// Checks the mixer against what `plain` computes of all tokens, and that the division of a sequence changes no bit.
fn check<M: Mixer>(build: impl Fn(&mut WeightLoader) -> Result<M>, plain: impl Fn(&Drawn, &[Vec<f64>]) -> Vec<f64>) {
    let x = inputs(23);
    let (mixer, weights) = drawn(1, &build);
    let whole = outputs(&mixer, &x, &[23]).remove(0);
    let tokens: Vec<Vec<f64>> = x.chunks(HIDDEN).map(|token| token.iter().map(|v| f64::from(*v)).collect()).collect();
    for (t, got) in whole.chunks_exact(HIDDEN).enumerate() {
        for (got, want) in got.iter().zip(plain(&weights, &tokens[..=t])) {
            assert!((f64::from(*got) - want).abs() < 2e-5, "token {t}: {got} and not {want}");
        }
    }
    let (on_three, _) = drawn(3, &build);
    for mixer in [&mixer, &on_three] {
        assert!(outputs(mixer, &x, &[1, 2, 7, 23]).iter().all(|out| *out == whole));
    }
    let loads = mixer.layer_shape().recurrent.unwrap();
    assert!(loads.recurrence > 0 && mixer.scratch(HIDDEN).floats > 0);
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
fn plain_mamba2(weights: &Drawn, tokens: &[Vec<f64>], shape: Mamba2Shape) -> Vec<f64> {
    let Mamba2Shape { heads, head_dim, groups, state, conv, dt_limits, eps, .. } = shape;
    let (inner, both) = (heads * head_dim, groups * state);
    let products: Vec<Vec<f64>> = tokens.iter().map(|x| weights.product("m.in_proj", x)).collect();
    let mixed: Vec<Vec<f64>> = products.iter().map(|row| row[inner..2 * inner + 2 * both].to_vec()).collect();
    let (a, bias, d) = (weights.f64("m.A_log"), weights.f64("m.dt_bias"), weights.f64("m.D"));
    let (mut states, mut y) = (vec![0.0; inner * state], vec![0.0; inner]);
    for (t, row) in products.iter().enumerate() {
        let xbc = weights.convolved(&mixed[..=t], conv);
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
fn mamba_2_follows_the_definition_in_pieces_of_any_size() {
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
fn plain_mamba1(weights: &Drawn, tokens: &[Vec<f64>], shape: Mamba1Shape) -> Vec<f64> {
    let Mamba1Shape { inner, state, rank, conv, eps, .. } = shape;
    let products: Vec<Vec<f64>> = tokens.iter().map(|x| weights.product("m.in_proj", x)).collect();
    let raw: Vec<Vec<f64>> = products.iter().map(|row| row[..inner].to_vec()).collect();
    let (a, d) = (weights.f64("m.A_log"), weights.f64("m.D"));
    let (mut states, mut y) = (vec![0.0; inner * state], vec![0.0; inner]);
    for t in 0..tokens.len() {
        let x = weights.convolved(&raw[..=t], conv);
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
fn mamba_1_follows_the_definition_in_pieces_of_any_size() {
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
