//! Residual streams, and heads, columns and blocks of rows, on the device and on its fake.

use std::sync::Arc;

use larder_core::NumberFormat;
use larder_cuda::Gpu;
use larder_model::{
    BlockPooling, ChoiceOps, DeviceAttention, FakeAttention, FakeOps, FakeProducts, HyperConnectionOps, KvPageShape,
    KvView, ManifoldWeights, Ops, Place, Rotation, ScaledSides, StreamGate, StreamMix,
};

use crate::common::{Random, copy, emulator, gpu, receive_bits};

/// Reads and writes `count` streams, with each kind of connection.
fn connect(ops: &dyn Ops, count: usize, hidden: usize, tokens: usize) -> Vec<Vec<u32>> {
    let mut random = Random::new((count * hidden) as u64);
    let width = count * (2 + count);
    let weight = ops.keep(&random.floats(count * hidden)).unwrap();
    let base = ops.keep(&random.floats(width)).unwrap();
    let [a, b, c, d] = [(); 4].map(|()| ops.keep(&random.floats(count * hidden)).unwrap());
    let sides = ScaledSides { y: [a, b], stream: [c, d] };
    let mut send = |width: usize| ops.send(&random.floats(tokens * width), width).unwrap();
    let (streams, y, products, low) = (send(count * hidden), send(hidden), send(width), send(count));
    let weights = ManifoldWeights { scale: [1.5, 0.5, 3.0], base, eps: 1e-6, iterations: 20 };
    let plain = ops.rms_groups(streams, 1, None, 1e-6).unwrap();
    let normed = ops.rms_groups(streams, count, Some(weight), 1e-5).unwrap();
    let mix = ops.stream_weights(products, count, &weights).unwrap();
    let to_merge = ops.stream_weights(low, count, &weights).unwrap();
    let gates = ops.stream_gates(copy(ops, low), count, StreamGate::TwiceSigmoid).unwrap();
    let results = [
        plain,
        normed,
        mix,
        to_merge,
        ops.read_streams(streams, count, Some(mix)).unwrap(),
        ops.read_streams(streams, count, Some(to_merge)).unwrap(),
        ops.read_streams(streams, count, None).unwrap(),
        ops.write_streams(streams, y, (mix, StreamMix::Matrix)).unwrap(),
        ops.write_streams(streams, y, (gates, StreamMix::Weights)).unwrap(),
        ops.stream_gates(low, count, StreamGate::Silu).unwrap(),
        ops.gated_mean(normed, streams, count).unwrap(),
        ops.add_scaled_sides(streams, normed, &sides).unwrap(),
        ops.gate_by_keys([normed, streams, y], count).unwrap(),
    ];
    receive_bits(ops, results).into()
}

/// Heads that rotate, columns, and blocks of rows of two sequences, the second of which has given its first pages back.
fn rows(ops: &dyn Ops, attention: &dyn DeviceAttention, kind: NumberFormat, width: usize) -> Vec<Vec<u32>> {
    let (mut random, tokens, heads, dim, page, rate) = (Random::new(width as u64), 5, 3, 4, 8, 3);
    let weight = ops.keep(&random.floats(width)).unwrap();
    let [places, of_overlap] = [1, 2].map(|by| ops.keep(&random.floats(by * rate * width)).unwrap());
    let x = ops.send(&random.floats(tokens * heads * width), heads * width).unwrap();
    let cos_sin: Vec<(f32, f32)> = (0..tokens * dim / 2).map(|_| (random.float(), random.float())).collect();
    let rotation = |interleaved| Some(Rotation { cos_sin: &cos_sin, first: 2, dim, interleaved });
    let mut view = |first_page: usize, pages: usize, width: usize| {
        let row_bytes = width.div_ceil(kind.block_len()) * kind.block_bytes();
        let mut stored = || {
            let id = attention.allocate(KvPageShape { kind, heads: 1, positions: page, row_bytes }).unwrap();
            let mut bytes = vec![0; page * row_bytes];
            bytes.chunks_exact_mut(row_bytes).for_each(|row| match kind {
                NumberFormat::Q8_0 => larder_kernels::quantise_row(&random.floats(width), row),
                kind => larder_kernels::narrow(kind, &random.floats(width), row),
            });
            attention.append(id, 0, &bytes).unwrap();
            id
        };
        KvView {
            place: Place::Device,
            first_page,
            pages: (0..pages).map(|_| stored()).collect::<Vec<_>>().into(),
            width,
        }
    };
    let blocks = [(view(0, 2, width), 1..5), (view(3, 2, width), 8..13)];
    let values_and_logits = [(view(0, 1, 2 * width), 0..2), (view(2, 2, 2 * width), 6..10)];
    let overlapping = [(view(0, 1, 4 * width), 0..2), (view(2, 2, 4 * width), 7..10), (view(0, 2, 4 * width), 4..5)];
    let pooling = |places, overlap| BlockPooling { rate, places, overlap };
    let results = [
        ops.rotate_heads(copy(ops, x), heads, Some((weight, 1e-5)), rotation(true)).unwrap(),
        ops.rotate_heads(copy(ops, x), heads, None, rotation(false)).unwrap(),
        ops.rotate_heads(copy(ops, x), heads, None, None).unwrap(),
        ops.columns(x, width, width).unwrap(),
        ops.beside(x, ops.columns(x, 1, 2).unwrap()).unwrap(),
        ops.pool_blocks(&blocks, &pooling(None, false)).unwrap(),
        ops.pool_blocks(&values_and_logits, &pooling(Some(places), false)).unwrap(),
        ops.pool_blocks(&overlapping, &pooling(Some(of_overlap), true)).unwrap(),
    ];
    receive_bits(ops, results).into()
}

/// Compares the device and its fake.
pub fn compare(gpu: &Gpu) {
    let attention = Arc::new(gpu.attention().unwrap());
    let ops = gpu.ops(Arc::new(gpu.products(0).unwrap()), attention.clone()).unwrap();
    let host_attention = Arc::new(FakeAttention::new(1 << 30));
    let host = FakeOps::fake(Arc::new(FakeProducts::new(1 << 30)), host_attention.clone());
    for (count, hidden, tokens) in [(4, 64, 3), (2, 40, 7), (5, 33, 1), (3, 128, 2), (1, 32, 2), (5, 1700, 2)] {
        let (found, wanted) = (connect(&ops, count, hidden, tokens), connect(&host, count, hidden, tokens));
        for (which, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert!(found.iter().any(|bits| *bits != 0));
            assert!(found == wanted, "{count} streams of {hidden}: result {which}");
        }
    }
    for (kind, width) in [(NumberFormat::F32, 20), (NumberFormat::F16, 33), (NumberFormat::Q8_0, 32)] {
        let found = rows(&ops, attention.as_ref(), kind, width);
        let wanted = rows(&host, host_attention.as_ref(), kind, width);
        for (which, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert!(found.iter().any(|bits| *bits != 0) && found == wanted, "{kind}: result {which}");
        }
    }
}

#[test]
fn streams_and_blocks_have_the_same_bits() {
    for seed in 1..3 {
        let Some(emulator) = emulator(seed) else { return };
        compare(&gpu(emulator));
    }
}

#[test]
fn rows_that_do_not_fit_are_errors() {
    let Some(emulator) = emulator(3) else { return };
    let gpu = gpu(emulator);
    let attention = Arc::new(gpu.attention().unwrap());
    let ops = gpu.ops(Arc::new(gpu.products(0).unwrap()), attention.clone()).unwrap();
    let send = |rows: usize, width: usize| ops.send(&vec![1.0; rows * width], width).unwrap();
    let (x, y, other) = (send(2, 12), send(2, 4), send(3, 4));
    let base = ops.keep(&[0.0; 48]).unwrap();
    let weights = ManifoldWeights { scale: [1.0; 3], base, eps: 0.0, iterations: 1 };
    let cos_sin = [(1.0, 0.0); 3];
    let rotation = Some(Rotation { cos_sin: &cos_sin, first: 0, dim: 2, interleaved: true });
    let pooling = BlockPooling { rate: 2, places: None, overlap: false };
    let errors = [
        ops.rms_groups(x, 5, None, 1e-5),
        ops.stream_weights(x, 3, &weights),
        ops.stream_weights(send(1, 48), 6, &weights),
        ops.read_streams(x, 3, Some(other)),
        ops.read_streams(x, 0, None),
        ops.write_streams(x, y, (y, StreamMix::Matrix)),
        ops.write_streams(x, other, (send(3, 3), StreamMix::Weights)),
        ops.gated_mean(x, y, 3),
        ops.gate_by_keys([x, x, y], 2),
        ops.gate_by_keys([x, x, other], 3),
        ops.add_scaled_sides(x, y, &ScaledSides { y: [base; 2], stream: [base; 2] }),
        ops.rotate_heads(x, 5, None, None),
        ops.rotate_heads(x, 3, None, rotation),
        ops.columns(x, 10, 3),
        ops.beside(x, other),
        ops.pool_blocks(&[], &pooling),
    ];
    for (which, error) in errors.into_iter().enumerate() {
        assert!(error.is_err(), "{which}: {error:?}");
    }
    let page = KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 4, row_bytes: 16 };
    let pages = vec![attention.allocate(page).unwrap()].into();
    let view = KvView { place: Place::Device, first_page: 0, pages, width: 4 };
    assert!(ops.pool_blocks(&[(view.clone(), 0..2)], &pooling).is_ok());
    assert!(ops.pool_blocks(&[(view.clone(), 1..3)], &pooling).is_err(), "a block that is not stored");
    assert!(ops.pool_blocks(&[(KvView { first_page: 1, ..view.clone() }, 1..3)], &pooling).is_err());
    let overlapping = BlockPooling { overlap: true, places: Some(base), ..pooling };
    let first_page = |first_page| KvView { first_page, ..view.clone() };
    assert!(ops.pool_blocks(&[(first_page(1), 3..4)], &overlapping).is_ok());
    assert!(ops.pool_blocks(&[(first_page(1), 2..3)], &overlapping).is_err(), "the block before is not stored");
    assert!(ops.pool_blocks(&[(first_page(0), 0..1)], &BlockPooling { places: None, ..overlapping }).is_err());
}
