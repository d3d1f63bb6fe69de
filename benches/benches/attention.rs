//! How long attention over a KV cache takes, in microseconds per layer, in GB of keys and values per second, and in
//! GFLOP/s of scores and weighted sums, for decode and for prefill, by number format and positions per page.
//!
//! `cargo bench -p larder-benches --bench attention -- [THREADS]`

use std::time::{Duration, Instant};

use larder_core::{KV_PAGE_TOKENS, NumberFormat};
use larder_kernels::{
    AttentionArgs, AttentionTask, KvTensor, ThreadPool, attend, instruction_set, narrow, quantise_row,
};

/// Keys and values of all layers together: more than a cache holds, so that most reads are from memory.
const KV_BYTES: usize = 64 << 20;

/// What a model's attention looks like.
struct Shape {
    name: &'static str,
    heads: usize,
    kv_heads: usize,
    key: usize,
    value: usize,
}

const SHAPES: [Shape; 3] = [
    Shape { name: "Qwen3-30B: 32 heads over 4", heads: 32, kv_heads: 4, key: 128, value: 128 },
    Shape { name: "OLMoE: 16 heads over 16", heads: 16, kv_heads: 16, key: 128, value: 128 },
    Shape { name: "DeepSeek-V2-Lite: 16 heads over 1", heads: 16, kv_heads: 1, key: 576, value: 512 },
];

/// Queries, and positions of the last one.
const PASSES: [(usize, usize); 4] = [(1, 512), (1, 4096), (64, 4096), (512, 8192)];

fn main() {
    let mut args = std::env::args().skip(1).filter(|a| !a.starts_with('-'));
    let most = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = args.next().map_or(most, |n| n.parse().expect("a number of threads"));
    let pool = ThreadPool::new(threads, false).expect("threads");
    println!("{threads} threads, {}; µs per layer, GB/s of keys and values, GFLOP/s", instruction_set());
    for shape in &SHAPES {
        for (queries, positions) in PASSES {
            println!("{}, {queries} queries at {positions}", shape.name);
            for kind in [NumberFormat::F32, NumberFormat::F16, NumberFormat::Q8_0] {
                for page_len in [KV_PAGE_TOKENS / 4, KV_PAGE_TOKENS, 4 * KV_PAGE_TOKENS, positions] {
                    let [time, rate, flops] = measure(&pool, shape, kind, page_len, queries, positions);
                    println!("  {kind:5} pages of {page_len:5} {time:10.1} {rate:8.2} {flops:8.1}");
                }
            }
        }
    }
}

/// The pages of one layer.
fn pages(kind: NumberFormat, positions: usize, page_len: usize, values: usize) -> Vec<Vec<u8>> {
    let noise: Vec<f32> = (0..page_len * values).map(|i| ((i % 9973) as f32 * 0.731).sin()).collect();
    let mut page = vec![0; noise.len() / kind.block_len() * kind.block_bytes()];
    match kind {
        NumberFormat::Q8_0 => quantise_row(&noise, &mut page),
        _ => narrow(kind, &noise, &mut page),
    }
    vec![page; positions.div_ceil(page_len)]
}

/// Median microseconds per layer, gigabytes per second, and GFLOP/s.
fn measure(
    pool: &ThreadPool,
    shape: &Shape,
    kind: NumberFormat,
    page_len: usize,
    queries: usize,
    positions: usize,
) -> [f64; 3] {
    let Shape { heads, kv_heads, key, value, .. } = *shape;
    let row = |width: usize| width / kind.block_len() * kind.block_bytes();
    let layer_bytes = positions * kv_heads * (row(key) + row(value));
    let layer = |width| pages(kind, positions, page_len, kv_heads * width);
    let layers: Vec<_> = (0..KV_BYTES.div_ceil(layer_bytes)).map(|_| (layer(key), layer(value))).collect();
    let q: Vec<f32> = (0..queries * heads * key).map(|i| (i as f32 * 0.37).cos()).collect();
    let seen: Vec<_> = (0..queries).map(|i| 0..positions - queries + i + 1).collect();
    let mut out = vec![0.0; queries * heads * value];
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 5 || start.elapsed() < Duration::from_millis(500) {
        let before = Instant::now();
        for (keys, values) in &layers {
            let keys = KvTensor { kind, pages: keys, page_len, row_bytes: row(key), width: key };
            let values = KvTensor { kind, pages: values, page_len, row_bytes: row(value), width: value };
            let (queries, scale, sinks) = (&q[..], 0.088, None);
            let args = AttentionArgs { queries, heads, keys, values, kv_heads, seen: &seen, scale, sinks, bias: None };
            attend(pool, &mut [AttentionTask { args, out: &mut out }]);
        }
        times.push(before.elapsed().as_secs_f64() / layers.len() as f64);
    }
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let pairs: usize = seen.iter().map(|seen| heads * seen.len()).sum();
    [1e6 * median, layer_bytes as f64 / median / 1e9, (2 * pairs * (key + value)) as f64 / median / 1e9]
}
