//! How long products take whose weights are in the processor's caches: the limit of arithmetic for steps of several
//! tokens.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use larder_core::{NumberFormat, RowOrder};
use larder_kernels::{InputBuffer, Product, ThreadPool, WeightMatrix, products};
use larder_runtime::{FormatBytes, OpenModel};

/// Numbers of tokens that are measured: all up to this one. More take as long for each token as this many.
const TOKENS: usize = 16;
/// The matrix that is measured: rows as long as those of common models, and each thread's share of it fits its cache.
const ROWS: usize = 256;
const COLS: usize = 2048;
/// Time for each number of tokens, of which the fastest call counts.
const PROBE_TIME: Duration = Duration::from_millis(15);

/// Seconds that the products of a model take at least.
pub struct KernelRates {
    /// Per byte of weights in a format, for one token, two, and so on.
    seconds: HashMap<NumberFormat, [f64; TOKENS]>,
    /// The resident matrices that each step multiplies with.
    resident: FormatBytes,
    /// One expert of each MoE row.
    experts: Vec<FormatBytes>,
}

impl KernelRates {
    /// Measures the formats of `model` on `threads` threads.
    pub fn measure(model: &OpenModel, threads: usize) -> Result<Self> {
        let pool = ThreadPool::new(threads, false).context("no threads for the measurement of products")?;
        let (resident, experts) = model.product_bytes()?;
        let mut seconds = HashMap::new();
        for (kind, _) in experts.iter().chain([&resident]).flatten() {
            seconds.entry(*kind).or_insert_with(|| seconds_per_byte(&pool, *kind));
        }
        Ok(KernelRates { seconds, resident, experts })
    }

    /// The resident weights times `tokens` tokens.
    pub fn resident_seconds(&self, tokens: usize) -> f64 {
        self.of(&self.resident, tokens)
    }

    /// One expert of a MoE row times `tokens` tokens.
    pub fn expert_seconds(&self, row: usize, tokens: usize) -> f64 {
        self.of(&self.experts[row], tokens)
    }

    fn of(&self, weights: &FormatBytes, tokens: usize) -> f64 {
        let measured = tokens.clamp(1, TOKENS);
        let more = tokens as f64 / measured as f64;
        weights.iter().map(|(kind, bytes)| *bytes as f64 * self.seconds[kind][measured - 1] * more).sum()
    }
}

fn seconds_per_byte(pool: &ThreadPool, kind: NumberFormat) -> [f64; TOKENS] {
    let size = kind.matrix_bytes(ROWS, COLS).expect("whole blocks");
    // As numbers of any format small, but not so small that they would be denormal.
    let bytes = vec![0x11; size];
    let weights = WeightMatrix { kind, order: RowOrder::best(kind), rows: ROWS, cols: COLS, scale: 1.0, bytes: &bytes };
    std::array::from_fn(|i| {
        let tokens = i + 1;
        let values: Vec<f32> = (0..tokens * COLS).map(|i| (i as f32 * 0.37).sin()).collect();
        let (mut buffer, mut out) = (InputBuffer::new(), vec![0.0; tokens * ROWS]);
        let x = buffer.fill(&values, COLS, !kind.is_float());
        let call = || products(pool, &mut [Product { weights, x, pick: None, out: &mut out }]);
        shortest(call) / size as f64
    })
}

/// Seconds of the fastest of the calls that fit the time of a measurement.
fn shortest(mut call: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed() < PROBE_TIME {
        let began = Instant::now();
        call();
        best = best.min(began.elapsed().as_secs_f64());
    }
    best
}
