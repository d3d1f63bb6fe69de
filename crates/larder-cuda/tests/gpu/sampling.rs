//! The best logits of rows.

use std::sync::Arc;

use larder_core::{NumberFormat, RowOrder};
use larder_cuda::Gpu;
use larder_kernels::WeightMatrix;
use larder_model::{
    BEST_FOUND, ChangedLogit, DeviceProducts, DrawOps, DrawnFrom, FakeAttention, FakeOps, FakeProducts, LogitChanges,
    Ops, TokenDraw,
};

use crate::common::{Random, emulator, gpu, receive};

/// The places of the values that `find_best` has found in each row, in order; `None` where there are more than it
/// returns.
fn found(ops: &dyn Ops, values: &[f32], width: usize, best: usize) -> Vec<Option<Vec<usize>>> {
    let x = ops.send(values, width).unwrap();
    let rows = ops.find_best(x, best).unwrap();
    let [found] = receive(ops, [rows]);
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
    let [left, out] = receive(&ops, [x, taken]);
    for ((values, left), out) in values.chunks(700).zip(left.chunks(700)).zip(out.chunks(taken.width)) {
        assert!(places[..300].iter().zip(out).all(|(at, value)| *value == values[*at as usize]));
        let named = |at: usize| at % 2 == 1 && at < 600;
        assert!((0..700).all(|at| left[at] == if named(at) { f32::NEG_INFINITY } else { values[at] }));
    }
}

/// The token that is drawn among the best of some values, and what was found.
fn drawn(ops: &dyn Ops, values: &[f32], draw: &TokenDraw) -> Vec<f32> {
    let x = ops.send(values, values.len()).unwrap();
    let found = ops.find_best(x, if draw.top_k == 0 { 63 } else { draw.top_k }).unwrap();
    let from = DrawnFrom { found, all: (draw.top_k == 0).then_some(x), changed: None };
    let drawn = ops.draw(&from, draw).unwrap();
    let copy = ops.begin_copy(drawn).unwrap();
    let mut out = vec![0.0; drawn.width];
    ops.end_copy(copy, &mut out).unwrap();
    receive(ops, []);
    out
}

/// Compares draws with those of the fake.
pub fn compare_draws(gpu: &Gpu) {
    let ops = gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap();
    let (products, attention) = (Arc::new(FakeProducts::new(0)), Arc::new(FakeAttention::new(0)));
    let fake = FakeOps::fake(products, attention);
    let mut random = Random::new(8);
    let (mut tokens, mut compared) = (std::collections::BTreeSet::new(), 0);
    for case in 0..400 {
        let step = [0.001, 1.0, 3.0][case % 3];
        let values: Vec<f32> = (0..400).map(|_| (random.float() * 8.0 / step).round() * step).collect();
        let draw = TokenDraw {
            temperature: [0.0, 0.5, 1.0, 3.0][random.below(4)],
            top_k: if case % 2 == 0 { 0 } else { 1 + random.below(40) },
            top_p: [1.0, 0.95, 0.5, 0.01][random.below(4)],
            min_p: [0.0, 0.05, 0.5][random.below(3)],
            unit: f64::from(random.below(1 << 20) as u32) / f64::from(1 << 20),
        };
        let [own, wanted] = [&ops as &dyn Ops, &fake].map(|ops| drawn(ops, &values, &draw));
        let (count, same) = (own[1].to_bits() as usize, own[0].to_bits() == wanted[0].to_bits());
        // With many equal logits, or with many likely ones without top-k, not all that may be drawn are found.
        let TokenDraw { temperature, top_k, top_p, min_p, .. } = draw;
        let is_in_order_of_ids = top_k == 0 && top_p == 1.0 && min_p == 0.0;
        if count <= BEST_FOUND && (top_k > 0 || temperature <= 0.5) || is_in_order_of_ids && temperature > 0.0 {
            assert!(same, "case {case}, {draw:?}: {} and not {}", own[0].to_bits(), wanted[0].to_bits());
            tokens.insert(own[0].to_bits());
            compared += 1;
        }
    }
    assert!(compared > 200, "{compared} draws were compared");
    assert!(tokens.len() > 100, "{} tokens were drawn", tokens.len());
}

/// Compares changed logits, and draws from them, with those of the fake: no token follows, or one that is listed, or
/// one that is not.
pub fn compare_changes(gpu: &Gpu) {
    let ops = gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap();
    let fake = FakeOps::fake(Arc::new(FakeProducts::new(0)), Arc::new(FakeAttention::new(0)));
    let mut random = Random::new(10);
    let (width, mut new, mut others) = (600, 0, 0);
    for case in 0..200 {
        let values: Vec<f32> = (0..width).map(|_| random.float() * 8.0).collect();
        let ids: std::collections::BTreeSet<u32> = (0..random.below(400)).map(|_| random.below(620) as u32).collect();
        let token = |id| ChangedLogit {
            id,
            bias: [0.0, 1.7, f32::NEG_INFINITY][random.below(5).min(2)],
            in_text: random.below(2) as u32,
            in_answer: random.below(9) as u32,
        };
        let changes = LogitChanges {
            repetition: [1.0, 1.1, 0.7][case % 3],
            frequency: [0.0, 0.3, -0.1][case / 3 % 3],
            presence: [0.0, 0.45][case / 9 % 2],
            tokens: ids.into_iter().map(token).collect(),
        };
        let draw = TokenDraw { temperature: 0.0, top_k: 1, top_p: 1.0, min_p: 0.0, unit: 0.0 };
        let follows = case % 5 > 0;
        let of = |ops: &dyn Ops| {
            // The token that is drawn first is one of those that change then, or is not.
            let mut first = vec![0.0; width];
            first[case * 3] = 1.0;
            drawn(ops, &first, &draw);
            let x = ops.send(&values, width).unwrap();
            let changed = ops.change(x, &changes, follows).unwrap();
            let found = ops.find_best(x, 5).unwrap();
            let drawn = ops.draw(&DrawnFrom { found, all: None, changed: Some(changed) }, &draw).unwrap();
            let [logits, row] = receive(ops, [x, drawn]);
            let was = &row[2 + 2 * BEST_FOUND..];
            let (listed, [logit, id]) = was.split_last_chunk().unwrap();
            let listed = listed[..changes.tokens.len()].iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
            (logits, listed, logit.to_bits(), id.to_bits(), row[0].to_bits())
        };
        let [own, wanted] = [&ops as &dyn Ops, &fake].map(of);
        assert_eq!(own, wanted, "case {case}, follows: {follows}, {changes:?}");
        new += usize::from(own.3 < u32::MAX);
        others += usize::from(own.0 != values);
    }
    assert!((40..150).contains(&new) && others > 150, "{new} new tokens, {others} rows changed");
}

#[test]
fn logits_are_changed() {
    let Some(emulator) = emulator(1) else { return };
    compare_changes(&gpu(emulator));
}

/// Compares rows of matrices with those that the CPU widens: all formats, both orders, with and without a scale.
pub fn compare_rows(gpu: &Gpu) {
    let products = Arc::new(gpu.products(0).unwrap());
    let ops = gpu.ops(products.clone(), Arc::new(gpu.attention().unwrap())).unwrap();
    let mut random = Random::new(9);
    // Matrices of 288 columns end between two words in some formats, and are no whole blocks in others.
    let shapes = NumberFormat::ALL.into_iter().flat_map(|kind| [(kind, 19, 512), (kind, 19, 288)]);
    for (kind, rows, cols) in shapes.filter(|(kind, rows, cols)| kind.matrix_bytes(*rows, *cols).is_some()) {
        let mut seen = 0;
        for (order, scale) in [(RowOrder::Plain, 1.0), (RowOrder::Rows8, 1.0), (RowOrder::Rows8, 0.3)] {
            let mut bytes = vec![0; kind.matrix_bytes(rows, cols).unwrap()];
            random.weights(kind, &mut bytes);
            let stored = WeightMatrix { kind, order, rows, cols, scale, bytes: &bytes };
            let id = products.upload(stored).unwrap();
            for row in [0, 7, 8, 15, 16, 18] {
                let number = ops.send(&[f32::from_bits(row as u32), 7.5], 2).unwrap();
                let widened = ops.row_of(id, number).unwrap();
                let ([out], mut wanted) = (receive(&ops, [widened]), vec![0.0; cols]);
                larder_kernels::widen_row(stored, row, &mut wanted);
                for (i, (out, wanted)) in out.iter().zip(&wanted).enumerate() {
                    let same = out.to_bits() == wanted.to_bits() || out.is_nan() && wanted.is_nan();
                    assert!(same, "{kind} {order:?} {scale}: {out} and not {wanted} in row {row}, column {i}");
                }
                seen += wanted.iter().filter(|value| **value != 0.0 && value.is_finite()).count();
            }
        }
        assert!(seen > 3 * 6 * cols / 4, "{kind}: {seen} values of rows of {cols}");
    }
}

#[test]
fn tokens_are_drawn() {
    let Some(emulator) = emulator(1) else { return };
    compare_draws(&gpu(emulator));
}

#[test]
fn rows_are_widened() {
    let Some(emulator) = emulator(1) else { return };
    compare_rows(&gpu(emulator));
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
