//! Attention of prompts in half precision is near that of the CPU, and does not depend on what else a launch computes.

use std::ops::Range;

use larder_core::NumberFormat;
use larder_cuda::Gpu;

use crate::attention::{KvCase, Queries, Shape, both, shape};
use crate::common::{Random, emulator, gpu};

/// The unit roundoff of half precision.
const HALF: f32 = 1.0 / 2048.0;

/// The largest difference from exact results that rounding to half precision explains: products of queries and keys are
/// off by two roundings of each of their terms, a weight by the power of the difference, and weights and values are
/// rounded once.
fn bound(queries: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>], scale: f32) -> f32 {
    let of_key = |key: &Vec<f32>| queries.iter().zip(key).map(|(q, k)| (q * k).abs()).sum::<f32>();
    let score = scale * keys.iter().map(of_key).fold(0.0, f32::max) * 2.0 * HALF;
    let largest = values.iter().flatten().map(|v| v.abs()).fold(0.0, f32::max);
    ((2.0 * score).exp_m1() + 3.0 * HALF) * largest
}

/// The rows that a head sees, in floats.
fn rows_of(rows: &KvCase, width: usize, head: usize, seen: &Range<usize>) -> Vec<Vec<f32>> {
    let row = |at| {
        let mut values = rows.values(head, at);
        values.truncate(width);
        values
    };
    seen.clone().map(row).collect()
}

/// Compares attention of several shapes with that of the CPU.
pub fn compare(gpu: &Gpu) {
    let device = gpu.flash_attention().unwrap();
    let mut random = Random::new(7);
    let shapes = [
        shape(8, 2, 32, 32),
        Shape { sinks: true, ..shape(6, 3, 44, 40) },
        Shape { latent: true, ..shape(5, 1, 72, 64) },
        shape(2, 1, 128, 260),
    ];
    let kinds = [NumberFormat::F32, NumberFormat::F16, NumberFormat::Q8_0];
    let (mut changed, mut largest) = (0, 0.0_f32);
    for shape in shapes.into_iter().flat_map(|shape| kinds.map(|kind| Shape { kind, ..shape })) {
        let Shape { heads, kv_heads, key, value, latent, kind, .. } = shape;
        let mut rows = [key, value].map(|width| KvCase::new(kind, kv_heads, width));
        rows.iter_mut().for_each(|rows| rows.append(&device, &mut random, 150));
        // All positions before a query, and those of a window.
        for window in [150, 21] {
            let seen: Vec<_> = (108..150).map(|at: usize| (at + 1).saturating_sub(window)..at + 1).collect();
            let queries = Queries::new(&mut random, &shape, seen);
            let views = [&rows[0], &rows[usize::from(!latent)]];
            let part = |range: Range<usize>| Queries {
                queries: queries.queries[range.start * heads * key..range.end * heads * key].to_vec(),
                sinks: queries.sinks.clone(),
                seen: queries.seen[range].to_vec(),
            };
            let [wanted, found] = both(&device, &shape, &[(part(0..42), views)]);
            for (pair, (wanted, found)) in wanted.chunks_exact(value).zip(found.chunks_exact(value)).enumerate() {
                let seen = &queries.seen[pair / heads];
                let head = pair % heads / (heads / kv_heads);
                let [keys, values] =
                    [(views[0], key), (views[1], value)].map(|(rows, width)| rows_of(rows, width, head, seen));
                let bound = bound(&queries.queries[pair * key..][..key], &keys, &values, 0.37);
                for (wanted, found) in wanted.iter().zip(found) {
                    let error = (f32::from_bits(*wanted) - f32::from_bits(*found)).abs();
                    assert!(error <= bound, "{kind}, {key} and {value}: {error} is above {bound}");
                    changed += usize::from(wanted != found);
                    largest = largest.max(error / bound);
                }
            }
            // Fewer queries in another launch.
            let [_, again] = both(&device, &shape, &[(part(5..40), views)]);
            assert!(again == found[5 * heads * value..40 * heads * value], "{kind}, {key} and {value}");
            // As few as are drafted are computed as ever.
            let [wanted, found] = both(&device, &shape, &[(part(0..31), views)]);
            assert!(wanted == found, "{kind}, {key} and {value}");
        }
        rows.iter().for_each(|rows| rows.free(&device));
    }
    println!("the largest error is {largest:.3} of the bound");
    assert!(changed > 8_000 && largest > 0.01, "{changed} values differ, by {largest} of the bound");
}

#[test]
fn prompts_in_half_precision_are_near() {
    let Some(emulator) = emulator(1) else { return };
    compare(&gpu(emulator));
}

#[test]
fn a_device_without_tensor_cores_refuses_half_precision() {
    let Some(emulator) = emulator(1) else { return };
    let error = gpu(emulator.without_tensor_cores()).flash_attention().err().unwrap().to_string();
    assert_eq!(error, "attention in half precision needs a GPU of compute capability 8.0 or later");
}
