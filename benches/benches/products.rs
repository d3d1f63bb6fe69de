//! Products with one expert matrix of OLMoE's shape, for one token and for a chunk of a prompt, in every format.
//!
//! `cargo bench -p larder-benches --bench products`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use larder_core::{Kind, Order};
use larder_kernels::{Inputs, Pool, Product, Weights, products as compute};

const ROWS: usize = 1024;
const COLS: usize = 2048;

/// Any bytes are valid blocks, but a NaN scale would slow nothing and mean nothing: this pattern has none.
fn weights(kind: Kind) -> Vec<u8> {
    let bytes = kind.matrix_bytes(ROWS, COLS).expect("a shape of whole blocks");
    (0..bytes).map(|i| (i.wrapping_mul(37) % 61) as u8).collect()
}

fn products(c: &mut Criterion) {
    for tokens in [1, 32] {
        let mut group = c.benchmark_group(format!("{tokens} tokens"));
        let x: Vec<f32> = (0..tokens * COLS).map(|i| (i as f32 * 0.37).sin()).collect();
        let (pool, mut inputs, mut out) = (Pool::alone(), Inputs::new(), vec![0.0; tokens * ROWS]);
        for kind in Kind::ALL {
            let bytes = weights(kind);
            group.throughput(Throughput::Bytes(bytes.len() as u64));
            group.bench_function(BenchmarkId::from_parameter(kind), |b| {
                b.iter(|| {
                    let order = Order::best(kind);
                    let weights = Weights { kind, order, rows: ROWS, cols: COLS, bytes: black_box(&bytes) };
                    inputs.fill(black_box(&x), COLS, !kind.is_float());
                    compute(&pool, &mut [Product { weights, x: &inputs, pick: None, out: &mut out }]);
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, products);
criterion_main!(benches);
