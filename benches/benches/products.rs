//! Products with one expert matrix of OLMoE's shape, for one token and for a chunk of a prompt, in every format and
//! both orders of bytes, on one thread and from cache. For rates beside those of memory, see `rates`.
//!
//! `cargo bench -p larder-benches --bench products`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use larder_core::{NumberFormat, RowOrder};
use larder_kernels::{InputBuffer, Product, ThreadPool, WeightMatrix, products};

const ROWS: usize = 1024;
const COLS: usize = 2048;

/// Any bytes are valid blocks, but scales should be numbers, and floats none of the smallest, which are slow.
fn weights(kind: NumberFormat) -> Vec<u8> {
    let bytes = kind.matrix_bytes(ROWS, COLS).expect("a shape of whole blocks");
    if kind.is_float() {
        return vec![0x3c; bytes];
    }
    (0..bytes).map(|i| (i.wrapping_mul(37) % 61) as u8).collect()
}

fn all(c: &mut Criterion) {
    let pool = ThreadPool::single_threaded();
    for tokens in [1, 32] {
        let mut group = c.benchmark_group(format!("{tokens} tokens"));
        let values: Vec<f32> = (0..tokens * COLS).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut buffer = InputBuffer::new();
        let x = buffer.fill(&values, COLS, true);
        let mut out = vec![0.0; tokens * ROWS];
        for kind in NumberFormat::ALL {
            let bytes = weights(kind);
            group.throughput(Throughput::Bytes(bytes.len() as u64));
            for order in RowOrder::ALL {
                if order == RowOrder::Rows8 && kind.is_float() {
                    continue;
                }
                group.bench_function(BenchmarkId::new(kind.name(), order), |b| {
                    b.iter(|| {
                        let weights =
                            WeightMatrix { kind, order, rows: ROWS, cols: COLS, scale: 1.0, bytes: black_box(&bytes) };
                        products(&pool, &mut [Product { weights, x: black_box(x), pick: None, out: &mut out }]);
                    });
                });
            }
        }
        group.finish();
    }
}

/// What it takes to quantise the activations of a chunk.
fn inputs(c: &mut Criterion) {
    let values: Vec<f32> = (0..32 * COLS).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut buffer = InputBuffer::new();
    let mut group = c.benchmark_group("inputs");
    group.throughput(Throughput::Elements(values.len() as u64));
    group.bench_function("32 tokens", |b| b.iter(|| black_box(buffer.fill(black_box(&values), COLS, true)).tokens()));
    group.finish();
}

/// A fork-join with nothing to do.
fn fork_join(c: &mut Criterion) {
    for threads in [2, 4] {
        let pool = ThreadPool::new(threads, false).expect("threads");
        c.bench_function(&format!("fork-join of {threads}"), |b| b.iter(|| pool.run(8, &|task| _ = black_box(task))));
    }
}

criterion_group!(benches, all, inputs, fork_join);
criterion_main!(benches);
