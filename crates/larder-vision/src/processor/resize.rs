//! Resizing with a filter that is widened where the picture shrinks, on bytes, in the integers of torchvision on a
//! CPU: first along rows, rounded to bytes, then along columns.

use larder_kernels::ThreadPool;

/// Bits of a weight at most.
const WEIGHT_BITS: u32 = 15;
/// Rows of a task.
const ROWS: usize = 16;

/// A filter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ResizeFilter {
    /// Keys' cubic with a = -0.5.
    Bicubic,
    /// A triangle.
    Bilinear,
}

impl ResizeFilter {
    /// Half of its width.
    fn radius(self) -> f64 {
        match self {
            ResizeFilter::Bicubic => 2.0,
            ResizeFilter::Bilinear => 1.0,
        }
    }

    fn at(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let x = x.abs();
        match self {
            ResizeFilter::Bilinear if x < 1.0 => 1.0 - x,
            ResizeFilter::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            ResizeFilter::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            _ => 0.0,
        }
    }
}

/// The weights of an axis: for each place of the output where its places of the input begin, and their weights.
struct AxisWeights {
    starts: Vec<(usize, usize)>,
    /// One run of `starts[i].1` after the other.
    weights: Vec<i16>,
    /// Where the runs begin.
    runs: Vec<usize>,
    shift: u32,
}

impl AxisWeights {
    fn new(input: usize, output: usize, filter: ResizeFilter) -> Self {
        let scale = input as f64 / output as f64;
        let widening = scale.max(1.0);
        let (support, narrowing) = (filter.radius() * widening, 1.0 / widening);
        let (mut starts, mut exact, mut runs) = (Vec::with_capacity(output), Vec::new(), Vec::with_capacity(output));
        for place in 0..output {
            let centre = scale * (place as f64 + 0.5);
            let first = (centre - support + 0.5).max(0.0) as usize;
            let count = ((centre + support + 0.5) as usize).min(input).saturating_sub(first);
            runs.push(exact.len());
            starts.push((first, count));
            let at = |j: usize| filter.at(((j + first) as f64 - centre + 0.5) * narrowing);
            let total: f64 = (0..count).map(at).sum();
            exact.extend((0..count).map(|j| at(j) / total));
        }
        let shift = largest_shift(exact.iter().fold(0.0, |most: f64, weight| most.max(*weight)));
        let round = |weight: &f64| {
            let value = weight * f64::from(1 << shift);
            (value + if value < 0.0 { -0.5 } else { 0.5 }) as i16
        };
        AxisWeights { starts, weights: exact.iter().map(round).collect(), runs, shift }
    }

    /// The place of the input where those of `place` begin, and their weights.
    fn of(&self, place: usize) -> (usize, &[i16]) {
        let (first, count) = self.starts[place];
        (first, &self.weights[self.runs[place]..][..count])
    }

    fn byte(&self, sum: i32) -> u8 {
        (sum >> self.shift).clamp(0, 255) as u8
    }

    /// A half, which rounds.
    fn half(&self) -> i32 {
        1 << (self.shift - 1)
    }
}

/// The largest shift at which the largest weight stays below 2^15.
fn largest_shift(weight: f64) -> u32 {
    let fits = |shift: u32| ((0.5 + weight * f64::from(1 << (shift + 1))) as i64) < 1 << WEIGHT_BITS;
    (0..22).find(|shift| !fits(*shift)).unwrap_or(22).max(1)
}

/// Resizes `[height, width, 3]` bytes.
pub fn resize(
    pool: &ThreadPool,
    pixels: &[u8],
    (width, height): (usize, usize),
    (to_width, to_height): (usize, usize),
    filter: ResizeFilter,
) -> Vec<u8> {
    let across = (to_width != width).then(|| along_rows(pool, pixels, width, to_width, filter));
    let pixels = across.as_deref().unwrap_or(pixels);
    if to_height == height { pixels.to_vec() } else { along_columns(pool, pixels, to_width, height, to_height, filter) }
}

fn along_rows(pool: &ThreadPool, pixels: &[u8], width: usize, to_width: usize, filter: ResizeFilter) -> Vec<u8> {
    let weights = AxisWeights::new(width, to_width, filter);
    let rows = pixels.as_chunks().0.chunks_exact(width).collect::<Vec<&[[u8; 3]]>>();
    let mut out = vec![[0u8; 3]; to_width * rows.len()];
    pool.run_chunks(&mut out, to_width * ROWS, &|number, out| {
        for (row, out) in rows[number * ROWS..].iter().zip(out.chunks_exact_mut(to_width)) {
            for (place, out) in out.iter_mut().enumerate() {
                let (first, weights_of) = weights.of(place);
                let mut sums = [weights.half(); 3];
                for (pixel, weight) in row[first..].iter().zip(weights_of) {
                    sums.iter_mut().zip(pixel).for_each(|(sum, v)| *sum += i32::from(*v) * i32::from(*weight));
                }
                *out = sums.map(|sum| weights.byte(sum));
            }
        }
    });
    out.into_flattened()
}

fn along_columns(
    pool: &ThreadPool,
    pixels: &[u8],
    width: usize,
    height: usize,
    to_height: usize,
    filter: ResizeFilter,
) -> Vec<u8> {
    let (weights, row_bytes) = (AxisWeights::new(height, to_height, filter), width * 3);
    let mut out = vec![0u8; row_bytes * to_height];
    pool.run_chunks(&mut out, row_bytes, &|place, out| {
        let (first, weights_of) = weights.of(place);
        let mut sums = vec![weights.half(); row_bytes];
        for (row, weight) in pixels[first * row_bytes..].chunks_exact(row_bytes).zip(weights_of) {
            sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += i32::from(*v) * i32::from(*weight));
        }
        out.iter_mut().zip(&sums).for_each(|(out, sum)| *out = weights.byte(*sum));
    });
    out
}
