//! Compressed entries, compared with a naive computation in double precision, and over all divisions of the tokens.

use std::sync::Arc;

use larder_core::{CheckpointPolicy, NumberFormat, Rng, RowOrder};
use serde_json::json;

use crate::compute::ComputeContext;
use crate::config::Config;
use crate::kv::{KvCache, LayerShape, made_up};
use crate::nn::{Compressor, CompressorShape, Norm, Rope};
use crate::ops::{Constant, Rotary};
use crate::step::{ForwardPass, HandedOn, LayerStates, Span, SpanPositions, TokenOrigin};
use crate::weights::{Bytes, Linear, Matrix};

const HIDDEN: usize = 5;
const WIDTH: usize = 6;
const EPS: f64 = 1e-6;

struct Parts {
    values: Vec<f32>,
    logits: Vec<f32>,
    places: Vec<f32>,
    norm: Vec<f32>,
}

fn linear(rows: usize, values: &[f32]) -> Linear {
    let mut bytes = Bytes::zeroed(values.len() * 4);
    larder_kernels::narrow(NumberFormat::F32, values, &mut bytes);
    let compute = Arc::new(ComputeContext::single_threaded());
    let matrix = Matrix::new(NumberFormat::F32, RowOrder::Plain, rows, HIDDEN, Arc::new(bytes), compute);
    Linear::new(matrix, None).unwrap()
}

fn compressor(shape: CompressorShape) -> (Compressor, Parts) {
    let (mut rng, channels) = (Rng::new(7), if shape.overlap { 2 * WIDTH } else { WIDTH });
    let mut some = |count| made_up(count, &mut rng);
    let (values, logits) = (some(channels * HIDDEN), some(channels * HIDDEN));
    let parts = Parts { values, logits, places: some(shape.rate * channels), norm: some(WIDTH) };
    let config = json!({"rope_theta": 100.0});
    let (rope, rotary) = Rope::parse(&mut Config::new(&config).unwrap(), 4, 1e4, 64, None).unwrap();
    let norm = Norm::Rms { weight: parts.norm.clone().into(), eps: EPS };
    let compressor = Compressor {
        shape,
        values: linear(channels, &parts.values),
        logits: linear(channels, &parts.logits),
        places: parts.places.clone(),
        places_copy: Constant::default(),
        value_norm: Norm::None,
        norm,
        rotation: Some((rope, Rotary { interleaved: true, ..rotary })),
    };
    (compressor, parts)
}

/// The entry of a block as it is defined.
fn naive(shape: CompressorShape, parts: &Parts, x: &[f32], block: usize) -> Vec<f64> {
    let CompressorShape { rate, overlap, .. } = shape;
    let channels = if overlap { 2 * WIDTH } else { WIDTH };
    let product = |weights: &[f32], token: usize, row: usize| -> f64 {
        let (w, x) = (&weights[row * HIDDEN..][..HIDDEN], &x[token * HIDDEN..][..HIDDEN]);
        w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
    };
    let mut entry: Vec<f64> = (0..WIDTH)
        .map(|channel| {
            let before = (0..rate).filter_map(|i| Some(((block * rate + i).checked_sub(rate)?, channel)));
            let own = (0..rate).map(|i| (block * rate + i, if overlap { WIDTH + channel } else { channel }));
            let tokens: Vec<(usize, usize)> = before.filter(|_| overlap).chain(own).collect();
            let logit = |&(token, row): &(usize, usize)| {
                product(&parts.logits, token, row) + f64::from(parts.places[token % rate * channels + row])
            };
            let sum: f64 = tokens.iter().map(|at| logit(at).exp()).sum();
            tokens.iter().map(|at| product(&parts.values, at.0, at.1) * logit(at).exp() / sum).sum()
        })
        .collect();
    let mean = entry.iter().map(|v| v * v).sum::<f64>() / WIDTH as f64;
    entry.iter_mut().zip(&parts.norm).for_each(|(v, w)| *v *= f64::from(*w) / (mean + EPS).sqrt());
    for pair in 0..2 {
        let angle = (block * rate) as f64 * 100f64.powf(-(pair as f64) / 2.0);
        let (a, b) = (entry[2 + 2 * pair], entry[3 + 2 * pair]);
        entry[2 + 2 * pair] = a * angle.cos() - b * angle.sin();
        entry[3 + 2 * pair] = a * angle.sin() + b * angle.cos();
    }
    entry
}

/// The entries of these tokens, appended in chunks of a size.
fn entries(compressor: &Compressor, compute: &ComputeContext, x: &[f32], chunk: usize) -> Vec<f32> {
    let (pool, ops) = (compute.new_kv_pool(), compute.ops());
    let shape = LayerShape::latents(1).with_auxiliary(compressor.kept().to_vec());
    let mut cache = KvCache::new([shape].into_iter(), &pool);
    for (at, rows) in x.chunks(chunk * HIDDEN).enumerate() {
        let (tokens, start) = (rows.len() / HIDDEN, at * chunk);
        let ids = vec![0; tokens];
        let mut spans = [Span::new(&ids, &mut cache)];
        let (handed_on, router_state) = (HandedOn::default(), HandedOn::default());
        let positions = vec![SpanPositions { start, tokens, first_row: 0 }];
        let origins = vec![TokenOrigin::default(); tokens];
        let pass = ForwardPass {
            spans: positions,
            origins,
            tokens: ids.clone(),
            drawn: false,
            ropes: vec![],
            handed_on,
            router_state,
        };
        let x = ops.send(rows, HIDDEN).unwrap();
        let parts = Linear::forward_all([&compressor.values, &compressor.logits], x, ops).unwrap();
        compressor.append(parts, (&mut LayerStates::new(&mut spans, 0), 0), &pass, ops).unwrap();
    }
    let entries = &cache.layers[0].auxiliary[1].rows;
    entries.widened(0..entries.len(), WIDTH).unwrap()
}

#[test]
fn entries_are_those_of_the_definition_whatever_the_chunks() {
    let tokens = 333;
    let x = made_up(tokens * HIDDEN, &mut Rng::new(1));
    for (rate, overlap) in [(4, true), (1, true), (7, false), (128, false)] {
        let shape = CompressorShape { hidden: HIDDEN, width: WIDTH, rate, overlap };
        let (compressor, parts) = compressor(shape);
        let compute = ComputeContext {
            kv_checkpoints: CheckpointPolicy { every: 50, most: 3, pins: 0 },
            ..ComputeContext::single_threaded()
        };
        let whole = entries(&compressor, &compute, &x, tokens);
        assert_eq!(whole.len(), tokens / rate * WIDTH);
        for (block, entry) in whole.chunks_exact(WIDTH).enumerate() {
            let want = naive(shape, &parts, &x, block);
            let off = entry.iter().zip(&want).map(|(got, want)| (f64::from(*got) - want).abs()).fold(0.0, f64::max);
            assert!(off < 2e-5, "rate {rate}, block {block}: {off:e} off");
        }
        for chunk in [1, 3, 64, 65, 200] {
            assert_eq!(entries(&compressor, &compute, &x, chunk), whole, "rate {rate}, chunks of {chunk}");
        }
    }
}
