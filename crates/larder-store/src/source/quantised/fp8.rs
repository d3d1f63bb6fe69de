//! FP8 (E4M3) weights with a scale per block of rows and columns, per row, or per tensor. A value is the weight times
//! its scale, also where the scale is called `weight_scale_inv`. They are kept as bf16, which is exact where scales are
//! powers of two. The experts of DeepSeek-V4 are floats of four bits beside them, kept as mxfp4.

use std::{collections::HashSet, ops::Range};

use half::{bf16, f16};
use larder_core::{NumberFormat, Tensors};
use safetensors::Dtype;
use serde_json::Value;

use super::{Checkpoint, Encoding, Found, PackedTensor, joined::part_of, nibbles};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    quantize::encode,
    source::Source,
};

/// The format in which they are kept: rounding changes a value by at most 2^-8 of it.
const KEPT: NumberFormat = NumberFormat::Bf16;

/// The names of the format of the weights.
const E4M3: [&str; 3] = ["e4m3", "e4m3fn", "float8_e4m3fn"];

pub(super) fn find(from: &Checkpoint, config: &Value) -> Result<Found> {
    let unsupported = |what: String| Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
    if let Some(format) = config["fmt"].as_str().filter(|format| !E4M3.contains(format)) {
        return unsupported(format!("has fp8 weights in the format '{format}'; only e4m3 is supported"));
    }
    let side = |value: &Value| value.as_u64().and_then(|side| usize::try_from(side).ok()).filter(|side| *side > 0);
    let block = match (&config["weight_block_size"], config["weight_block_size"].as_array().map(Vec::as_slice)) {
        (Value::Null, _) => None,
        (_, Some([rows, cols])) => side(rows).zip(side(cols)),
        _ => None,
    };
    if block.is_none() && !config["weight_block_size"].is_null() {
        let what = format!("has the weight_block_size {}, which is not two sizes", config["weight_block_size"]);
        return Err(StoreError::malformed(from.path(), what));
    }
    let mut found = Found::default();
    add(from, block, &mut found)?;
    add_fp4(from, &mut found)?;
    Ok(found)
}

/// The name of the scales of the weight `name` in DeepSeek-V4.
fn scale_beside(name: &str) -> Option<String> {
    Some(format!("{}.scale", name.strip_suffix(".weight")?))
}

/// Adds every matrix of bytes that has scales beside it: floats of four bits, two to a byte.
fn add_fp4(from: &Checkpoint, found: &mut Found) -> Result<()> {
    for name in from.names() {
        let packed = from.stored(name)?;
        let Some(scales) = scale_beside(name).filter(|scales| from.find(scales).is_some()) else { continue };
        let (Dtype::I8 | Dtype::U8, [rows, bytes]) = (packed.dtype, &packed.shape[..]) else { continue };
        // The bytes are in a file, so that twice their number does not overflow.
        let tensor = nibbles::tensor(from, name, (name, &scales), vec![*rows, 2 * bytes], true)?;
        found.tensors.insert(name.to_owned(), tensor);
    }
    Ok(())
}

/// Adds every tensor of dtype F8_E4M3 that is no part of another, each with its scales, which are per block of the size
/// `block` unless their shape says otherwise.
pub(super) fn add(from: &Checkpoint, block: Option<(usize, usize)>, found: &mut Found) -> Result<()> {
    let taken: HashSet<String> =
        found.tensors.values().flat_map(|tensor| tensor.encoding.parts()).map(str::to_owned).collect();
    for name in from.names() {
        let weights = from.stored(name)?;
        if weights.dtype != Dtype::F8_E4M3 || taken.contains(name) {
            continue;
        }
        // The parts of a table may have the scale of the whole.
        let whole = part_of(name).map(|(table, _)| format!("{table}.weight"));
        let names = [Some(name), whole.as_deref()].into_iter().flatten();
        let suffixed = names.flat_map(|name| ["_scale_inv", "_scale"].map(|suffix| format!("{name}{suffix}")));
        let mut candidates = suffixed.chain(scale_beside(name));
        let scales = candidates.find(|scales| from.find(scales).is_some()).ok_or_else(|| {
            let beside = scale_beside(name).map(|beside| format!(" or '{beside}'")).unwrap_or_default();
            let what =
                format!("has no scales for the tensor '{name}' in fp8: '{name}_scale_inv', '{name}_scale'{beside}");
            StoreError::new(StoreErrorKind::Missing, from.path(), what)
        })?;
        let found_scales = from.stored(&scales)?;
        let wrong = |kind, what: &str| {
            let what = format!(
                "tensor '{scales}' is {:?} of shape {:?}, which {what} '{name}' of {:?}",
                found_scales.dtype, found_scales.shape, weights.shape
            );
            StoreError::new(kind, from.path(), what)
        };
        let dtype = scale_dtype(found_scales.dtype)
            .ok_or_else(|| wrong(StoreErrorKind::Unsupported, "is not supported for scales of"))?;
        let grid = Grid::of(&weights.shape, &found_scales.shape, block)
            .ok_or_else(|| wrong(StoreErrorKind::Mismatch, "does not fit"))?;
        let encoding = Fp8 { weights: name.to_owned(), scales: scales.clone(), dtype, grid };
        let tensor = PackedTensor::new(from, name, weights.shape.clone(), Box::new(encoding))?;
        found.tensors.insert(name.to_owned(), tensor);
    }
    Ok(())
}

/// The types that scales may have; bytes are exponents of two (E8M0).
fn scale_dtype(dtype: Dtype) -> Option<Dtype> {
    match dtype {
        Dtype::F32 | Dtype::F16 | Dtype::BF16 => Some(dtype),
        Dtype::U8 | Dtype::F8_E8M0 => Some(Dtype::F8_E8M0),
        _ => None,
    }
}

/// Which scale a value has.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Grid {
    /// Rows and columns of a matrix; a tensor may be several matrices.
    rows: usize,
    cols: usize,
    /// Rows and columns that share a scale.
    block: (usize, usize),
    /// Rows and columns of the scales of a matrix.
    scales: (usize, usize),
    /// Whether all matrices share one scale.
    shared: bool,
}

impl Grid {
    /// `None` if the shapes do not fit. All sizes of `shape` are at least one.
    fn of(shape: &[usize], scales: &[usize], block: Option<(usize, usize)>) -> Option<Grid> {
        let [outer @ .., rows, cols] = shape else { return None };
        let (rows, cols) = (*rows, *cols);
        if shape.contains(&0) {
            return None;
        }
        if scales.iter().all(|side| *side == 1) {
            return Some(Grid { rows, cols, block: (rows, cols), scales: (1, 1), shared: true });
        }
        let inner = scales.strip_prefix(outer)?;
        let (down, across) = match inner {
            [] => (1, 1),
            [down] => (*down, 1),
            [down, across] => (*down, *across),
            _ => return None,
        };
        let side = |whole: usize, scales: usize, side: Option<usize>| match scales {
            1 => Some(whole),
            _ => side.filter(|side| whole.div_ceil(*side) == scales),
        };
        let per_row = (down == rows && across == 1).then_some(1);
        let height = per_row.or_else(|| side(rows, down, block.map(|(rows, _)| rows)))?;
        let width = side(cols, across, block.map(|(_, cols)| cols))?;
        Some(Grid { rows, cols, block: (height, width), scales: (down, across), shared: false })
    }

    /// Index of the first scale of row `row`, counted over all matrices.
    fn scale_row(&self, row: usize) -> usize {
        let (matrix, row) = (row / self.rows, row % self.rows);
        let matrix = if self.shared { 0 } else { matrix };
        (matrix * self.scales.0 + row / self.block.0) * self.scales.1
    }
}

/// A tensor in FP8.
struct Fp8 {
    weights: String,
    scales: String,
    dtype: Dtype,
    grid: Grid,
}

impl Fp8 {
    /// The scales with the indices `range`.
    fn read_scales(&self, from: &Checkpoint, range: Range<usize>) -> Result<Vec<f32>> {
        let size = self.dtype.bitsize() / 8;
        let mut bytes = vec![0; range.len() * size];
        from.read(&self.scales, range.start * size, &mut bytes)?;
        let scale = |b: &[u8]| match self.dtype {
            Dtype::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Dtype::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
            Dtype::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            _ if b[0] == u8::MAX => f32::NAN,
            _ => 2f32.powi(i32::from(b[0]) - 127),
        };
        let scales: Vec<f32> = bytes.chunks(size).map(scale).collect();
        match scales.iter().find(|scale| !scale.is_finite()) {
            Some(bad) => {
                let what = format!("tensor '{}' holds the scale {bad}", self.scales);
                Err(StoreError::malformed(from.path(), what))
            }
            None => Ok(scales),
        }
    }
}

/// The value of an E4M3 number: a sign, four bits of exponent (bias 7) and three of mantissa; no infinities.
fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude = match (exponent, bits & 0x7f) {
        (_, 0x7f) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

impl Encoding for Fp8 {
    fn kind(&self) -> NumberFormat {
        KEPT
    }

    /// A power of two leaves the four digits of a value as they are; bf16 has eight.
    fn rounds(&self) -> bool {
        self.dtype != Dtype::F8_E8M0
    }

    fn parts(&self) -> Vec<&str> {
        vec![&self.weights, &self.scales]
    }

    fn widen(&self, from: &Checkpoint, first: usize, out: &mut [f32]) -> Result<()> {
        let mut codes = vec![0; out.len()];
        from.read(&self.weights, first, &mut codes)?;
        let table: [f32; 256] = std::array::from_fn(|bits| e4m3(bits as u8));
        let Grid { cols, block: (_, width), scales: (_, across), .. } = self.grid;
        let (mut at, end) = (first, first + out.len());
        let begin = self.grid.scale_row(first / cols);
        let scales = self.read_scales(from, begin..self.grid.scale_row((end - 1) / cols) + across)?;
        while at < end {
            let (row, col) = (at / cols, at % cols);
            let scales = &scales[self.grid.scale_row(row) - begin..][..across];
            let piece = at - first..(at + cols - col).min(end) - first;
            for (i, (value, code)) in out[piece.clone()].iter_mut().zip(&codes[piece.clone()]).enumerate() {
                *value = table[usize::from(*code)] * scales[(col + i) / width];
            }
            at += piece.len();
        }
        Ok(())
    }

    fn keep(&self, from: &Checkpoint, first: usize, out: &mut [u8]) -> Result<()> {
        let mut values = vec![0.0; out.len() / KEPT.block_bytes()];
        self.widen(from, first, &mut values)?;
        encode(KEPT, &values, out)
            .map_err(|unfit| StoreError::malformed(from.path(), format!("tensor '{}' holds {unfit}", self.weights)))
    }

    fn ranges(&self, values: Range<usize>) -> Vec<(&str, Range<usize>)> {
        // Scales are few, and those of a block belong to many rows.
        vec![(&self.weights, values)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_has_the_values_of_the_specification() {
        let known = [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x07, 7.0 * 2f32.powi(-9)), (0x08, 2f32.powi(-6))];
        for (bits, value) in known.into_iter().chain([(0x38, 1.0), (0x39, 1.125), (0x7e, 448.0), (0xc0, -2.0)]) {
            assert_eq!(e4m3(bits), value, "{bits:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }

    #[test]
    fn the_grid_follows_from_the_shapes() {
        let block = Some((128, 128));
        let grid = |shape: &[usize], scales: &[usize]| Grid::of(shape, scales, block).map(|g| (g.block, g.scales));
        assert_eq!(grid(&[300, 200], &[3, 2]), Some(((128, 128), (3, 2))));
        assert_eq!(grid(&[300, 100], &[3, 1]), Some(((128, 100), (3, 1))));
        assert_eq!(grid(&[300, 200], &[300, 1]), Some(((1, 200), (300, 1))));
        assert_eq!(grid(&[300, 200], &[300]), Some(((1, 200), (300, 1))));
        assert_eq!(grid(&[300, 200], &[]), Some(((300, 200), (1, 1))));
        assert_eq!(grid(&[4, 300, 200], &[4, 3, 2]), Some(((128, 128), (3, 2))));
        assert_eq!(grid(&[4, 300, 200], &[4, 1, 1]), Some(((300, 200), (1, 1))));
        for (shape, scales) in [
            (&[300, 200][..], &[2, 2][..]),
            (&[300, 200], &[3, 3]),
            (&[4, 300, 200], &[3, 3, 2]),
            (&[4, 300, 200], &[3, 2]),
            (&[300], &[3]),
            (&[0, 200], &[0, 2]),
            (&[300, 200], &[1, 3, 2]),
        ] {
            assert_eq!(grid(shape, scales), None, "{shape:?} {scales:?}");
        }
        assert_eq!(Grid::of(&[300, 200], &[3, 2], None), None, "without a block size");
        let stacked = Grid::of(&[4, 300, 200], &[4, 3, 2], block).unwrap();
        assert_eq!([0, 127, 128, 299, 300, 1199].map(|row| stacked.scale_row(row)), [0, 0, 2, 4, 6, 22]);
    }
}
