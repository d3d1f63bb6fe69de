//! Latent attention as chains on the device: products per head, queries in two parts, and values that are parts of
//! keys.

use std::sync::Arc;

use larder_core::{NumberFormat, RowOrder};
use larder_cuda::Gpu;
use larder_kernels::{AttentionArgs, WeightMatrix};
use larder_model::{
    DeviceAttention, DeviceProducts, FakeAttention, FakeOps, FakeProducts, HeadNorm, HeadRest, Heads, KvPageShape,
    KvView, Ops, Place, PlacedMatrix, Rotation,
};

use crate::common::{Random, emulator, gpu, placed, receive_bits};

const PAGE: usize = 8;
const HEADS: usize = 3;

/// Widths of a head: in the latent space, unrotated, rotated, of the values; and the number formats of weights and KV
/// cache.
struct Shape {
    rank: usize,
    nope: usize,
    rope: usize,
    value: usize,
    weights: NumberFormat,
    kv: NumberFormat,
}

/// A device with the weights of a layer.
struct Layer<'a> {
    ops: &'a dyn Ops,
    attention: &'a dyn DeviceAttention,
    to_latent: Vec<PlacedMatrix>,
    to_value: Vec<PlacedMatrix>,
    norm: usize,
    pages: Vec<usize>,
}

impl<'a> Layer<'a> {
    fn new(
        (products, attention, ops): (Arc<dyn DeviceProducts>, &'a dyn DeviceAttention, &'a dyn Ops),
        shape: &Shape,
    ) -> Self {
        let mut random = Random::new(5);
        let Shape { rank, nope, value, weights: kind, .. } = *shape;
        let mut heads = |rows: usize, cols: usize| -> Vec<PlacedMatrix> {
            let mut head = || {
                let mut bytes = vec![0; kind.matrix_bytes(rows, cols).unwrap()];
                random.weights(kind, &mut bytes);
                let order = RowOrder::Plain;
                placed(&products, WeightMatrix { kind, order, rows, cols, scale: 1.0, bytes: &bytes })
            };
            (0..HEADS).map(|_| head()).collect()
        };
        let (to_latent, to_value) = (heads(rank, nope), heads(value, rank));
        let norm = ops.keep(&Random::new(6).floats(rank)).unwrap();
        Layer { ops, attention, to_latent, to_value, norm, pages: Vec::new() }
    }

    /// The values of new tokens, `[tokens, heads · value]`, of their queries and new rows.
    fn step(&mut self, shape: &Shape, step: &Step) -> Vec<u32> {
        let Shape { rank, nope, rope, kv, .. } = *shape;
        let (ops, width) = (self.ops, rank + rope);
        let form = KvPageShape {
            kind: kv,
            heads: 1,
            positions: PAGE,
            row_bytes: width.div_ceil(kv.block_len()) * kv.block_bytes(),
        };
        while self.pages.len() * PAGE < step.len {
            self.pages.push(self.attention.allocate(form).unwrap());
        }
        let queries = ops.send(&step.queries, HEADS * (nope + rope)).unwrap();
        let keys = ops.send(&step.rows, width).unwrap();
        let heads = Heads {
            queries: ops.matmul_heads(queries, &self.to_latent).unwrap(),
            rest: Some(HeadRest { rows: queries, first: nope }),
            keys,
            values: None,
            norm: Some(HeadNorm {
                weights: [None, Some(self.norm)],
                eps: [1e-6; 2],
                whole: false,
                width: Some(rank),
                after_rotation: false,
            }),
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation: (rope > 0).then_some(Rotation {
                cos_sin: &step.cos_sin,
                first: rank,
                dim: rope,
                interleaved: rope == 8,
            }),
            scales: &step.scales,
            bias: None,
        };
        let view = |width| KvView { place: Place::Device, first_page: 0, pages: self.pages.clone().into(), width };
        let tokens = step.rows.len() / width;
        let seen: Vec<_> = (step.len - tokens..step.len).map(|at| 0..at + 1).collect();
        let args = AttentionArgs {
            queries: &[],
            heads: HEADS,
            kv_heads: 1,
            keys: view(width),
            values: view(rank),
            seen: &seen,
            scale: 0.3,
            sinks: None,
            bias: None,
        };
        let mixed = ops.attend_new(&heads, &[&args]).unwrap();
        let [found] = receive_bits(ops, [ops.matmul_heads(mixed, &self.to_value).unwrap()]);
        found
    }
}

/// The tokens of a step.
struct Step {
    queries: Vec<f32>,
    rows: Vec<f32>,
    cos_sin: Vec<(f32, f32)>,
    scales: Vec<f32>,
    /// Tokens of the sequence, these included.
    len: usize,
}

/// Runs steps of several tokens on the device and on its fake.
pub fn compare(gpu: &Gpu) {
    use NumberFormat::{F16, F32, Q4_0, Q8_0};
    let shapes = [
        Shape { rank: 64, nope: 32, rope: 32, value: 24, weights: Q8_0, kv: F32 },
        Shape { rank: 80, nope: 32, rope: 16, value: 24, weights: F32, kv: Q8_0 },
        Shape { rank: 96, nope: 64, rope: 32, value: 40, weights: Q4_0, kv: F16 },
        Shape { rank: 40, nope: 12, rope: 8, value: 16, weights: F32, kv: F32 },
        Shape { rank: 32, nope: 32, rope: 0, value: 9, weights: Q8_0, kv: F16 },
    ];
    for (which, shape) in shapes.iter().enumerate() {
        let (products, attention) = (Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap()));
        let ops = gpu.ops(products.clone(), attention.clone()).unwrap();
        let (host_products, host_attention) =
            (Arc::new(FakeProducts::new(1 << 30)), Arc::new(FakeAttention::new(1 << 30)));
        let host_ops = FakeOps::fake(host_products.clone(), host_attention.clone());
        let mut device = Layer::new((products, attention.as_ref(), &ops), shape);
        let mut host = Layer::new((host_products, host_attention.as_ref(), &host_ops), shape);
        let (mut random, mut len) = (Random::new(which as u64), 0);
        for tokens in [5, 1, 1, 9, 16, 1] {
            len += tokens;
            let step = Step {
                queries: random.floats(tokens * HEADS * (shape.nope + shape.rope)),
                rows: random.floats(tokens * (shape.rank + shape.rope)),
                cos_sin: (0..tokens * shape.rope / 2).map(|_| (random.float(), random.float())).collect(),
                scales: if which % 2 == 1 { random.floats(tokens) } else { Vec::new() },
                len,
            };
            let [found, wanted] = [&mut device, &mut host].map(|layer| layer.step(shape, &step));
            assert!(found.iter().any(|bits| *bits != 0));
            assert!(found == wanted, "shape {which}, {tokens} tokens, {len} in all");
        }
    }
}

#[test]
fn latents_give_the_same_bits() {
    for seed in 1..3 {
        let Some(emulator) = emulator(seed) else { return };
        compare(&gpu(emulator));
    }
}

#[test]
fn heads_that_do_not_fit_are_errors() {
    let Some(emulator) = emulator(3) else { return };
    let gpu = gpu(emulator);
    let products = Arc::new(gpu.products(0).unwrap());
    let ops = gpu.ops(products.clone(), Arc::new(gpu.attention().unwrap())).unwrap();
    let products: Arc<dyn DeviceProducts> = products;
    let matrix = |kind: NumberFormat, rows, cols| {
        let bytes = vec![0; kind.matrix_bytes(rows, cols).unwrap()];
        let order = RowOrder::Plain;
        placed(&products, WeightMatrix { kind, order, rows, cols, scale: 1.0, bytes: &bytes })
    };
    let [wide, narrow] = [64, 32].map(|cols| [(); 2].map(|()| matrix(NumberFormat::Q8_0, 4, cols)));
    let x = ops.send(&[1.0; 96], 96).unwrap();
    let error = |heads: &[PlacedMatrix]| ops.matmul_heads(x, heads).unwrap_err().to_string();
    assert!(error(&wide).contains("48 inputs do not fit 4 x 64 weights"), "{}", error(&wide));
    assert!(error(&narrow).contains("48 values are not whole blocks"));
    let [narrow, _] = narrow;
    assert!(error(&[matrix(NumberFormat::F32, 4, 32), narrow]).contains("several number formats"));
    let unknown = PlacedMatrix::uploaded(products.clone(), 99, NumberFormat::F32, [4, 32]);
    assert!(error(&[]).contains("without heads") && error(&[unknown]).contains("no matrix 99"));
}
