//! Scales by weighted least squares.
//!
//! A scale decides to which integers values are rounded, and the integers decide which scale is best. So some scales
//! are tried, each is replaced by the best one for its integers, and the one with the least error is kept. Sums are
//! over eight lanes, whose additions compile to SIMD code and have one order on every machine.

const LANES: usize = 8;

/// Rounds of improving the best of the scales that were tried.
const IMPROVEMENTS: usize = 4;

/// Values of a group that have a scale, and what their errors weigh.
#[derive(Clone, Copy)]
pub struct Group<'a> {
    /// A multiple of eight.
    pub values: &'a [f32],
    pub weights: &'a [f32],
}

impl<'a> Group<'a> {
    /// A group of a block; there are as many weights as values.
    pub fn new(values: &'a [f32], weights: &'a [f32]) -> Self {
        Group { values, weights }
    }

    /// The groups of `size` values of a block.
    pub fn all_of(values: &'a [f32], weights: &'a [f32], size: usize) -> impl Iterator<Item = Self> {
        values.chunks_exact(size).zip(weights.chunks_exact(size)).map(|(values, weights)| Group { values, weights })
    }

    /// The sums of `K` terms over all values, and their weights.
    pub fn sums<const K: usize>(&self, terms: impl Fn(f32, f32) -> [f32; K]) -> [f32; K] {
        let mut sums = [[0.0; LANES]; K];
        for (values, weights) in self.values.as_chunks::<LANES>().0.iter().zip(self.weights.as_chunks::<LANES>().0) {
            for lane in 0..LANES {
                let terms = terms(values[lane], weights[lane]);
                for (sums, term) in sums.iter_mut().zip(terms) {
                    sums[lane] += term;
                }
            }
        }
        sums.map(|lanes| lanes.iter().sum())
    }
}

/// What the errors of a block's values weigh. Those of large values weigh more than those of small ones, because they
/// matter more to a product; where it is known how much each column matters, that counts as well.
pub fn weights<const V: usize>(values: &[f32; V], importance: Option<&[f32; V]>) -> [f32; V] {
    let spread = spread(values);
    match importance {
        None => values.map(|v| spread + v.abs()),
        Some(importance) => {
            let mut weights = *importance;
            for (weight, v) in weights.iter_mut().zip(values) {
                *weight *= (2.0 * spread * spread + v * v).sqrt();
            }
            weights
        }
    }
}

/// The root mean square of values, whose number is a multiple of eight.
pub fn spread(values: &[f32]) -> f32 {
    let [squares] = Group::new(values, values).sums(|v, _| [v * v]);
    (squares / values.len() as f32).sqrt()
}

/// The value of largest magnitude.
pub fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most: f32, v| if v.abs() > most.abs() { *v } else { most })
}

/// 1 / d, and 0 for 0.
pub fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The scale with which the levels `nearest(value / scale)` are best, from the inverses of scales to try.
pub fn scale(group: Group, inverses: impl Iterator<Item = f32>, nearest: impl Fn(f32) -> f32) -> f32 {
    // The error is the sum of the squared values less the gain.
    let improved = |inverse: f32| {
        let [xl, ll] = group.sums(|x, w| {
            let l = nearest(x * inverse);
            [w * x * l, w * l * l]
        });
        if ll > 0.0 { (xl / ll * xl, xl / ll) } else { (0.0, 0.0) }
    };
    let mut best = (0.0, 0.0);
    for tried in inverses.map(improved) {
        best = if tried.0 > best.0 { tried } else { best };
    }
    for _ in 0..IMPROVEMENTS {
        let next = improved(inverse(best.1));
        if next.0.is_nan() || next.0 <= best.0 {
            break;
        }
        best = next;
    }
    best.1
}

/// The scale, and a minimum of zero or less if `below` is set, with which `round((value − minimum) / scale)`, from 0 to
/// `most`, are best.
pub fn scale_and_minimum(group: Group, most: f32, below: bool) -> (f32, f32) {
    let low = group.values.iter().fold(if below { 0.0 } else { f32::INFINITY }, |m: f32, v| m.min(*v));
    let high = group.values.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
    if high <= low {
        return (0.0, low);
    }
    let [weights, xs] = group.sums(|x, w| [w, w * x]);
    let improved = |inverse: f32, low: f32| {
        let [ls, lls, xls] = group.sums(|x, w| {
            let l = rounded((x - low) * inverse, 0.0, most);
            [w * l, w * l * l, w * x * l]
        });
        let determinant = weights * lls - ls * ls;
        let scale = (weights * xls - xs * ls) / determinant;
        let low = (lls * xs - ls * xls) / determinant;
        match (determinant > 0.0 && scale > 0.0, below && low > 0.0) {
            (true, false) => (scale * xls + low * xs, scale, low),
            (_, _) if lls > 0.0 => (xls / lls * xls, xls / lls, 0.0),
            _ => (0.0, 0.0, 0.0),
        }
    };
    let mut best = (f32::NEG_INFINITY, (high - low) / most, low);
    for step in -10..=10 {
        let tried = improved((most + 0.1 * step as f32) / (high - low), low);
        best = if tried.0 > best.0 { tried } else { best };
    }
    for _ in 0..IMPROVEMENTS {
        let next = improved(inverse(best.1), best.2);
        if next.0.is_nan() || next.0 <= best.0 {
            break;
        }
        best = next;
    }
    (best.1, best.2)
}

/// 1.5 · 2^23: added to a small value, it leaves no bits for the fraction, and the low byte is that of the rounded
/// value.
pub const SHIFT: f32 = 12_582_912.0;

/// The nearest integer of a magnitude below 2^22, between two bounds. Compiles to SIMD code on every instruction set.
pub fn rounded(value: f32, least: f32, most: f32) -> f32 {
    (clamped(value, least, most) + SHIFT) - SHIFT
}

/// `value`, or the bound that it is beyond; the lower one for NaN.
pub fn clamped(value: f32, least: f32, most: f32) -> f32 {
    let value = if value > least { value } else { least };
    if value < most { value } else { most }
}

/// The inverses of scales with which the value of largest magnitude is near `level`, by less than one.
pub fn around(values: &[f32], level: f32) -> impl Iterator<Item = f32> {
    let inverse = inverse(extreme(values));
    (-9..=9).map(move |step| (level + 0.1 * step as f32) * inverse)
}
