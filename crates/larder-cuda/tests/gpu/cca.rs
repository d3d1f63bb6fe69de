//! Convolved queries and keys, on the device and on its fake.

use std::sync::Arc;

use larder_core::NumberFormat;
use larder_cuda::Gpu;
use larder_model::{
    CcaOps, DeviceAttention, FakeAttention, FakeOps, FakeProducts, HeadConvolution, HeadMix, KvPageShape, Ops,
    StateSpan,
};

use crate::common::{Random, emulator, gpu, receive_bits};

/// Query heads, key heads, width of a head, taps of both convolutions, and whether values have a bias.
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    widths: [usize; 2],
    bias: bool,
}

impl Shape {
    fn channels(&self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim
    }

    /// Values of the windows.
    fn window(&self) -> usize {
        (self.widths[0] + self.widths[1] - 2) * self.channels()
    }

    fn half(&self) -> usize {
        self.kv_heads * self.head_dim / 2
    }
}

/// All results and states of three steps of two sequences, as bits.
fn steps(ops: &dyn Ops, attention: &dyn DeviceAttention, shape: &Shape) -> Vec<Vec<u32>> {
    let (mut random, channels, half) = (Random::new(3), shape.channels(), shape.half());
    let row_bytes = 4 * (shape.window() + half);
    let state = || {
        let form = KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 1, row_bytes };
        attention.allocate(form).unwrap()
    };
    let mut states: Vec<usize> = (0..2).map(|_| state()).collect();
    for page in &states {
        attention.append(*page, 0, bytemuck::cast_slice(&random.floats(row_bytes / 4))).unwrap();
    }
    let [taps, bias, of_values, of_heads, factors] =
        [shape.widths[0] * channels, channels, half, channels, shape.kv_heads]
            .map(|n| ops.keep(&random.floats(n)).unwrap());
    let mut found = Vec::new();
    // Tokens of each sequence, and after how many of the first a copy is made.
    for (counts, copied) in [([5, 1], Some(2)), ([1, 0], None), ([7, 9], Some(6))] {
        let tokens: usize = counts.iter().sum();
        let mut send = |width: usize| ops.send(&random.floats(tokens * width), width).unwrap();
        let (queries, keys) = (send(shape.heads * shape.head_dim), send(shape.kv_heads * shape.head_dim));
        let (delayed, convolved) = (send(half), send(channels));
        let copies: Vec<(usize, usize)> = copied.into_iter().map(|taken_in| (taken_in, state())).collect();
        states.extend(copies.iter().map(|(_, page)| page));
        let span = |sequence: usize, first_row: usize, copies: &[(usize, usize)]| StateSpan {
            page: states[sequence],
            recurrence_at: shape.window(),
            first_row,
            tokens: counts[sequence],
            copies: copies.to_vec(),
        };
        let spans = [span(0, 0, &copies), span(1, counts[0], &[])];
        let spans: Vec<StateSpan> = spans.into_iter().filter(|span| span.tokens > 0).collect();
        let convolution = HeadConvolution {
            queries,
            keys,
            delayed,
            taps,
            bias,
            delayed_bias: shape.bias.then_some(of_values),
            head_dim: shape.head_dim,
            widths: shape.widths,
        };
        let mix = HeadMix { heads: shape.heads, kv_heads: shape.kv_heads, bias: of_heads, factors };
        let [gathered, earlier] = ops.convolve_heads(&convolution, &spans).unwrap();
        let [q, k] = ops.mix_heads([queries, keys, convolved], &mix).unwrap();
        found.extend(receive_bits(ops, [gathered, earlier, q, k]));
    }
    for page in states {
        let mut bytes = vec![0; row_bytes];
        attention.read(page, &mut bytes).unwrap();
        found.push(bytes.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect());
    }
    found
}

/// Compares the device and its fake.
pub fn compare(gpu: &Gpu) {
    let attention = Arc::new(gpu.attention().unwrap());
    let ops = gpu.ops(Arc::new(gpu.products(0).unwrap()), attention.clone()).unwrap();
    let host_attention = Arc::new(FakeAttention::new(1 << 30));
    let host = FakeOps::fake(Arc::new(FakeProducts::new(1 << 30)), host_attention.clone());
    for (heads, kv_heads, head_dim, widths, bias) in
        [(4, 2, 6, [2, 2], true), (8, 2, 64, [2, 2], false), (3, 1, 40, [3, 1], true), (2, 2, 33, [1, 4], true)]
    {
        let shape = Shape { heads, kv_heads, head_dim, widths, bias };
        let found = steps(&ops, attention.as_ref(), &shape);
        let wanted = steps(&host, host_attention.as_ref(), &shape);
        assert_eq!(found.len(), 3 * 4 + 4);
        for (which, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert!(found.iter().any(|bits| *bits != 0) || found.is_empty(), "{widths:?}: result {which}");
            assert!(found == wanted, "{heads} heads of {head_dim}, {widths:?}: result {which}");
        }
    }
}

#[test]
fn convolved_heads_have_the_same_bits() {
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
    let (q, k, delayed, taps) = (send(2, 8), send(2, 4), send(2, 2), ops.keep(&[0.0; 64]).unwrap());
    let form = KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 1, row_bytes: 4 * (2 * 12 + 2) };
    let page = attention.allocate(form).unwrap();
    let convolution = HeadConvolution {
        queries: q,
        keys: k,
        delayed,
        taps,
        bias: taps,
        delayed_bias: None,
        head_dim: 4,
        widths: [2, 2],
    };
    let span = StateSpan { page, recurrence_at: 24, first_row: 0, tokens: 2, copies: vec![] };
    assert!(ops.convolve_heads(&convolution, std::slice::from_ref(&span)).is_ok());
    let others = [
        HeadConvolution { widths: [3, 2], ..convolution },
        HeadConvolution { widths: [0, 4], ..convolution },
        HeadConvolution { head_dim: 3, ..convolution },
        HeadConvolution { delayed: send(2, 3), ..convolution },
        HeadConvolution { keys: send(1, 4), ..convolution },
    ];
    for other in others {
        assert!(ops.convolve_heads(&other, std::slice::from_ref(&span)).is_err(), "{other:?}");
    }
    let mix = HeadMix { heads: 2, kv_heads: 1, bias: taps, factors: taps };
    assert!(ops.mix_heads([q, k, send(2, 12)], &mix).is_ok());
    for (rows, mix) in [
        ([q, k, send(2, 11)], mix),
        ([q, k, send(1, 12)], mix),
        ([q, q, send(2, 12)], mix),
        ([q, k, send(2, 12)], HeadMix { kv_heads: 0, ..mix }),
        ([q, k, send(2, 12)], HeadMix { heads: 3, ..mix }),
    ] {
        assert!(ops.mix_heads(rows, &mix).is_err(), "{mix:?}");
    }
}
