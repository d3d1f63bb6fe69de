//! The best logits of rows.

use std::sync::Arc;

use larder_cuda::Gpu;
use larder_model::{BEST_FOUND, DeviceOps};

use crate::common::{Random, emulator, gpu};

/// The places of the values that `find_best` has found in each row, in order; `None` where there are more than it returns.
fn found(ops: &dyn DeviceOps, values: &[f32], width: usize, best: usize) -> Vec<Option<Vec<usize>>> {
    let x = ops.send(values, width).unwrap();
    let rows = ops.find_best(x, best).unwrap();
    let mut found = vec![0.0_f32; rows.rows * rows.width];
    ops.receive(&mut [(rows, &mut found)]).unwrap();
    let of_row = |(row, values): (&[f32], &[f32])| {
        let pairs = row.get(1..1 + 2 * row[0].to_bits() as usize)?.as_chunks().0;
        let mut places: Vec<usize> = pairs.iter().map(|[place, _]| place.to_bits() as usize).collect();
        let same = |[place, value]: &[f32; 2]| values[place.to_bits() as usize].to_bits() == value.to_bits();
        assert!(pairs.iter().all(same));
        places.sort_unstable();
        Some(places)
    };
    found.chunks_exact(1 + 2 * BEST_FOUND).zip(values.chunks_exact(width)).map(of_row).collect()
}

/// The places of the `best` highest values and of those equal to the last of them.
fn by_definition(values: &[f32], best: usize) -> Vec<usize> {
    let rank = |value: f32| if value.is_nan() { f32::INFINITY } else { value };
    let mut order: Vec<f32> = values.iter().map(|value| rank(*value)).collect();
    order.sort_by(|a, b| b.partial_cmp(a).unwrap());
    let least = order[best - 1];
    (0..values.len()).filter(|place| rank(values[*place]) >= least).collect()
}

/// Compares the search with its definition.
pub fn compare(gpu: &Gpu) {
    let ops = gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap();
    let mut random = Random::new(5);
    let (mut exact, mut too_many) = (0, 0);
    for (width, rows) in [(5, 2), (200, 1), (1000, 3), (8192, 1), (8200, 2), (151_936, 1)] {
        for best in [1, 3, 20, 60].into_iter().filter(|best| *best < width && (width < 2000 || *best == 20)) {
            for odd in 0..6 {
                let mut values: Vec<f32> = (0..rows * width).map(|_| random.float() * 20.0).collect();
                let place = random.below(values.len());
                match odd {
                    0 => values.iter_mut().for_each(|v| *v = v.round()),
                    1 => values[place] = f32::NAN,
                    2 => values[place] = f32::INFINITY,
                    3 => values.iter_mut().for_each(|v| *v = if *v > 19.0 { -0.0 * v.signum() } else { -v.abs() }),
                    4 => values
                        .iter_mut()
                        .enumerate()
                        .for_each(|(i, v)| *v = if i % 7 > 0 { f32::NEG_INFINITY } else { *v }),
                    _ => {}
                }
                for (row, found) in found(&ops, &values, width, best).into_iter().enumerate() {
                    let wanted = by_definition(&values[row * width..][..width], best);
                    let Some(found) = found else {
                        too_many += 1;
                        assert!(odd != 5 || best == 60, "only ties, or many of few values, are more than {BEST_FOUND}");
                        continue;
                    };
                    assert!(wanted.iter().all(|place| found.contains(place)), "{best} of {width}, {odd}");
                    exact += usize::from(found == wanted);
                }
            }
        }
    }
    assert!(exact > 60 && too_many > 10, "{exact} were found alone, {too_many} were too many");
}

/// Takes values out of two rows.
pub fn compare_taken(gpu: &Gpu) {
    let ops = gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap();
    let mut random = Random::new(6);
    let values = random.floats(2 * 700);
    let x = ops.send(&values, 700).unwrap();
    let places: Vec<u32> = (0..300).map(|i| 2 * i + 1).chain([700, 9000]).collect();
    let taken = ops.take_out(x, &places).unwrap();
    let (mut left, mut out) = (vec![0.0; 1400], vec![0.0; 2 * taken.width]);
    ops.receive(&mut [(x, &mut left), (taken, &mut out)]).unwrap();
    for ((values, left), out) in values.chunks(700).zip(left.chunks(700)).zip(out.chunks(taken.width)) {
        assert!(places[..300].iter().zip(out).all(|(at, value)| *value == values[*at as usize]));
        let named = |at: usize| at % 2 == 1 && at < 600;
        assert!((0..700).all(|at| left[at] == if named(at) { f32::NEG_INFINITY } else { values[at] }));
    }
}

#[test]
fn values_are_taken_out() {
    let Some(emulator) = emulator(1) else { return };
    compare_taken(&gpu(emulator));
}

#[test]
fn the_best_logits_are_found() {
    let Some(emulator) = emulator(1) else { return };
    compare(&gpu(emulator));
}
