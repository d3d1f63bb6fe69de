//! Kernels on rows of activations. That whole models have the CPU's bits with them is tested with the command.

use larder_cuda::Argument;

use crate::random_data::RandomData;
use crate::{Aligned, BLOCK_BYTES, assert_same, emulator, input, launch, output, quantise, word};

#[test]
fn rows_are_normalised_in_the_order_of_the_definition() {
    let Some(emulator) = &emulator(0) else { return };
    let noise = &mut RandomData(11);
    for (rows, width) in [(1, 1), (3, 7), (5, 32), (2, 39), (6, 2048)] {
        let kinds = 2 - rows % 2;
        let (x, weight) = (noise.activations(rows * width), noise.activations(kinds * width));
        let (mut got, eps) = (vec![0.0; x.len()], 1e-6_f64);
        let mut blocks = Aligned::new(x.len() / 32 * BLOCK_BYTES);
        let in_blocks = width % 32 == 0;
        let blocks_at = if in_blocks { output(blocks.bytes_mut()) } else { Argument::Address(0) };
        let (out, eps_of) = (output(&mut got), Argument::Double(eps));
        // A warp for each 32 values, and fewer.
        let warps = width.div_ceil(32).min(3);
        let shape = [rows, width, kinds, warps].map(word);
        let arguments = [input(&x), input(&weight), out, blocks_at, shape[0], shape[1], eps_of, shape[2], shape[3]];
        let grid = [(rows * warps).div_ceil(4), 1];
        // SAFETY: `x` and `got` have `rows · width` values, `weight` has `kinds · width`, and there is room for the
        // blocks of whole rows.
        unsafe { launch(emulator, "rms_norm", grid, 128, &arguments) };
        assert!(!in_blocks || blocks.bytes() == quantise(emulator, &got).bytes(), "{rows} rows of {width}");
        let weights = weight.chunks_exact(width).cycle();
        let want: Vec<f32> =
            x.chunks_exact(width).zip(weights).flat_map(|(row, of)| normalised(row, of, eps)).collect();
        assert_same(&got, &want, format!("{rows} rows of {width}"));
    }
}

fn normalised(row: &[f32], weight: &[f32], eps: f64) -> Vec<f32> {
    let mut lanes = [0.0_f32; 8];
    row.iter().enumerate().for_each(|(i, v)| lanes[i % 8] += v * v);
    let mean = f64::from(lanes.iter().sum::<f32>()) / row.len() as f64;
    let scale = (1.0 / (mean + eps).sqrt()) as f32;
    row.iter().zip(weight).map(|(v, w)| v * scale * w).collect()
}

#[test]
fn scaled_rows_are_added() {
    let Some(emulator) = &emulator(0) else { return };
    let noise = &mut RandomData(12);
    for (count, period, factor) in [(1, 1, 1.0), (700, 700, 1.0), (700, 700, 0.22), (600, 50, 1.0)] {
        let (mut x, mut y) = (noise.activations(count), noise.activations(period));
        (x[0], y[0]) = (-0.0, -0.0);
        let mut got = vec![7.0; count + 1];
        let arguments = [input(&x), input(&y), output(&mut got), word(count), word(period), Argument::Float(factor)];
        // SAFETY: `x` and `got` have at least `count` values, and `y` has `period`.
        unsafe { launch(emulator, "add_scaled", [count.div_ceil(256), 1], 256, &arguments) };
        let scaled = |v: f32| if factor == 1.0 { v } else { v * factor + 0.0 };
        let want: Vec<f32> = x.iter().zip(y.iter().cycle()).map(|(x, y)| x + scaled(*y)).chain([7.0]).collect();
        assert_same(&got, &want, format!("{count} values, {factor}"));
        if factor != 1.0 {
            let arguments =
                [Argument::Address(0), input(&y), output(&mut got), word(count), word(period), Argument::Float(factor)];
            // SAFETY: as above, without `x`.
            unsafe { launch(emulator, "add_scaled", [count.div_ceil(256), 1], 256, &arguments) };
            let want: Vec<f32> = y.iter().cycle().take(count).map(|y| scaled(*y)).chain([7.0]).collect();
            assert_same(&got, &want, format!("{count} values times {factor}"));
        }
        assert_eq!(got[0].is_sign_negative(), factor == 1.0, "the sign of zero");
    }
}
