//! Products: independence of threads, order and batch; shapes; panics.

use larder_core::{NumberFormat, RowOrder};

use super::*;
use crate::dot::dot;
use crate::inputs::InputBuffer;
use crate::testing::{Noise, ordered};

fn single_product(weights: WeightMatrix, x: Inputs) -> Vec<f32> {
    let mut out = vec![0.0; x.tokens() * weights.rows];
    products(&ThreadPool::single_threaded(), &mut [Product { weights, x, pick: None, out: &mut out }]);
    out
}

#[test]
fn threads_row_order_and_other_products_change_no_bit() {
    let mut noise = Noise::new(3);
    // Smaller under Miri, which is a thousand times slower.
    let (cols, tokens, most_rows) = if cfg!(miri) { (256, 2, 10) } else { (512, 70, 60) };
    let (mut buffer, activations) = (InputBuffer::new(), noise.values(tokens * cols));
    let x = buffer.fill(&activations, cols, true);
    let plain: Vec<_> = NumberFormat::ALL.iter().map(|kind| (*kind, 8 + noise.below(most_rows))).collect();
    let plain: Vec<_> = plain.into_iter().map(|(kind, rows)| (kind, rows, noise.weights(kind, rows, cols))).collect();
    let weights = |(kind, rows, bytes): &'_ (NumberFormat, usize, Vec<u8>)| (*kind, *rows, bytes.clone());
    let want: Vec<_> = plain
        .iter()
        .map(weights)
        .map(|(kind, rows, bytes)| {
            single_product(WeightMatrix { kind, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &bytes }, x)
        })
        .collect();
    for threads in [1, 2, 5] {
        let pool = ThreadPool::new(threads, false).unwrap();
        for order in RowOrder::ALL {
            let stored: Vec<_> = plain.iter().map(|(k, r, bytes)| ordered(*k, order, *r, cols, bytes)).collect();
            let mut outs: Vec<_> = want.iter().map(|w| vec![f32::NAN; w.len()]).collect();
            let mut all: Vec<_> = plain
                .iter()
                .zip(&stored)
                .zip(&mut outs)
                .map(|(((kind, rows, _), bytes), out)| {
                    let weights =
                        WeightMatrix { kind: *kind, order, rows: *rows, cols, scale: 1.0, bytes: &bytes[1..] };
                    Product { weights, x, pick: None, out }
                })
                .collect();
            products(&pool, &mut all);
            assert!(outs == want, "{threads} threads, {order}");
        }
    }
}

#[test]
fn picked_tokens_are_those_of_the_whole_batch() {
    let mut noise = Noise::new(4);
    let (rows, cols, tokens) = (21, 96, 9);
    let (mut buffer, activations) = (InputBuffer::new(), noise.values(tokens * cols));
    let x = buffer.fill(&activations, cols, true);
    for kind in [NumberFormat::F32, NumberFormat::Q4_0] {
        let bytes = noise.weights(kind, rows, cols);
        let weights = WeightMatrix { kind, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &bytes };
        let whole = single_product(weights, x);
        for pick in [&[][..], &[8], &[3, 3, 0], &[7, 1, 8, 2, 0, 5]] {
            let mut out = vec![f32::NAN; pick.len() * rows];
            products(&ThreadPool::single_threaded(), &mut [Product { weights, x, pick: Some(pick), out: &mut out }]);
            let want: Vec<f32> = pick.iter().flat_map(|t| &whole[*t as usize * rows..][..rows]).copied().collect();
            assert_eq!(out, want, "{kind} {pick:?}");
        }
    }
}

#[test]
fn the_scale_of_a_matrix_multiplies_finished_sums_and_single_values() {
    let mut noise = Noise::new(6);
    let (rows, cols, scale, kind) = (19, 128, 0.3, NumberFormat::Nvfp4);
    let bytes = noise.weights(kind, rows, cols);
    let plain = WeightMatrix { kind, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &bytes };
    let scaled = WeightMatrix { scale, ..plain };
    let (mut buffer, activations) = (InputBuffer::new(), noise.values(5 * cols));
    let x = buffer.fill(&activations, cols, true);
    let want: Vec<f32> = single_product(plain, x).iter().map(|sum| sum * scale).collect();
    assert_eq!(single_product(scaled, x), want);
    let (mut row, mut want) = ([0.0; 128], [0.0; 128]);
    widen_row(plain, 7, &mut want);
    widen_row(scaled, 7, &mut row);
    assert_eq!(row, want.map(|value| value * scale));
}

#[test]
fn a_product_matches_its_definition() {
    let (rows, cols, tokens) = (5, 37, 3);
    let mut noise = Noise::new(5);
    let (w, values) = (noise.values(rows * cols), noise.values(tokens * cols));
    let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut buffer = InputBuffer::new();
    let x = buffer.fill(&values, cols, false);
    let out = single_product(
        WeightMatrix { kind: NumberFormat::F32, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &bytes },
        x,
    );
    for t in 0..tokens {
        for r in 0..rows {
            let exact: f64 = (0..cols).map(|c| w[r * cols + c] as f64 * values[t * cols + c] as f64).sum();
            assert!((out[t * rows + r] as f64 - exact).abs() < 1e-5);
        }
    }
}

#[test]
fn unquantised_activations_are_multiplied_with_widened_weights() {
    let (rows, cols, tokens) = (11, 64, 3);
    let mut noise = Noise::new(8);
    let (plain, values) = (noise.weights(NumberFormat::Q4_0, rows, cols), noise.values(tokens * cols));
    let mut buffer = InputBuffer::new();
    let x = buffer.fill(&values, cols, false);
    for order in RowOrder::ALL {
        let bytes = ordered(NumberFormat::Q4_0, order, rows, cols, &plain);
        let weights = WeightMatrix { kind: NumberFormat::Q4_0, order, rows, cols, scale: 1.0, bytes: &bytes[1..] };
        let out = single_product(weights, x);
        for r in 0..rows {
            let mut wide = vec![0.0; cols];
            widen_row(weights, r, &mut wide);
            for t in 0..tokens {
                assert_eq!(out[t * rows + r], dot(&wide, x.values(t)), "{order}, row {r}");
            }
        }
    }
}

#[test]
fn work_is_split_into_several_tasks_per_thread_of_a_minimum_size() {
    // A router of many tokens has fewer panels than threads.
    for (threads, rows, tokens, least, most) in
        [(2, 8, 1, 1, 1), (2, 64, 1, 1, 4), (2, 4096, 1, 16, 40), (16, 32, 1024, 16, 16), (16, 2048, 512, 64, 160)]
    {
        let mut noise = Noise::new(6);
        let (mut buffer, activations) = (InputBuffer::new(), noise.values(tokens * 256));
        let (x, bytes) = (buffer.fill(&activations, 256, true), noise.weights(NumberFormat::Q8_0, rows, 256));
        let (kind, order, cols) = (NumberFormat::Q8_0, RowOrder::Plain, 256);
        let weights = WeightMatrix { kind, order, rows, cols, scale: 1.0, bytes: &bytes };
        let mut out = vec![0.0; rows * tokens];
        let product = Product { weights, x, pick: None, out: &mut out };
        let division = product.division(MIN_TASK_WORK.max(product.work() / (threads * TASKS_PER_THREAD)));
        let tasks = division.tasks();
        assert!((least..=most).contains(&tasks), "{tasks} tasks for {rows} rows and {tokens} tokens");
        let tiles = (0..tasks).map(|task| division.tile(task));
        assert_eq!(tiles.map(|tile| tile.panels.len() * ROW_GROUP * tile.tokens.len()).sum::<usize>(), rows * tokens);
    }
}

fn product_of(bytes: &[u8], x: &[f32], quantise: bool, pick: Option<&[u32]>, out: usize) {
    let mut buffer = InputBuffer::new();
    let inputs = buffer.fill(x, 32, quantise);
    let weights =
        WeightMatrix { kind: NumberFormat::Q8_0, order: RowOrder::Plain, rows: 2, cols: 32, scale: 1.0, bytes };
    products(&ThreadPool::single_threaded(), &mut [Product { weights, x: inputs, pick, out: &mut vec![0.0; out] }]);
}

#[test]
#[should_panic(expected = "weight bytes do not fit")]
fn short_weights_panic() {
    product_of(&[0; 67], &[0.0; 32], true, None, 2);
}

#[test]
#[should_panic(expected = "output does not fit")]
fn a_short_output_panics() {
    product_of(&[0; 68], &[0.0; 64], true, None, 2);
}

#[test]
#[should_panic(expected = "a picked token is out of range")]
fn an_unknown_token_panics() {
    product_of(&[0; 68], &[0.0; 32], true, Some(&[1]), 2);
}
