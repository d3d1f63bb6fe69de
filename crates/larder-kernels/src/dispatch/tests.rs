//! Every kernel set against the portable one.

use larder_core::{NumberFormat, RowOrder};
use proptest::prelude::*;

use super::*;
use crate::block::{BLOCK, Block};
use crate::inputs::{InputBuffer, Inputs};
use crate::kernel_set::{DELTA_COLUMNS, DeltaRow, DeltaStep, MAX_PANELS, MAX_TOKENS, StridedRows, StripKernels, Sums};
use crate::strip::{STRIP_BLOCKS, STRIP_PANELS, STRIP_ROWS, Strip, StripSums};
use crate::testing::{Noise, blocks_with_values, ordered, set_scales};
use crate::weights::{Panel, WeightMatrix, widen_row};

/// Products of every panel of a matrix with all tokens: `[tokens][rows]`.
fn product(set: &KernelSet, weights: WeightMatrix, x: Inputs) -> Vec<Vec<f32>> {
    let mut out = vec![vec![]; x.tokens()];
    let panels: Vec<_> = (0..weights.panels().count()).map(|i| weights.panels().get(i)).collect();
    for panels in panels.chunks(MAX_PANELS) {
        let mut sums = vec![Sums::default(); panels.len() * x.tokens()];
        if weights.kind.is_float() {
            let x: Vec<_> = (0..x.tokens()).map(|t| x.values(t)).collect();
            (set.floats)(panels, &x, &mut sums);
        } else {
            let x: Vec<_> = (0..x.tokens()).map(|t| x.blocks(t)).collect();
            (set.blocks)(panels, &x, &mut sums);
        }
        for (panel, sums) in panels.iter().zip(sums.chunks(x.tokens())) {
            out.iter_mut().zip(sums).for_each(|(out, sums)| out.extend(&sums[..panel.rows]));
        }
    }
    out
}

/// Products of the only strip of a matrix with all tokens: `[tokens][rows]`.
fn strip_product(kernels: &StripKernels, weights: WeightMatrix, x: Inputs) -> Vec<Vec<f32>> {
    let panels: [_; STRIP_PANELS] = std::array::from_fn(|i| weights.panels().get(i));
    let tokens: Vec<_> = (0..x.tokens()).map(|t| x.blocks(t)).collect();
    let mut sums = vec![StripSums([0.0; STRIP_ROWS]); tokens.len()];
    multiply_strip(kernels, &panels, &tokens, &mut Strip::new(), &mut sums);
    sums.iter().map(|sums| sums.0.to_vec()).collect()
}

fn multiply_strip(
    kernels: &StripKernels,
    panels: &[Panel; STRIP_PANELS],
    x: &[&[Block]],
    strip: &mut Strip,
    sums: &mut [StripSums],
) {
    let each = panels[0].kind.block_len() / BLOCK;
    let step = STRIP_BLOCKS / each;
    for from in (0..panels[0].blocks).step_by(step) {
        (kernels.unpack)(panels, from..panels[0].blocks.min(from + step), [&[]; STRIP_PANELS], strip);
        (kernels.multiply)(strip, x, from * each, sums);
    }
}

fn bits(out: &[Vec<f32>]) -> Vec<Vec<u32>> {
    out.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
}

fn cols(kind: NumberFormat, size: usize) -> usize {
    if kind.is_float() { size } else { kind.block_len() * size.div_ceil(BLOCK) }
}

/// Number of cases, and the largest shape of a case. Smaller under Miri, which is a thousand times slower.
const CASES: u32 = if cfg!(miri) { 40 } else { 200 };
const ROWS: usize = if cfg!(miri) { 12 } else { 26 };
const SIZES: usize = if cfg!(miri) { 40 } else { 150 };
const BATCH: usize = if cfg!(miri) { 5 } else { MAX_TOKENS };

#[test]
fn kernels_are_named_by_instruction_set() {
    for set in all() {
        assert_eq!(set.name.parse(), Ok(KernelChoice::Named(set.name)));
    }
    assert_eq!(("auto".parse(), KernelChoice::default().to_string()), (Ok(KernelChoice::Auto), "auto".into()));
    for unknown in ["", "Portable", "portable ", "avx1024"] {
        let refused = unknown.parse::<KernelChoice>().unwrap_err();
        assert_eq!(refused, KernelChoiceError::Unknown);
        let said = refused.to_string();
        assert!(said.starts_with("must be auto, or an instruction set that") && said.ends_with("portable"), "{said}");
    }
}

#[test]
fn a_set_that_the_processor_lacks_is_refused_with_those_that_it_has() {
    let lacking = UnavailableSet::new("avx1024", &[("avx512f", true), ("avx1024f", false), ("avx1024vl", false)]);
    let said = KernelChoiceError::Unavailable(lacking).to_string();
    let names: Vec<_> = all().map(|set| set.name).collect();
    let of_processor = format!("which this processor lacks; it has {}", names.join(", "));
    assert_eq!(said, format!("avx1024 needs avx1024f, avx1024vl, {of_processor}"));
    for lacking in TABLE.iter().filter_map(|set| set().err()) {
        assert!(!lacking.missing.is_empty(), "{}", lacking.name);
        let refused = KernelChoiceError::Unavailable(lacking.clone());
        assert_eq!(lacking.name.parse::<KernelChoice>(), Err(refused.clone()));
        assert_eq!(KernelChoice::Named(lacking.name).apply(), Err(refused));
    }
}

#[test]
fn a_process_uses_one_set() {
    let used = instruction_set();
    assert_eq!(KernelChoice::Auto.apply(), Ok(()));
    for set in all() {
        let applied = KernelChoice::Named(set.name).apply();
        let other = KernelChoiceError::Chosen { wanted: set.name, used };
        assert_eq!(applied, if set.name == used { Ok(()) } else { Err(other) });
    }
    let sets = instruction_sets();
    assert_eq!(sets.iter().filter(|(_, of)| *of == SetUse::Used).count(), 1, "{sets:?}");
    // No set was chosen by name, so the first that the processor has is used.
    assert_eq!(sets.iter().find(|(_, of)| !matches!(of, SetUse::Missing(_))), Some(&(used, SetUse::Used)), "{sets:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES) })]

    /// Odd sizes, tails, one row, unaligned starts.
    #[test]
    fn every_set_gives_the_bits_of_the_definition(
        seed: u64, kind in 0..NumberFormat::ALL.len(), rows in 1..=ROWS, size in 1..=SIZES, tokens in 1..=BATCH,
    ) {
        let kind = NumberFormat::ALL[kind];
        let cols = cols(kind, size);
        let mut noise = Noise::new(seed);
        let plain = noise.weights(kind, rows, cols);
        let (mut buffer, activations) = (InputBuffer::new(), noise.values(tokens * cols));
        let x = buffer.fill(&activations, cols, !kind.is_float());
        let weights = WeightMatrix { kind, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &plain };
        let want = product(&portable::set().unwrap(), weights, x);
        for set in all() {
            for order in RowOrder::ALL {
                let bytes = ordered(kind, order, rows, cols, &plain);
                let got = product(&set, WeightMatrix { order, bytes: &bytes[1..], ..weights }, x);
                prop_assert_eq!(bits(&got), bits(&want), "{} {} {}", set.name, kind, order);
            }
        }
    }

    /// Of all tokens at once, and in one or several parts of a row.
    #[test]
    fn strips_give_the_bits_of_the_definition(
        seed: u64, kind in 0..NumberFormat::ALL.len(), size in 1..=SIZES, tokens in 1..=BATCH,
    ) {
        let kind = NumberFormat::ALL[kind];
        if kind.is_float() {
            return Ok(());
        }
        let (rows, cols) = (STRIP_ROWS, cols(kind, size));
        let mut noise = Noise::new(seed);
        let plain = noise.weights(kind, rows, cols);
        let (mut buffer, activations) = (InputBuffer::new(), noise.values(tokens * cols));
        let x = buffer.fill(&activations, cols, true);
        let weights = WeightMatrix { kind, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &plain };
        let want = product(&portable::set().unwrap(), weights, x);
        for (set, strips) in all().filter_map(|set| Some((set, set.strips?))) {
            for order in RowOrder::ALL {
                let bytes = ordered(kind, order, rows, cols, &plain);
                let got = strip_product(&strips, WeightMatrix { order, bytes: &bytes[1..], ..weights }, x);
                prop_assert_eq!(bits(&got), bits(&want), "{} {} {}", set.name, kind, order);
            }
        }
    }

    /// The result is near the exact product with the widened weights: each activation is off by at most half a
    /// quantisation step of its block, and the sums of f32 by a little for each block.
    #[test]
    fn the_definition_is_within_its_bound(
        seed: u64, kind in 0..NumberFormat::ALL.len(), rows in 1..9usize, size in 1..=2 * SIZES,
    ) {
        let kind = NumberFormat::ALL[kind];
        let cols = cols(kind, size);
        let mut noise = Noise::new(seed);
        let plain = noise.weights(kind, rows, cols);
        let values = noise.values(cols);
        let mut buffer = InputBuffer::new();
        let x = buffer.fill(&values, cols, !kind.is_float());
        let weights = WeightMatrix { kind, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &plain };
        let out = product(&portable::set().unwrap(), weights, x);
        for (row, got) in out[0].iter().enumerate() {
            let mut wide = vec![0.0; cols];
            widen_row(weights, row, &mut wide);
            let (mut exact, mut bound) = (0.0, 1e-30);
            for (w, x) in wide.chunks(BLOCK).zip(values.chunks(BLOCK)) {
                let amax = x.iter().fold(0.0, |a: f32, v| a.max(v.abs())) as f64;
                let step = if kind.is_float() { 0.0 } else { amax / 127.0 * 0.5001 };
                for (w, x) in w.iter().zip(x) {
                    exact += *w as f64 * *x as f64;
                    bound += w.abs() as f64 * step;
                    // Minima are subtracted from sums that may be larger than their difference.
                    bound += (w.abs() as f64 + 64.0 / 8.0) * amax * 1e-5;
                }
            }
            prop_assert!((*got as f64 - exact).abs() <= bound, "{kind}: {} instead of {exact} ± {bound}", got);
        }
    }

    /// Rows with gaps between them, odd widths, unaligned starts, and more outputs than a kernel takes at a time.
    #[test]
    fn every_set_sums_rows_to_the_same_bits(
        seed: u64, kind in 0..3usize, rows in 1..20usize, width in 1..=SIZES, gap in 0..7usize, outputs in 1..12usize,
    ) {
        let kind = [NumberFormat::F32, NumberFormat::F16, NumberFormat::Bf16][kind];
        let mut noise = Noise::new(seed);
        let row_bytes = width * kind.block_bytes() + gap;
        let mut bytes = vec![0xff; 1 + rows * row_bytes];
        for row in bytes[1..].chunks_exact_mut(row_bytes) {
            row[..width * kind.block_bytes()].copy_from_slice(&noise.weights(kind, 1, width));
        }
        let (factors, start) = (noise.values(outputs * rows), noise.values(outputs * width));
        let summed = |set: &KernelSet| {
            let mut out = start.clone();
            let rows_of = StridedRows { kind, bytes: &bytes[1..bytes.len() - gap], row_bytes };
            let factors: Vec<&[f32]> = factors.chunks(rows).collect();
            (set.weighted_sums)(rows_of, &factors, &mut out.chunks_mut(width).collect::<Vec<_>>());
            out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        let want = summed(&portable::set().unwrap());
        for set in all() {
            prop_assert_eq!(summed(&set), want.clone(), "{} {}", set.name, kind);
        }
    }

    #[test]
    fn every_set_takes_in_tokens_with_the_same_bits(seed: u64, rows in 1..200usize, tokens in 1..4usize) {
        let mut noise = Noise::new(seed);
        let start: Vec<DeltaRow> = noise.values(rows * DELTA_COLUMNS).as_chunks().0.to_vec();
        let values = noise.values(tokens * (4 * rows + DELTA_COLUMNS));
        let taken_in = |set: &KernelSet| {
            let (mut state, mut reads) = (start.clone(), vec![(set.delta.read)(&start, &values[..rows])]);
            for token in values.chunks(4 * rows + DELTA_COLUMNS) {
                let (correction, rest) = token.split_first_chunk().unwrap();
                let [decays, key, query, next] = [0, 1, 2, 3].map(|i| &rest[i * rows..][..rows]);
                reads.extend((set.delta.step)(&mut state, DeltaStep { decays, key, query, correction, next }));
            }
            [state, reads].concat().as_flattened().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        let want = taken_in(&portable::set().unwrap());
        for set in all() {
            prop_assert_eq!(taken_in(&set), want.clone(), "{}", set.name);
        }
    }

    #[test]
    fn every_set_widens_to_the_same_bits(seed: u64, width in 1..=SIZES) {
        let row = Noise::new(seed).weights(NumberFormat::Q8_0, 1, width.next_multiple_of(32));
        let widened = |set: &KernelSet| {
            let mut out = vec![0.0f32; width];
            (set.widen_q8_0)(&row, &mut out);
            out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        let want = widened(&portable::set().unwrap());
        for set in all() {
            prop_assert_eq!(widened(&set), want.clone(), "{}", set.name);
        }
    }

    #[test]
    fn every_set_quantises_to_the_same_bits(seed: u64, blocks in 1..9usize, size in -44i32..38) {
        let mut noise = Noise::new(seed);
        let scale = 10f64.powi(size);
        let mut x: Vec<f32> = noise.values(blocks * BLOCK).iter().map(|v| (*v as f64 * scale) as f32).collect();
        // Ties, and values at the edge.
        x[noise.below(blocks * BLOCK)] = scale as f32;
        x[noise.below(blocks * BLOCK)] = (scale / 254.0) as f32;
        let odd = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -0.0, f32::MIN_POSITIVE];
        if let Some(odd) = odd.get(noise.below(2 * odd.len())) {
            x[noise.below(blocks * BLOCK)] = *odd;
        }
        let quantised = |set: &KernelSet| {
            let mut out = vec![Block::default(); blocks];
            set.quantise(&x, &mut out);
            let scale = |d: f32| if d.is_nan() { "nan".to_owned() } else { d.to_bits().to_string() };
            out.iter().map(|b| (b.q, scale(b.d), b.sum, b.halves, b.raised, b.raised_halves)).collect::<Vec<_>>()
        };
        let want = quantised(&portable::set().unwrap());
        for set in all() {
            prop_assert_eq!(quantised(&set), want.clone(), "{}", set.name);
        }
    }
}

/// The largest integers that blocks can hold, so that an overflow of a narrow sum shows.
#[test]
fn sums_of_integers_never_overflow() {
    for kind in NumberFormat::ALL.into_iter().filter(|k| !k.is_float()) {
        let (rows, cols) = (8, 256);
        for fill in [0x00, 0xff, 0x7f, 0x80] {
            let mut plain = vec![fill; kind.matrix_bytes(rows, cols).unwrap()];
            set_scales(kind, &mut plain, || 1.0);
            for sign in [1.0, -1.0] {
                let (mut buffer, activations) = (InputBuffer::new(), vec![sign; BATCH * cols]);
                let x = buffer.fill(&activations, cols, true);
                let weights = WeightMatrix { kind, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &plain };
                let want = product(&portable::set().unwrap(), weights, x);
                for set in all() {
                    for order in RowOrder::ALL {
                        let bytes = ordered(kind, order, rows, cols, &plain);
                        let got = product(&set, WeightMatrix { order, bytes: &bytes[1..], ..weights }, x);
                        assert_eq!(bits(&got), bits(&want), "{} {kind} {order} {fill:x}", set.name);
                    }
                }
            }
        }
    }
}

#[test]
fn non_finite_activations_reach_every_result_of_their_token_and_no_other() {
    let mut noise = Noise::new(7);
    for kind in NumberFormat::ALL {
        let cols = cols(kind, 70);
        let plain = noise.weights(kind, 9, cols);
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = noise.values(3 * cols);
            values[cols + noise.below(cols)] = odd;
            let mut buffer = InputBuffer::new();
            let x = buffer.fill(&values, cols, !kind.is_float());
            for set in all() {
                let out = product(
                    &set,
                    WeightMatrix { kind, order: RowOrder::Plain, rows: 9, cols, scale: 1.0, bytes: &plain },
                    x,
                );
                assert!(out[1].iter().all(|v| !v.is_finite()), "{} {kind} {odd}", set.name);
                assert!(out[0].iter().chain(&out[2]).all(|v| v.is_finite()), "{} {kind} {odd}", set.name);
            }
        }
    }
}

/// Scales that are zero, subnormal, infinite or NaN. Which NaN a result is depends on the instruction set.
#[test]
fn odd_scales_give_the_same_in_every_set() {
    for kind in NumberFormat::ALL.into_iter().filter(|k| !k.is_float()) {
        let (plain, _) = blocks_with_values(kind);
        let (rows, cols) = (16, kind.block_len());
        let (mut buffer, activations) = (InputBuffer::new(), Noise::new(9).values(3 * cols));
        let x = buffer.fill(&activations, cols, true);
        let weights = WeightMatrix { kind, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &plain };
        let all_bits = |out: Vec<Vec<f32>>| -> Vec<_> {
            out.iter().flatten().map(|v| if v.is_nan() { None } else { Some(v.to_bits()) }).collect()
        };
        let want = all_bits(product(&portable::set().unwrap(), weights, x));
        assert!(want.iter().any(Option::is_some));
        for set in all() {
            for order in RowOrder::ALL {
                let bytes = ordered(kind, order, rows, cols, &plain);
                let got = product(&set, WeightMatrix { order, bytes: &bytes[1..], ..weights }, x);
                assert_eq!(all_bits(got), want, "{} {kind} {order}", set.name);
            }
        }
    }
}

/// Billions of multiplications and additions per second of one call: four panels of 2,048 columns, in the cache.
fn rate(set: &KernelSet, kind: NumberFormat, tokens: usize, in_strips: bool) -> f64 {
    let (rows, cols) = (STRIP_ROWS, 2048);
    let mut noise = Noise::new(9);
    let plain = noise.weights(kind, rows, cols);
    let bytes = ordered(kind, RowOrder::best(kind), rows, cols, &plain);
    let weights = WeightMatrix { kind, order: RowOrder::best(kind), rows, cols, scale: 1.0, bytes: &bytes[1..] };
    let (mut buffer, activations) = (InputBuffer::new(), noise.values(tokens * cols));
    let x = buffer.fill(&activations, cols, true);
    let blocks: Vec<_> = (0..tokens).map(|t| x.blocks(t)).collect();
    let panels: [_; STRIP_PANELS] = std::array::from_fn(|i| weights.panels().get(i));
    let mut sums = vec![Sums::default(); 2 * tokens];
    let (mut strip, mut strip_sums) = (Strip::new(), vec![StripSums([0.0; STRIP_ROWS]); tokens]);
    let once = |_| {
        let start = std::time::Instant::now();
        match set.strips {
            Some(strips) if in_strips => multiply_strip(&strips, &panels, &blocks, &mut strip, &mut strip_sums),
            _ => panels.chunks(2).for_each(|pair| (set.blocks)(pair, &blocks, &mut sums)),
        }
        start.elapsed().as_secs_f64()
    };
    let best = (0..2000 / tokens + 20).map(once).fold(f64::MAX, f64::min);
    2.0 * (rows * cols * tokens) as f64 / best / 1e9
}

/// Billions of operations per second of one thread, without strips and with them, by number of tokens.
#[test]
#[ignore = "measures: prints the rates of every set, with strips and without"]
fn rates_in_strips() {
    for set in all().filter(|set| set.strips.is_some()) {
        println!("{}", set.name);
        for kind in NumberFormat::ALL.into_iter().filter(|kind| !kind.is_float()) {
            let cells = [1, 2, 3, 4, 6, 8, 16, 24, 48, 128].map(|tokens| {
                let [apart, strips] = [false, true]
                    .map(|in_strips| rate(&set, kind, tokens.min(MAX_TOKENS + 64 * usize::from(in_strips)), in_strips));
                format!("{tokens:4}: {apart:6.1} {strips:6.1}")
            });
            println!("{:8}{}", kind.name(), cells.concat());
        }
    }
}

#[test]
#[ignore = "measures: prints the rate of every set"]
fn every_set_is_faster_than_the_definition() {
    println!("{:8}{}", "", all().map(|set| format!("{:>24}", set.name)).collect::<String>());
    for kind in NumberFormat::ALL.into_iter().filter(|kind| !kind.is_float()) {
        let rates: Vec<_> = all().map(|set| [1, 4, 16, 64].map(|tokens| rate(&set, kind, tokens, false))).collect();
        let cells = rates.iter().map(|rates| rates.map(|rate| format!("{rate:6.1}")).concat());
        println!("{:8}{}", kind.name(), cells.collect::<String>());
        let definition = rates.last().expect("the definition is a set");
        for rates in &rates[..rates.len() - 1] {
            assert!(rates.iter().zip(definition).all(|(rate, slow)| rate > slow), "{kind}: {rates:?}");
        }
    }
}
