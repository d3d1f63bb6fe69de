//! For tests: mixers of drawn weights, compared with plain models in f64, and with sequences divided in several ways.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_core::{CheckpointPolicy, NumberFormat, Rng, RowOrder, TensorMeta, TensorSpec, Tensors, TensorsError};

use super::Mixer;
use crate::compute::ComputeContext;
use crate::device::{DeviceAttention, DeviceProducts};
use crate::error::Result;
use crate::fake::{FakeAttention, FakeProducts};
use crate::kv::KvCache;
use crate::ops::{CpuOps, Ops};
use crate::step::{ForwardPass, HandedOn, LayerStates, Span, SpanPositions, TokenOrigin};
use crate::weights::{ReadAhead, WeightLoader};

/// Width of the residual stream.
pub const HIDDEN: usize = 6;

/// Random weights, by name.
pub struct RandomWeights(BTreeMap<String, (TensorMeta, Vec<f32>)>);

impl RandomWeights {
    /// Values from -1 to 1 for all tensors.
    pub fn of(specs: Vec<TensorSpec>) -> Self {
        let mut rng = Rng::with_stream(7, 0);
        let mut draw = |spec: TensorSpec| {
            let count = spec.shape.iter().product::<usize>();
            let values = (0..count).map(|_| (2.0 * rng.unit() - 1.0) as f32).collect();
            let meta =
                TensorMeta { kind: NumberFormat::F32, order: RowOrder::Plain, shape: spec.shape, bytes: 4 * count };
            (spec.name, (meta, values))
        };
        RandomWeights(specs.into_iter().map(&mut draw).collect())
    }

    /// The values of a tensor; none of one that is missing.
    pub fn f64(&self, name: &str) -> Vec<f64> {
        self.0.get(name).map_or(vec![], |(_, values)| values.iter().map(|v| f64::from(*v)).collect())
    }

    /// `prefix.weight · x + prefix.bias`
    pub fn product(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        let (weight, bias) = (self.f64(&format!("{prefix}.weight")), self.f64(&format!("{prefix}.bias")));
        let rows = weight.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>());
        rows.enumerate().map(|(r, sum)| sum + bias.get(r).unwrap_or(&0.0)).collect()
    }

    /// The RMS norm of `x`, times the values of the tensor `name`.
    pub fn normed(&self, name: &str, x: &[f64], eps: f64) -> Vec<f64> {
        let scale = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt();
        x.iter().zip(self.f64(name)).map(|(v, w)| v / scale * w).collect()
    }
}

impl Tensors for RandomWeights {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.0.get(name).map(|(meta, _)| meta)
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        let bytes: Vec<u8> = self.0[name].1.iter().flat_map(|v| v.to_le_bytes()).collect();
        into.copy_from_slice(&bytes[offset..][..into.len()]);
        Ok(())
    }
}

/// The mixer that `build` makes of drawn weights, and these.
fn drawn<M: Mixer>(
    compute: &Arc<ComputeContext>,
    build: impl Fn(&mut WeightLoader) -> Result<M>,
) -> (M, RandomWeights) {
    let mut list = WeightLoader::list();
    build(&mut list).unwrap();
    let weights = RandomWeights::of(list.requested().to_vec());
    let mixer = build(&mut WeightLoader::load(&weights, &ReadAhead::new(&weights, &[]), compute.clone())).unwrap();
    (mixer, weights)
}

fn inputs(tokens: usize) -> Vec<f32> {
    (0..tokens * HIDDEN).map(|i| ((i * i + 3 * i) as f32 * 0.37).sin()).collect()
}

fn on_threads(threads: usize) -> ComputeContext {
    ComputeContext {
        kv_checkpoints: CheckpointPolicy { every: 5, most: 2, pins: 0 },
        ..ComputeContext::new(threads, false).unwrap()
    }
}

/// A context on a fake device.
fn on_device() -> ComputeContext {
    let (products, attention) = (Arc::new(FakeProducts::new(1 << 30)), Arc::new(FakeAttention::new(1 << 30)));
    let device_ops: Arc<dyn Ops> = Arc::new(CpuOps::fake(products.clone(), attention.clone()));
    let device_products: Arc<dyn DeviceProducts> = products;
    let device_attention: Arc<dyn DeviceAttention> = attention;
    ComputeContext {
        device_products: Some(device_products),
        device_attention: Some(device_attention),
        device_ops: Some(device_ops),
        kv_checkpoints: CheckpointPolicy { every: 5, most: 2, pins: 0 },
        ..on_threads(1)
    }
}

/// Output of the mixer for sequences that are read at the same time, each in chunks of its own size.
fn outputs(mixer: &dyn Mixer, compute: &ComputeContext, x: &[f32], chunks: &[usize]) -> Vec<Vec<f32>> {
    let (pool, ops) = (compute.new_kv_pool(), compute.ops());
    let mut caches: Vec<_> = chunks.iter().map(|_| KvCache::new([mixer.layer_shape()].into_iter(), &pool)).collect();
    let (tokens, mut outputs) = (x.len() / HIDDEN, vec![vec![]; chunks.len()]);
    let ids = vec![0; tokens];
    while outputs.iter().any(|out| out.len() < x.len()) {
        let (mut spans, mut positions, mut rows, mut whose) = (vec![], vec![], vec![], vec![]);
        for (i, cache) in caches.iter_mut().enumerate() {
            let done = outputs[i].len() / HIDDEN;
            let take = chunks[i].min(tokens - done);
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
        let pass = ForwardPass { spans: positions, origins, tokens, drawn: false, ropes, handed_on, router_state };
        let mut states = LayerStates::new(&mut spans, 0);
        let rows = mixer.forward(ops.send(&rows, HIDDEN).unwrap(), &mut states, &pass, ops).unwrap();
        let out = &ops.download(&[rows]).unwrap()[0];
        ops.retain(&[]);
        for (i, span) in whose.into_iter().zip(&pass.spans) {
            outputs[i].extend_from_slice(span.rows(out, HIDDEN));
        }
    }
    outputs
}

/// Checks the mixer against what `plain` computes of all tokens, and that the division of a sequence changes no bit.
pub fn check<M: Mixer>(
    build: impl Fn(&mut WeightLoader) -> Result<M>,
    plain: impl Fn(&RandomWeights, &[Vec<f64>]) -> Vec<f64>,
) {
    let x = inputs(23);
    let [one, three, device] = [on_threads(1), on_threads(3), on_device()].map(Arc::new);
    let (mixer, weights) = drawn(&one, &build);
    let whole = outputs(&mixer, &one, &x, &[23]).remove(0);
    let tokens: Vec<Vec<f64>> = x.chunks(HIDDEN).map(|token| token.iter().map(|v| f64::from(*v)).collect()).collect();
    for (t, got) in whole.chunks_exact(HIDDEN).enumerate() {
        for (got, want) in got.iter().zip(plain(&weights, &tokens[..=t])) {
            assert!((f64::from(*got) - want).abs() < 2e-5, "token {t}: {got} and not {want}");
        }
    }
    for compute in [&one, &three, &device] {
        let (mixer, _) = drawn(compute, &build);
        assert!(outputs(&mixer, compute, &x, &[1, 2, 7, 23]).iter().all(|out| *out == whole));
    }
    let loads = mixer.layer_shape().recurrent.unwrap();
    assert!(loads.bytes() > 0 && mixer.scratch(HIDDEN).floats > 0);
}
