//! Products with one token and with many.

use larder_core::{NumberFormat, RowOrder};
use larder_cuda::Emulator;
use larder_kernels::{InputBuffer, ThreadPool, WeightMatrix, products};

use crate::random_data::RandomData;
use crate::{Aligned, assert_same, emulator, input, launch, quantise, word};

/// The arguments of a product, as kernels read them.
#[repr(C)]
struct ProductKernelArgs {
    weights: *const u8,
    x: *const u8,
    pick: *const u32,
    out: *mut f32,
    rows: u32,
    cols: u32,
    tokens: u32,
    interleaved: u32,
    first_group: u32,
    x_stride: u32,
    out_stride: u32,
    scale_at: u32,
}

/// A matrix, its inputs, and the result of the CPU kernels.
struct Case {
    kind: NumberFormat,
    order: RowOrder,
    rows: usize,
    cols: usize,
    weights: Aligned,
    /// Of all weights, behind them.
    scale: f32,
    x: Vec<f32>,
    pick: Option<Vec<u32>>,
    want: Vec<f32>,
}

impl Case {
    fn new(
        noise: &mut RandomData,
        kind: NumberFormat,
        order: RowOrder,
        rows: usize,
        cols: usize,
        tokens: usize,
        picks: bool,
    ) -> Self {
        let mut weights = noise.weights(kind, order, rows, cols);
        let scale = if kind.has_matrix_scale() { noise.one_of(&[1.0, 0.37, -3e-5]) } else { 1.0 };
        if scale != 1.0 {
            weights.append(&f32::to_ne_bytes(scale));
        }
        let inputs = if picks { noise.one_of(&[1, 3, 12]) } else { tokens };
        let x = noise.activations(inputs * cols);
        let pick = picks.then(|| (0..tokens).map(|_| (noise.bits() % inputs as u64) as u32).collect::<Vec<_>>());
        let mut want = vec![0.0; tokens * rows];
        let mut buffer = InputBuffer::new();
        let stored = buffer.fill(&x, cols, !kind.is_float());
        let bytes = &weights.bytes()[..kind.matrix_bytes(rows, cols).unwrap()];
        products(
            &ThreadPool::single_threaded(),
            &mut [larder_kernels::Product {
                weights: WeightMatrix { kind, order, rows, cols, scale, bytes },
                x: stored,
                pick: pick.as_deref(),
                out: &mut want,
            }],
        );
        Case { kind, order, rows, cols, weights, scale, x, pick, want }
    }

    fn scale_at(&self) -> u32 {
        if self.scale == 1.0 { 0 } else { self.kind.matrix_bytes(self.rows, self.cols).unwrap() as u32 }
    }

    fn tokens(&self) -> usize {
        self.want.len() / self.rows
    }
}

/// The kernels for one token, for any number and for many, which are named after their number format.
fn kernels(kind: NumberFormat) -> [&'static str; 3] {
    let named = |what: &str| -> &'static str { format!("{kind}_{what}").leak() };
    if kind.is_float() { [named("matmul"); 3] } else { ["matvec", "matmul", "tiles"].map(named) }
}

/// Computes all cases, which have one number format, in one launch.
fn check(emulator: &Emulator, kernel: &'static str, cases: &[Case]) {
    let inputs: Vec<Option<Aligned>> =
        cases.iter().map(|c| (!c.kind.is_float()).then(|| quantise(emulator, &c.x))).collect();
    // One value more than the result, which must not change.
    let mut outputs: Vec<Vec<f32>> = cases.iter().map(|c| vec![-7.5; c.want.len() + 1]).collect();
    let mut first_group = 0;
    let mut round = Vec::new();
    for ((case, blocks), out) in cases.iter().zip(&inputs).zip(&mut outputs) {
        round.push(ProductKernelArgs {
            weights: case.weights.bytes().as_ptr(),
            x: blocks.as_ref().map_or(case.x.as_ptr().cast(), |blocks| blocks.bytes().as_ptr()),
            pick: case.pick.as_ref().map_or(std::ptr::null(), |pick| pick.as_ptr()),
            out: out.as_mut_ptr(),
            rows: case.rows as u32,
            cols: case.cols as u32,
            tokens: case.tokens() as u32,
            interleaved: (case.order == RowOrder::Rows8) as u32,
            first_group: first_group as u32,
            x_stride: case.cols as u32,
            out_stride: case.rows as u32,
            scale_at: case.scale_at(),
        });
        first_group += case.rows.div_ceil(8);
    }
    let arguments = [input(&round), word(round.len()), word(first_group)];
    // SAFETY: every pointer is to an array of the given shape.
    unsafe { launch(emulator, kernel, [first_group.div_ceil(4), 1], 128, &arguments) };
    for (case, out) in cases.iter().zip(&outputs) {
        let Case { order, rows, cols, pick, .. } = case;
        let what = format!("{kernel}, {order}, {rows} x {cols}, {} tokens, picked {pick:?}", case.tokens());
        let (out, behind) = out.split_at(case.want.len());
        assert_same(out, &case.want, what);
        assert_eq!(behind, [-7.5]);
    }
}

fn widths(kind: NumberFormat) -> &'static [usize] {
    match kind.block_len() {
        1 => &[1, 15, 16, 17, 40, 96, 130],
        32 => &[32, 64, 96, 128, 160, 192, 288],
        64 => &[64, 128, 192, 256, 320],
        128 => &[128, 256, 384],
        _ => &[256, 512, 768, 1280],
    }
}

const HEIGHTS: [usize; 8] = [1, 7, 8, 9, 16, 19, 33, 64];

/// Every number format in both row orders, many shapes, and products of different shapes in one launch.
#[test]
fn products_are_the_same_to_the_bit() {
    let Some(emulator) = &emulator(0) else { return };
    let noise = &mut RandomData(0x9e37_79b9_7f4a_7c15);
    for kind in NumberFormat::ALL.into_iter() {
        for order in RowOrder::ALL.into_iter().filter(|order| *order == RowOrder::Plain || !kind.is_float()) {
            let numbers = [&[1][..], &[0, 1, 2, 4, 7, 8, 9, 17], &[0, 1, 7, 9, 16, 17, 31, 32, 33, 70]];
            for (kernel, tokens) in kernels(kind).into_iter().zip(numbers) {
                for count in [1, 1, 2, 3, 5, 8, 21] {
                    let mut case = || {
                        let (rows, cols) = (noise.one_of(&HEIGHTS), noise.one_of(widths(kind)));
                        let (tokens, picks) = (noise.one_of(tokens), noise.one_of(&[true, false]));
                        Case::new(noise, kind, order, rows, cols, tokens, picks)
                    };
                    let cases: Vec<_> = (0..count).map(|_| case()).collect();
                    check(emulator, kernel, &cases);
                }
            }
        }
    }
}

/// Each shape in a launch of its own.
#[test]
fn every_shape_gives_the_same_bits() {
    let Some(emulator) = &emulator(0) else { return };
    let noise = &mut RandomData(77);
    for kind in NumberFormat::ALL.into_iter() {
        let order = RowOrder::best(kind);
        for rows in HEIGHTS {
            for cols in widths(kind) {
                for kernel in kernels(kind) {
                    let case = Case::new(noise, kind, order, rows, *cols, 1, true);
                    check(emulator, kernel, &[case]);
                }
            }
        }
    }
}

#[test]
fn a_launch_without_groups_writes_nothing() {
    let Some(emulator) = &emulator(0) else { return };
    let mut out = [-7.5f32; 16];
    let product = ProductKernelArgs {
        weights: std::ptr::null(),
        x: std::ptr::null(),
        pick: std::ptr::null(),
        out: out.as_mut_ptr(),
        rows: 16,
        cols: 32,
        tokens: 1,
        interleaved: 0,
        first_group: 0,
        x_stride: 32,
        out_stride: 16,
        scale_at: 0,
    };
    for kernel in ["q8_0_matvec", "q8_0_matmul", "f32_matmul"] {
        let arguments = [input(std::slice::from_ref(&product)), word(1), word(0)];
        // SAFETY: there is no group, so the pointers are not used.
        unsafe { launch(emulator, kernel, [1, 1], 128, &arguments) };
    }
    assert_eq!(out, [-7.5; 16]);
}
