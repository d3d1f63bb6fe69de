//! GPTQ, AWQ and MLX, packed by loops over single values.

use half::{bf16, f16};
use larder_core::NumberFormat;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::{Stored, bytes, floats, open, refusal};

const ROWS: usize = 48;
const COLS: usize = 128;
const GROUP: usize = 64;
const GROUPS: usize = COLS / GROUP;

/// A matrix of codes, with a scale, a zero point and a bias per row and group.
struct Case {
    bits: usize,
    zero: fn(usize) -> u32,
}

impl Case {
    fn code(&self, row: usize, col: usize) -> u32 {
        ((row * 131 + col * 37 + row * col % 11) % (1 << self.bits)) as u32
    }

    fn scale(row: usize, group: usize) -> f32 {
        f16::from_f32(0.01 + 0.003 * row as f32 + 0.11 * group as f32).to_f32()
    }

    fn bias(row: usize, group: usize) -> f32 {
        bf16::from_f32(-0.7 + 0.05 * (row * GROUPS + group) as f32).to_f32()
    }

    fn zero(&self, row: usize, group: usize) -> u32 {
        (self.zero)(row * GROUPS + group)
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        (self.code(row, col) as f32 - self.zero(row, col / GROUP) as f32) * Self::scale(row, col / GROUP)
    }

    fn values(&self) -> Vec<f32> {
        (0..ROWS * COLS).map(|i| self.value(i / COLS, i % COLS)).collect()
    }

    /// Scales, or other floats per row and group, with the groups outside.
    fn transposed_scales() -> Vec<u8> {
        (0..GROUPS * ROWS).flat_map(|i| f16::from_f32(Self::scale(i % ROWS, i / ROWS)).to_le_bytes()).collect()
    }

    /// As GPTQ stores them; zero points are stored less `less`.
    fn gptq(&self, less: u32) -> Vec<Stored<'static>> {
        let per = 32 / self.bits;
        let mut words = vec![0u32; COLS / per * ROWS];
        let mut zeros = vec![0u32; GROUPS * (ROWS / per)];
        for row in 0..ROWS {
            for col in 0..COLS {
                words[col / per * ROWS + row] |= self.code(row, col) << (self.bits * (col % per));
            }
            for group in 0..GROUPS {
                zeros[group * (ROWS / per) + row / per] |= (self.zero(row, group) - less) << (self.bits * (row % per));
            }
        }
        self.packed(leak([COLS / per, ROWS]), &words, leak([GROUPS, ROWS / per]), &zeros)
    }

    /// As AWQ stores them.
    fn awq(&self) -> Vec<Stored<'static>> {
        const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
        let word = |value: &dyn Fn(usize) -> u32, word: usize| {
            ORDER.iter().enumerate().fold(0u32, |sum, (i, row)| sum | value(8 * word + row) << (4 * i))
        };
        let words: Vec<u32> =
            (0..COLS * (ROWS / 8)).map(|i| word(&|row| self.code(row, i / (ROWS / 8)), i % (ROWS / 8))).collect();
        let zeros: Vec<u32> =
            (0..GROUPS * (ROWS / 8)).map(|i| word(&|row| self.zero(row, i / (ROWS / 8)), i % (ROWS / 8))).collect();
        self.packed(leak([COLS, ROWS / 8]), &words, leak([GROUPS, ROWS / 8]), &zeros)
    }

    fn packed(
        &self,
        shape: &'static [usize],
        words: &[u32],
        zero_shape: &'static [usize],
        zeros: &[u32],
    ) -> Vec<Stored<'static>> {
        let data = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        vec![
            ("a.qweight", Dtype::I32, shape, data(words)),
            ("a.qzeros", Dtype::I32, zero_shape, data(zeros)),
            ("a.scales", Dtype::F16, &[GROUPS, ROWS], Self::transposed_scales()),
        ]
    }

    /// As MLX stores them: two matrices of half of the rows.
    fn mlx(&self) -> Vec<Stored<'static>> {
        let per = 32 / self.bits;
        let word = |at: usize| {
            let (row, first) = (at / (COLS / per), at % (COLS / per) * per);
            (0..per).fold(0u32, |sum, i| sum | self.code(row, first + i) << (self.bits * i))
        };
        let words = (0..ROWS * COLS / per).flat_map(|at| word(at).to_le_bytes()).collect();
        let per_group = |of: fn(usize, usize) -> f32| {
            (0..ROWS * GROUPS)
                .flat_map(|i| bf16::from_f32(of(i / GROUPS, i % GROUPS)).to_le_bytes())
                .collect::<Vec<u8>>()
        };
        vec![
            ("a.weight", Dtype::U32, leak([2, ROWS / 2, COLS / per]), words),
            ("a.scales", Dtype::BF16, &[2, ROWS / 2, GROUPS], per_group(Self::scale)),
            ("a.biases", Dtype::BF16, &[2, ROWS / 2, GROUPS], per_group(Self::bias)),
        ]
    }
}

fn leak<const N: usize>(shape: [usize; N]) -> &'static [usize] {
    Box::leak(Box::new(shape))
}

fn symmetric(bits: usize) -> Case {
    match bits {
        2 => Case { bits, zero: |_| 2 },
        4 => Case { bits, zero: |_| 8 },
        _ => Case { bits, zero: |_| 128 },
    }
}

const ASYMMETRIC: Case = Case { bits: 4, zero: |i| 1 + (i * 7 % 16) as u32 };

/// The values of blocks, by the definition of their format.
fn decoded(kind: NumberFormat, bytes: &[u8]) -> Vec<f32> {
    let half = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    let value = |block: &[u8], i: usize| {
        let nibble = |codes: &[u8]| f32::from(codes[i % 16] >> (i / 16 * 4) & 15);
        let d = half(block);
        match kind {
            NumberFormat::Q4_0 => (nibble(&block[2..]) - 8.0) * d,
            NumberFormat::Q4_1 => nibble(&block[4..]) * d + half(&block[2..]),
            NumberFormat::Q5_0 => (nibble(&block[6..]) + f32::from(block[2 + i / 8] >> (i % 8) & 1) * 16.0 - 16.0) * d,
            NumberFormat::Q8_0 => f32::from(block[2 + i] as i8) * d,
            _ => d,
        }
    };
    let blocks = bytes.chunks_exact(kind.block_bytes());
    blocks.flat_map(|block| (0..kind.block_len()).map(|i| value(block, i)).collect::<Vec<_>>()).collect()
}

/// Checks the kept format, its values, and the values of the other view.
fn check(config: &Value, tensors: &[Stored], kind: NumberFormat, want: &[f32]) {
    let (_dir, source) = open(config.clone(), tensors).unwrap();
    assert_eq!(source.names(), ["a.weight"], "{config}");
    assert_eq!(source.meta("a.weight").unwrap().kind, kind, "{config}");
    assert_eq!(floats(source.as_ref(), "a.weight"), want, "{config}");
    let kept = bytes(source.as_ref(), "a.weight");
    let values = decoded(kind, &kept);
    let differ = values.iter().zip(want).filter(|(value, want)| (*value - *want).abs() > 1e-6 * want.abs()).count();
    assert!(differ == 0 || kind == NumberFormat::F16, "{config}: {differ} values differ");
    let rounded = kind == NumberFormat::F16;
    assert_eq!(source.notes().is_empty(), !rounded);
    assert!(
        values.iter().zip(want).all(|(value, want)| (value - want).abs() <= want.abs() / 2048.0 + 1e-7),
        "{config}"
    );
}

#[test]
fn gptq_is_kept_exactly() {
    for (bits, kind) in [(2, NumberFormat::Q4_0), (4, NumberFormat::Q4_0), (8, NumberFormat::Q8_0)] {
        let case = symmetric(bits);
        let config = json!({ "quant_method": "gptq", "bits": bits, "sym": true });
        check(&config, &case.gptq(1), kind, &case.values());
    }
    let config = json!({ "quant_method": "gptq", "bits": 4, "sym": false });
    check(&config, &ASYMMETRIC.gptq(1), NumberFormat::Q5_0, &ASYMMETRIC.values());
    let config = json!({ "quant_method": "gptq", "bits": 4, "sym": true, "checkpoint_format": "gptq_v2" });
    check(&config, &symmetric(4).gptq(0), NumberFormat::Q4_0, &symmetric(4).values());
    let config = json!({ "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": true });
    check(&config, &symmetric(4).gptq(1), NumberFormat::Q4_0, &symmetric(4).values());
}

#[test]
fn awq_is_kept_exactly() {
    let case = Case { bits: 4, zero: |i| (i * 7 % 16) as u32 };
    check(
        &json!({ "quant_method": "awq", "bits": 4, "version": "gemm" }),
        &case.awq(),
        NumberFormat::Q5_0,
        &case.values(),
    );
}

#[test]
fn mlx_is_kept_exactly_up_to_four_bits() {
    for (bits, kind) in [(2, NumberFormat::Q4_1), (4, NumberFormat::Q4_1), (8, NumberFormat::F16)] {
        let case = symmetric(bits);
        let (scale, bias) = (|i: usize| bf16::from_f32(Case::scale(i / COLS, i % COLS / GROUP)).to_f32(), Case::bias);
        let value = |i: usize| {
            let code = f64::from(case.code(i / COLS, i % COLS));
            (code * f64::from(scale(i)) + f64::from(bias(i / COLS, i % COLS / GROUP))) as f32
        };
        let want: Vec<f32> = (0..ROWS * COLS).map(value).collect();
        let settings = json!({ "group_size": GROUP, "bits": bits });
        let of_module = json!({ "group_size": 32, "bits": 3, "a": settings });
        for config in [settings, of_module] {
            check(&config, &case.mlx(), kind, &want);
        }
    }
}

#[test]
fn a_step_of_many_rows_and_of_a_part_of_one_give_the_same() {
    let (_dir, source) = open(json!({ "quant_method": "awq" }), &ASYMMETRIC.awq()).unwrap();
    let whole = bytes(source.as_ref(), "a.weight");
    let block = NumberFormat::Q5_0.block_bytes();
    for (first, count) in [(0, 1), (3, 1), (2, 9), (5, 4 * ROWS - 5)] {
        let mut part = vec![0; count * block];
        source.read("a.weight", first * block, &mut part).unwrap();
        assert_eq!(part, whole[first * block..][..count * block], "{count} blocks from {first}");
    }
    let rows = source.rows("a.weight").unwrap();
    let (row_bytes, mut read) = (COLS / 32 * block, vec![0; 2 * COLS / 32 * block]);
    rows.read_rows(&[17, 4], &mut read).unwrap();
    assert_eq!(read, [&whole[17 * row_bytes..][..row_bytes], &whole[4 * row_bytes..][..row_bytes]].concat());
}

#[test]
fn packed_integers_that_cannot_be_kept_are_refused() {
    let gptq = json!({ "quant_method": "gptq", "sym": true });
    // The config says that they are symmetric, and they are not.
    let (_dir, source) = open(gptq.clone(), &ASYMMETRIC.gptq(1)).unwrap();
    let mut all = vec![0; source.meta("a.weight").unwrap().bytes];
    let error = source.read("a.weight", 0, &mut all).unwrap_err().to_string();
    assert!(error.contains("behind its zero point, which q4_0 cannot hold; convert to bf16"), "{error}");
    assert_eq!(floats(source.as_ref(), "a.weight"), ASYMMETRIC.values());

    let refused = |config: &Value, tensors: &[Stored], why: &str| {
        let error = refusal(config.clone(), tensors);
        assert!(error.contains(why), "{error}");
    };
    let with = |tensors: Vec<Stored<'static>>, i: usize, tensor: Stored<'static>| {
        let mut all = tensors;
        all[i] = tensor;
        all
    };
    let order = |group: fn(usize) -> i32| {
        let data = (0..COLS).flat_map(|col| group(col).to_le_bytes()).collect();
        let index: Stored = ("a.g_idx", Dtype::I32, &[COLS], data);
        [symmetric(4).gptq(1), vec![index]].concat()
    };
    assert!(open(gptq.clone(), &order(|col| (col / GROUP) as i32)).is_ok());
    refused(&gptq, &order(|col| (col % GROUPS) as i32), "(act-order, desc_act), which is not supported");
    refused(&gptq, &order(|_| -1), "act-order");
    refused(&json!({ "quant_method": "gptq" }), &symmetric(8).gptq(1), "of 8 bits with zero points");
    let good = || symmetric(4).gptq(1);
    let fit = "do not fit each other";
    refused(&gptq, &with(good(), 1, ("a.qzeros", Dtype::I32, &[3, 3], vec![0; 36])), fit);
    refused(&gptq, &with(good(), 1, ("a.qzeros", Dtype::I32, &[GROUPS, 0], vec![])), "with 0 bits per weight");
    refused(&gptq, &with(good(), 1, ("a.qzeros", Dtype::F32, &[GROUPS, 3], vec![0; 24])), fit);
    refused(&gptq, &with(good(), 2, ("a.scales", Dtype::F16, &[ROWS, GROUPS], vec![0; 2 * ROWS * GROUPS])), fit);
    refused(&gptq, &with(good(), 2, ("a.scales", Dtype::I8, &[GROUPS, ROWS], vec![0; ROWS * GROUPS])), "dtype I8");
    refused(&gptq, &with(good(), 0, ("a.qweight", Dtype::I32, &[0, ROWS], vec![])), "a scale per 0 columns of 0");
    refused(
        &gptq,
        &with(good(), 0, ("a.qweight", Dtype::I32, &[1, ROWS], vec![0; 4 * ROWS])),
        "a scale per 4 columns of 8",
    );
    refused(&gptq, &good()[..2], "has no tensor 'a.scales'");

    let awq = |version: &str, bits: u64| json!({ "quant_method": "awq", "version": version, "bits": bits });
    refused(&awq("gemv", 4), &ASYMMETRIC.awq(), "in the version 'gemv' with 4 bits");
    refused(&awq("GEMM", 8), &ASYMMETRIC.awq(), "in the version 'gemm' with 8 bits");
    refused(&awq("gemm", 4), &ASYMMETRIC.gptq(1), fit);

    let mlx = |bits: u64| json!({ "group_size": GROUP, "bits": bits });
    refused(&mlx(3), &symmetric(4).mlx(), "in the mode 'affine' with 3 bits, which is not supported");
    refused(&mlx(8), &symmetric(4).mlx(), "which its scales or biases do not fit");
    refused(
        &mlx(4),
        &with(symmetric(4).mlx(), 2, ("a.biases", Dtype::BF16, &[2, ROWS / 2, 1], vec![0; 2 * ROWS])),
        "do not fit",
    );
    let empty = ("a.weight", Dtype::U32, leak([0, ROWS, 1 << 62]), vec![]);
    refused(&mlx(4), &with(symmetric(4).mlx(), 0, empty), "do not fit");
    let infinite =
        with(symmetric(4).mlx(), 2, ("a.biases", Dtype::BF16, &[2, ROWS / 2, 2], [0x80, 0x7f].repeat(2 * ROWS)));
    let (_dir, source) = open(mlx(4), &infinite).unwrap();
    let error = source.read("a.weight", 0, &mut [0; 20]).unwrap_err().to_string();
    assert!(error.contains("tensor 'a.biases' holds the value inf"), "{error}");
}
