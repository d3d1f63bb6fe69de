//! How fast products are beside what the machine allows, in one table: decoding (one token) in GB of weights per
//! second beside the rate at which memory can be read, and batches in GFLOP per second, both also with candle.
//!
//! `cargo bench -p larder-benches --bench rates -- [THREADS] [KIND]`

use std::time::{Duration, Instant};

use candle_core::quantized::k_quants::{self, GgmlType};
use candle_core::quantized::{k_quants::BlockQ4_0, k_quants::BlockQ4K, k_quants::BlockQ8_0};
use larder_core::{NumberFormat, RowOrder};
use larder_kernels::{InputBuffer, Product, ThreadPool, WeightMatrix, instruction_set, products};

const ROWS: usize = 2048;
const COLS: usize = 1024;

/// More than any cache holds, so that every read is one from memory.
const WEIGHT_BYTES: usize = 512 << 20;

/// What a thread reads in a row when only the rate of memory is wanted.
const CHUNK: usize = 256 << 10;

/// Matrices in one go, as a layer with eight active experts has.
const TOGETHER: usize = 16;

fn main() {
    let mut args = std::env::args().skip(1).filter(|a| !a.starts_with('-'));
    let most = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = args.next().map_or(most, |n| n.parse().expect("a number of threads"));
    let only: Option<NumberFormat> = args.next().map(|kind| kind.parse().expect("a number format"));
    let pool = ThreadPool::new(threads, false).expect("threads");
    let bytes: Vec<u8> = (0..WEIGHT_BYTES / 8).flat_map(|i| scatter(i as u64).to_le_bytes()).collect();
    println!("{threads} threads, {}, {ROWS} x {COLS}", instruction_set());
    println!("{:28} {:6.1} GB/s", "memory", read_rate(&pool, &bytes));
    for kind in NumberFormat::ALL.into_iter().filter(|k| only.is_none_or(|only| only == *k)) {
        let bytes = with_small_scales(kind, bytes.clone());
        for order in [RowOrder::Plain, RowOrder::Rows8] {
            if order == RowOrder::Rows8 && kind.is_float() {
                continue;
            }
            let rate = decode_rate(&pool, kind, order, &bytes);
            let batches =
                [2, 4, 16, 512].map(|tokens| format!("{:7.1}", batch_rate(&pool, kind, order, &bytes, tokens)));
            println!("{:28} {rate:6.1} GB/s {} GFLOP/s", format!("{kind} {order}"), batches.join(" "));
        }
    }
    if only.is_none() {
        candle::<BlockQ4_0>("candle q4_0");
        candle::<BlockQ8_0>("candle q8_0");
        candle::<BlockQ4K>("candle q4_k");
    }
}

fn scatter(i: u64) -> u64 {
    (i ^ 0x9e37_79b9).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(31).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// Any bits are valid blocks, but sums should stay numbers.
fn with_small_scales(kind: NumberFormat, mut bytes: Vec<u8>) -> Vec<u8> {
    match kind.parts() {
        // Neither in plain nor in interleaved order is a byte a scale's upper one and large.
        Some(_) => bytes.iter_mut().for_each(|b| *b &= 0x3f),
        None => bytes.chunks_exact_mut(4).for_each(|v| v.copy_from_slice(&0x3c00_3c00u32.to_le_bytes())),
    }
    bytes
}

/// The best of several measurements, in calls per second.
fn rate(mut call: impl FnMut()) -> f64 {
    call();
    let mut best = Duration::MAX;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(700) {
        let once = Instant::now();
        call();
        best = best.min(once.elapsed());
    }
    1.0 / best.as_secs_f64()
}

/// The best of reading one, two and four places at a time.
fn read_rate(pool: &ThreadPool, bytes: &[u8]) -> f64 {
    let chunks = bytes.len() / CHUNK;
    let of = |call: fn(&[u8])| {
        let call = || pool.run(chunks, &|i| call(&bytes[i * CHUNK..(i + 1) * CHUNK]));
        rate(call) * bytes.len() as f64 / 1e9
    };
    of(read::<1>).max(of(read::<2>)).max(of(read::<4>))
}

fn read<const STREAMS: usize>(bytes: &[u8]) {
    let lines = bytes.as_chunks::<64>().0;
    let each = lines.len() / STREAMS;
    let mut sums = [[0u64; 8]; STREAMS];
    for i in 0..each {
        for (stream, sums) in sums.iter_mut().enumerate() {
            for (sum, word) in sums.iter_mut().zip(lines[stream * each + i].as_chunks::<8>().0) {
                *sum ^= u64::from_ne_bytes(*word);
            }
        }
    }
    std::hint::black_box(sums);
}

fn inputs(tokens: usize) -> Vec<f32> {
    (0..tokens * COLS).map(|i| (i as f32 * 0.37).sin()).collect()
}

/// All of the weights once, a layer's worth at a time.
fn decode_rate(pool: &ThreadPool, kind: NumberFormat, order: RowOrder, bytes: &[u8]) -> f64 {
    let size = kind.matrix_bytes(ROWS, COLS).expect("whole blocks");
    let matrices: Vec<&[u8]> = bytes.chunks_exact(size).collect();
    let (values, mut buffer) = (inputs(1), InputBuffer::new());
    let x = buffer.fill(&values, COLS, true);
    let mut out = vec![0.0; ROWS * TOGETHER];
    let call = || {
        for layer in matrices.chunks_exact(TOGETHER) {
            let mut round: Vec<_> = layer
                .iter()
                .zip(out.chunks_exact_mut(ROWS))
                .map(|(bytes, out)| {
                    let weights = WeightMatrix { kind, order, rows: ROWS, cols: COLS, scale: 1.0, bytes };
                    Product { weights, x, pick: None, out }
                })
                .collect();
            products(pool, &mut round);
        }
    };
    rate(call) * (matrices.len() / TOGETHER * TOGETHER * size) as f64 / 1e9
}

fn batch_rate(pool: &ThreadPool, kind: NumberFormat, order: RowOrder, bytes: &[u8], tokens: usize) -> f64 {
    let size = kind.matrix_bytes(ROWS, COLS).expect("whole blocks");
    let (values, mut buffer) = (inputs(tokens), InputBuffer::new());
    let x = buffer.fill(&values, COLS, true);
    let mut out = vec![0.0; ROWS * tokens];
    let mut at = 0;
    let call = || {
        let weights = WeightMatrix { kind, order, rows: ROWS, cols: COLS, scale: 1.0, bytes: &bytes[at..at + size] };
        products(pool, &mut [Product { weights, x, pick: None, out: &mut out }]);
        at = (at + size) % (bytes.len() - size);
    };
    rate(call) * (2 * ROWS * COLS * tokens) as f64 / 1e9
}

fn candle<T: GgmlType>(name: &str) {
    let (k, n) = (COLS, ROWS);
    let blocks = vec![T::zeros(); n * k / T::BLCK_SIZE];
    let matrices: Vec<_> = (0..WEIGHT_BYTES / size_of_val(&blocks[..])).map(|_| blocks.clone()).collect();
    let (x, mut out) = (vec![0.5f32; 512 * k], vec![0.0f32; 512 * n]);
    let decode = rate(|| {
        for matrix in &matrices {
            k_quants::matmul((1, k, n), &x[..k], matrix, &mut out[..n]).expect("a product");
        }
    });
    let decode = decode * (matrices.len() * size_of_val(&blocks[..])) as f64 / 1e9;
    let batches = [2, 4, 16, 512].map(|tokens| {
        let calls = rate(|| {
            k_quants::matmul((tokens, k, n), &x[..tokens * k], &matrices[0], &mut out[..tokens * n])
                .expect("a product");
        });
        format!("{:7.1}", calls * (2 * n * k * tokens) as f64 / 1e9)
    });
    println!("{name:28} {decode:6.1} GB/s {} GFLOP/s", batches.join(" "));
}
