//! Chains of operations on the device have the bits of those on the CPU, and wait only where results are received.

use std::ops::Range;
use std::sync::Arc;

use larder_cache::two_tiers::{Device, DeviceWork};
use larder_core::{ExpertId, ExpertLayout, NumberFormat, RowOrder};
use larder_cuda::{Emulator, EmulatorFault, Gpu};
use larder_kernels::{AttentionArgs, DistanceBias, InputBuffer, Product, ThreadPool, WeightMatrix};
use larder_model::{
    Activation, CallOnDevice, ComputeContext, DeviceAttention, DeviceExperts, DeviceProducts, ExpertWorkspace,
    FakeAttention, FakeOps, FakeProducts, HeadNorm, Heads, KvPageShape, KvView, MoeCall, Ops, Place, PlacedMatrix,
    Rotation, Rows,
};

use crate::common::{LayerCase, Random, emulator, gpu, numbered, placed, receive_bits, upload_experts};

/// Positions per page.
const PAGE: usize = 8;
const HIDDEN: usize = 64;

/// Attention of new tokens, whose queries, keys and values come from products.
struct Shape {
    heads: usize,
    kv_heads: usize,
    key: usize,
    value: usize,
    kind: NumberFormat,
    weights: [NumberFormat; 3],
    /// Whether there is a norm, over each head or over all.
    norm: Option<bool>,
    /// Rotated values of a head, and whether pairs are adjacent.
    rotation: Option<(usize, bool)>,
    /// The distance beyond which a bias of scores does not change, if there is one.
    reach: Option<usize>,
}

/// A device with the weights of a layer and the keys and values of some sequences.
struct Layer<'a> {
    ops: &'a dyn Ops,
    attention: &'a dyn DeviceAttention,
    /// Queries, keys, values, output.
    products: [PlacedMatrix; 4],
    /// Of the norm, of queries, of keys, a bias of the queries, and that of scores, whose values are here too.
    kept: [usize; 5],
    bias: &'a [f32],
    /// By sequence: the pages of keys and of values.
    pages: Vec<[Vec<usize>; 2]>,
}

/// What a layer is made of.
struct Weights {
    products: [(NumberFormat, usize, usize, Vec<u8>); 4],
    kept: [Vec<f32>; 5],
}

impl Weights {
    fn new(random: &mut Random, shape: &Shape) -> Self {
        let Shape { heads, kv_heads, key, value, weights: [q, k, v], .. } = *shape;
        let sizes = [(q, heads * key, HIDDEN), (k, kv_heads * key, HIDDEN), (v, kv_heads * value, HIDDEN)];
        let [q, k, v] = sizes;
        let output = if (heads * value).is_multiple_of(32) { q.0 } else { NumberFormat::F32 };
        let products = [q, k, v, (output, HIDDEN, heads * value)].map(|(kind, rows, cols)| {
            let mut bytes = vec![0; kind.matrix_bytes(rows, cols).unwrap()];
            random.weights(kind, &mut bytes);
            (kind, rows, cols, bytes)
        });
        let norms = if shape.norm == Some(true) { [heads * key, kv_heads * key] } else { [key; 2] };
        let bias = heads * shape.reach.map_or(0, |reach| 2 * reach + 1);
        Weights { products, kept: [HIDDEN, norms[0], norms[1], heads * key, bias].map(|count| random.floats(count)) }
    }
}

impl<'a> Layer<'a> {
    fn new(
        (products, attention, ops): (Arc<dyn DeviceProducts>, &'a dyn DeviceAttention, &'a dyn Ops),
        weights: &'a Weights,
        sequences: usize,
    ) -> Self {
        let upload = |(kind, rows, cols, bytes): &(NumberFormat, usize, usize, Vec<u8>)| {
            let (kind, rows, cols, order) = (*kind, *rows, *cols, RowOrder::Plain);
            placed(&products, WeightMatrix { kind, order, rows, cols, scale: 1.0, bytes })
        };
        Layer {
            ops,
            attention,
            products: weights.products.each_ref().map(upload),
            kept: weights.kept.each_ref().map(|values| ops.keep(values).unwrap()),
            bias: &weights.kept[4],
            pages: vec![Default::default(); sequences],
        }
    }

    /// Makes room for the rows of the tokens of a step.
    fn grow(&mut self, shape: &Shape, seen: &[Vec<Range<usize>>]) {
        for ([keys, values], seen) in self.pages.iter_mut().zip(seen) {
            let end = seen.iter().map(|seen| seen.end).max().unwrap();
            for (pages, width) in [(keys, shape.key), (values, shape.value)] {
                let row_bytes = width.div_ceil(shape.kind.block_len()) * shape.kind.block_bytes();
                let form = KvPageShape { kind: shape.kind, heads: shape.kv_heads, positions: PAGE, row_bytes };
                while pages.len() * PAGE < end {
                    pages.push(self.attention.allocate(form).unwrap());
                }
            }
        }
    }

    /// The residual stream behind attention, and a product of what an activation makes of it, for `x [tokens, hidden]`.
    fn begin(&mut self, shape: &Shape, x: Rows, step: &Step) -> [Rows; 2] {
        self.grow(shape, &step.seen);
        let (ops, [norm, of_queries, of_keys, bias, of_scores]) = (self.ops, self.kept);
        let [q, k, v, output] = &self.products;
        let input = ops.rms_norm(x, norm, 1e-5).unwrap();
        let products = ops.matmul(input, &[q, k, v]).unwrap();
        let heads = Heads {
            queries: ops.add_row(products[0], bias).unwrap(),
            rest: None,
            keys: products[1],
            values: Some(products[2]),
            norm: shape.norm.map(|whole| HeadNorm {
                weights: [of_queries, of_keys].map(|weight| (shape.key != 32).then_some(weight)),
                eps: [1e-6; 2],
                whole,
                width: None,
                after_rotation: shape.heads == 2,
            }),
            value_norm: [16, 66].contains(&shape.value).then_some(1e-6),
            value_factor: if shape.heads == 3 { 0.6 } else { 1.0 },
            clip: (shape.norm != Some(false)).then_some(0.75),
            rotation: shape.rotation.map(|(dim, interleaved)| Rotation {
                cos_sin: &step.cos_sin,
                first: 0,
                dim,
                interleaved,
            }),
            scales: &step.scales,
            bias: shape.reach.map(|_| of_scores),
        };
        // Tokens see their own position last.
        let bias_of = |seen: &[Range<usize>]| {
            let (values, first_query) = (self.bias, seen[0].end - 1);
            shape.reach.map(|reach| DistanceBias { values, reach, first_query })
        };
        let place = Place::Device;
        let view = |pages: &[usize], width| KvView { place, first_page: 0, pages: pages.to_vec().into(), width };
        let tasks: Vec<_> = (self.pages.iter().zip(&step.seen))
            .map(|([keys, values], seen)| AttentionArgs {
                queries: &[],
                heads: shape.heads,
                kv_heads: shape.kv_heads,
                keys: view(keys, shape.key),
                values: view(values, shape.value),
                seen,
                scale: 0.4,
                sinks: None,
                bias: bias_of(seen),
            })
            .collect();
        let mixed = ops.attend_new(&heads, &tasks.iter().collect::<Vec<_>>()).unwrap();
        let out = ops.matmul(mixed, &[output]).unwrap()[0];
        let [residual, normalised] = ops.add_norm(x, out, 0.7, norm, 1e-5).unwrap();
        // Overwrites its first argument.
        let gate = ops.add(normalised, normalised, 1.0).unwrap();
        let combined = ops.combine(Activation::Silu, gate, normalised).unwrap();
        [residual, ops.matmul(combined, &[q]).unwrap()[0]]
    }
}

/// The tokens of a step, in rows of all sequences.
struct Step {
    /// By sequence and token.
    seen: Vec<Vec<Range<usize>>>,
    cos_sin: Vec<(f32, f32)>,
    scales: Vec<f32>,
    x: Vec<f32>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Runs chains of two layers over several steps on both devices.
pub fn compare(gpu: &Gpu) {
    use NumberFormat::{F16, F32, Q4_0, Q8_0};
    let shapes = [
        Shape {
            heads: 4,
            kv_heads: 2,
            key: 24,
            value: 16,
            kind: F32,
            weights: [F32, F16, F32],
            norm: Some(false),
            rotation: Some((24, false)),
            reach: None,
        },
        Shape {
            heads: 3,
            kv_heads: 1,
            key: 40,
            value: 64,
            kind: F16,
            weights: [Q8_0, Q4_0, Q8_0],
            norm: Some(true),
            rotation: Some((16, true)),
            reach: None,
        },
        Shape {
            heads: 2,
            kv_heads: 2,
            key: 34,
            value: 66,
            kind: F16,
            weights: [Q4_0; 3],
            norm: None,
            rotation: None,
            reach: Some(3),
        },
        Shape {
            heads: 2,
            kv_heads: 1,
            key: 72,
            value: 16,
            kind: F32,
            weights: [Q8_0; 3],
            norm: Some(false),
            rotation: Some((70, false)),
            reach: None,
        },
        Shape {
            heads: 4,
            kv_heads: 2,
            key: 48,
            value: 40,
            kind: Q8_0,
            weights: [Q8_0; 3],
            norm: Some(false),
            rotation: Some((32, false)),
            reach: Some(5),
        },
        // A norm without weights after the rotation.
        Shape {
            heads: 2,
            kv_heads: 2,
            key: 32,
            value: 32,
            kind: F16,
            weights: [Q8_0; 3],
            norm: Some(false),
            rotation: Some((16, true)),
            reach: None,
        },
    ];
    for (which, shape) in shapes.iter().enumerate() {
        let mut random = Random::new(which as u64);
        let weights = Weights::new(&mut random, shape);
        let (products, attention) = (Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap()));
        let ops = gpu.ops(products.clone(), attention.clone()).unwrap();
        let (host_products, host_attention) =
            (Arc::new(FakeProducts::new(1 << 30)), Arc::new(FakeAttention::new(1 << 30)));
        let host_ops = FakeOps::fake(host_products.clone(), host_attention.clone());
        let mut device = Layer::new((products, attention.as_ref(), &ops), &weights, 2);
        let mut host = Layer::new((host_products, host_attention.as_ref(), &host_ops), &weights, 2);
        let mut lens = [0_usize; 2];
        for counts in [[5, 1], [1, 1], [2, 4], [1, 9], [1, 1]] {
            let mut seen = Vec::new();
            for (len, count) in lens.iter_mut().zip(counts) {
                seen.push((*len..*len + count).map(|at| at.saturating_sub(11)..at + 1).collect::<Vec<_>>());
                *len += count;
            }
            let tokens = counts.iter().sum::<usize>();
            let dim = shape.rotation.map_or(0, |(dim, _)| dim);
            let cos_sin = (0..tokens * dim / 2).map(|_| (random.float(), random.float())).collect();
            let scales = if which % 2 == 1 { random.floats(tokens) } else { Vec::new() };
            let step = Step { seen, cos_sin, scales, x: random.floats(tokens * HIDDEN) };
            let results = [&mut device, &mut host].map(|layer| {
                let x = layer.ops.send(&step.x, HIDDEN).unwrap();
                let [residual, input] = layer.begin(shape, x, &step);
                let mut all = Vec::from(receive_bits(layer.ops, [input]));
                // In the next chain, with rows of the last one; rows that were sent stay valid too.
                let sum = layer.ops.add(residual, x, -0.5).unwrap();
                let part = layer.ops.slice(sum, 1, tokens - 1).unwrap();
                let again = layer.ops.rms_norm(part, layer.kept[0], 1e-3).unwrap();
                let columns = layer.ops.scale_columns(part, layer.kept[0]).unwrap();
                let centred = layer.ops.layer_norm(columns, [layer.kept[0]; 2], 1e-3).unwrap();
                let product = layer.ops.matmul(centred, &[&layer.products[0]]).unwrap()[0];
                all.extend(receive_bits(layer.ops, [residual, again, columns, centred, product]));
                assert!(all.iter().flatten().any(|bits| *bits != 0));
                all
            });
            assert!(results[0] == results[1], "shape {which}, {counts:?}");
        }
    }
}

#[test]
fn chains_give_the_same_bits() {
    for seed in 1..4 {
        let Some(emulator) = emulator(seed) else { return };
        compare(&gpu(emulator));
    }
}

/// Sums of experts of which some are computed on the device from rows of a chain, the others on the CPU.
pub fn compare_sums(gpu: &Gpu) {
    let mut random = Random::new(9);
    let ops = Arc::new(gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap());
    for (kind, tokens) in [(NumberFormat::Q4_0, 1), (NumberFormat::F32, 3), (NumberFormat::Q8_0, 5)] {
        let layout = ExpertLayout::new(HIDDEN, 96, [kind; 3], false).unwrap();
        let experts: Vec<Vec<u8>> = (0..6).map(|_| random.expert(&layout)).collect();
        let (mut link, mut bench) = (gpu.link(), gpu.experts(Some(ops.clone())).unwrap());
        upload_experts(&mut link, &layout, &experts);
        let layer = LayerCase::new(&mut random, layout, Activation::Silu, tokens, (3, 6), false);
        let all = numbered(&experts);
        for on_host in [0, 2, 5] {
            let x = ops.send(&layer.x, HIDDEN).unwrap();
            let more: [Vec<f32>; 2] = [(); 2].map(|()| random.floats(layer.x.len()));
            let [shared, residual] = more.each_ref().map(|values| ops.send(values, HIDDEN).unwrap());
            let (shared, residual) = (Some(shared).filter(|_| on_host > 0), Some(residual).filter(|_| on_host < 5));
            let on_device = Some(CallOnDevice { x, shared, residual });
            let call = MoeCall { on_device, ..layer.call() };
            let mut host = ExpertWorkspace::new(Arc::new(ComputeContext::new(1, false).unwrap()));
            host.begin(&call, &layer.routed, &layer.layout);
            host.compute(&call, &layer.routed, &layer.layout, &all);
            let mut wanted = vec![0.0; layer.x.len()];
            host.sum(&call, &layer.routed, &mut wanted);
            for (sum, (shared_value, residual_value)) in wanted.iter_mut().zip(more[0].iter().zip(&more[1])) {
                *sum = if shared.is_some() { *sum + shared_value } else { *sum };
                *sum = if residual.is_some() { residual_value + *sum } else { *sum };
            }
            // What the device has to compute is wrong here.
            for (place, _) in
                layer.routed.ids.iter().enumerate().filter(|(_, id)| **id != ExpertId::NONE && id.0 >= on_host)
            {
                host.put(place, &[f32::NAN; HIDDEN]);
            }
            bench.prepare(&layer.layout, layer.act, &layer.gate, tokens).unwrap();
            bench.begin(&call, &layer.routed, &layer.layout);
            for expert in on_host..6 {
                bench.compute(&call, &layer.routed, &layer.layout, &[(ExpertId(expert), usize::from(expert))]);
            }
            let sums = bench.begin_sum(&call, &layer.routed, &host).unwrap().expect("rows of the chain");
            assert_eq!((sums.rows, sums.width), (tokens, HIDDEN));
            if on_host == 0 {
                let found = receive_bits(ops.as_ref(), [sums, x]);
                assert!(found == [bits(&wanted), bits(&layer.x)], "{kind}, {on_host} experts on the CPU");
                continue;
            }
            // The norm is computed with the sums.
            let weight = random.floats(HIDDEN);
            let normalised = ops.rms_norm(sums, ops.keep(&weight).unwrap(), 1e-5).unwrap();
            let found = receive_bits(ops.as_ref(), [sums, normalised, x]);
            let of_norm: Vec<f32> = wanted.chunks_exact(HIDDEN).flat_map(|row| by_definition(row, &weight)).collect();
            let wanted = [bits(&wanted), bits(&of_norm), bits(&layer.x)];
            for (what, (found, wanted)) in ["sums", "their norm", "rows"].iter().zip(found.iter().zip(&wanted)) {
                assert!(found == wanted, "{what}: {kind}, {on_host} experts on the CPU");
            }
        }
    }
}

/// The norm of a row with 1e-5 under the root.
fn by_definition(row: &[f32], weight: &[f32]) -> Vec<f32> {
    let mut lanes = [0.0_f32; 8];
    row.iter().enumerate().for_each(|(i, v)| lanes[i % 8] += v * v);
    let mean = f64::from(lanes.iter().sum::<f32>()) / row.len() as f64;
    let scale = (1.0 / (mean + 1e-5).sqrt()) as f32;
    row.iter().zip(weight).map(|(v, w)| v * scale * w).collect()
}

#[test]
fn sums_of_experts_are_those_of_the_cpu() {
    let Some(emulator) = emulator(4) else { return };
    compare_sums(&gpu(emulator));
}

#[test]
fn rows_are_waited_for_once_and_nothing_too() {
    let Some(emulator) = emulator(6) else { return };
    let gpu = gpu(emulator);
    let (ops, link) =
        (gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap(), gpu.link());
    let x = ops.send(&[1.0; 64], 32).unwrap();
    let sums = [(); 3].map(|()| ops.add(x, x, 1.0).unwrap());
    let before = link.work().waits;
    ops.download(&[sums[0], sums[2]]).unwrap();
    assert_eq!(link.work().waits - before, 1);
    ops.add(x, x, 1.0).unwrap();
    assert!(ops.download(&[]).unwrap().is_empty());
    assert_eq!(link.work().waits - before, 2);
}

#[test]
fn rows_are_valid_until_the_second_layer_and_shapes_are_checked() {
    let Some(emulator) = emulator(5) else { return };
    let gpu = gpu(emulator);
    let products = Arc::new(gpu.products(0).unwrap());
    let ops = gpu.ops(products.clone(), Arc::new(gpu.attention().unwrap())).unwrap();
    let unknown = PlacedMatrix::uploaded(products, 0, NumberFormat::F32, [2, 2]);
    let x = ops.send(&[1.0, 2.0, 3.0, 4.0], 2).unwrap();
    let other = ops.send(&[1.0; 6], 3).unwrap();
    assert!(ops.add(x, other, 1.0).is_err() && ops.combine(Activation::Silu, x, other).is_err());
    assert!(ops.slice(x, 1, 2).is_err() && ops.rms_norm(x, 7, 1e-5).is_err() && ops.matmul(x, &[&unknown]).is_err());
    let values = |rows| bits(&ops.download(&[rows]).unwrap()[0]);
    for _ in 0..3 {
        assert_eq!(values(x), bits(&[1.0, 2.0, 3.0, 4.0]), "a wait takes no rows away");
    }
    ops.begin_layer();
    let sum = ops.add(x, x, 1.0).unwrap();
    let both = ops.download(&[sum, x]).unwrap();
    assert_eq!((both.len(), &both[0][..], &both[1][..]), (2, &[2.0, 4.0, 6.0, 8.0][..], &[1.0, 2.0, 3.0, 4.0][..]));
    ops.begin_layer();
    for error in [ops.add(x, x, 1.0).err(), ops.download(&[sum, x]).err()] {
        let error = error.unwrap().to_string();
        assert!(error.contains("the GPU no longer has the rows"), "{error}");
    }
    assert_eq!(values(sum), bits(&[2.0, 4.0, 6.0, 8.0]));
}

/// Chains of sums with a product; results of chains that end well are right. Returns whether each ended well, and the
/// work.
fn repeated_chains(emulator: Emulator, chains: usize) -> (Vec<bool>, DeviceWork) {
    let (mut random, adds, gpu) = (Random::new(3), 20, gpu(emulator));
    let products = Arc::new(gpu.products(0).unwrap());
    let (ops, link) = (gpu.ops(products.clone(), Arc::new(gpu.attention().unwrap())).unwrap(), gpu.link());
    let (kind, order) = (NumberFormat::F32, RowOrder::Plain);
    let row_values = random.floats(HIDDEN);
    let bytes = bytemuck::cast_slice(&row_values);
    let weights = WeightMatrix { kind, order, rows: 1, cols: HIDDEN, scale: 1.0, bytes };
    let row = placed(&(products as Arc<dyn DeviceProducts>), weights);
    let mut ended = Vec::new();
    for _ in 0..chains {
        let values = random.floats(HIDDEN);
        let chain = || {
            ops.begin_layer();
            let x = ops.send(&values, HIDDEN)?;
            let sum = (0..adds).try_fold(x, |sum, _| ops.add(sum, x, 0.5))?;
            let y = ops.matmul(sum, &[&row])?[0];
            ops.download(&[sum, y])
        };
        let done = chain();
        ended.push(done.is_ok());
        match done {
            Ok(found) => {
                let of = |v: &f32| (0..adds).fold(*v, |sum, _| sum + (0.5 * v + 0.0));
                let wanted: Vec<f32> = values.iter().map(of).collect();
                assert_eq!(bits(&found[0]), bits(&wanted));
                let mut buffer = InputBuffer::new();
                let x = buffer.fill(&wanted, HIDDEN, false);
                let (mut out, pool) = ([0.0], ThreadPool::single_threaded());
                larder_kernels::products(&pool, &mut [Product { weights, x, pick: None, out: &mut out }]);
                assert_eq!(bits(&found[1]), bits(&out));
            }
            // As a model does.
            Err(_) => drop(ops.download(&[])),
        }
    }
    (ended, link.work())
}

#[test]
fn launches_that_come_again_become_a_graph() {
    let Some(emulator) = emulator(7) else { return };
    let (ended, work) = repeated_chains(emulator, 12);
    assert!(ended.iter().all(|well| *well));
    // Results are at the same addresses in every other chain. The first two also copy a list of products, so the third
    // time of the same launches is in the seventh chain.
    assert_eq!((work.graphs, work.graph_launches, work.launches), (6, 6 * 23, 6 * 23 + 2 * 2));
}

#[test]
fn after_a_launch_that_failed_the_next_chain_is_right() {
    let (mut failed, mut again) = (0, 0);
    for seed in 0..30 {
        let Some(emulator) = emulator(seed) else { return };
        let (ended, _) = repeated_chains(emulator.with_fault(EmulatorFault::Launch, 150), 24);
        failed += ended.iter().filter(|well| !**well).count();
        again += ended.windows(2).filter(|pair| !pair[0] && pair[1]).count();
    }
    assert!(failed > 20 && again > 5, "{failed} failed, {again} ended well behind one that failed");
}
