//! NVFP4: floats of four bits, two to a byte (the value of even index in the low bits), an E4M3 scale per 16 columns,
//! and an f32 per matrix. Kept as nvfp4, exactly, with the f32 beside it under [`matrix_scale_name`]. The rows of
//! stacked matrices may be stored as columns: `[matrices, cols / 2, rows]`, and scales `[matrices, cols / 16, rows]`.

use std::ops::Range;

use larder_core::{MXFP4_LEVELS, NumberFormat, Tensors, matrix_scale_name, nvfp4_scale};
use safetensors::Dtype;

use super::{Checkpoint, Encoding, Found, PackedTensor, STEP};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::Source,
};

/// Values per scale.
const GROUP: usize = 16;
/// Values and bytes per block of the format in which the tensors are kept.
const BLOCK: usize = NumberFormat::Nvfp4.block_len();
const BLOCK_BYTES: usize = NumberFormat::Nvfp4.block_bytes();
/// Scales of a block.
const SCALES: usize = BLOCK / GROUP;
/// Values that are converted at a time where rows are stored as columns.
const LONG_STEP: usize = 1 << 22;

/// What the f32 of a matrix is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Global {
    /// Values are multiplied by it.
    Factor,
    /// Values are divided by it. Kept is its reciprocal, rounded to f32, as inference engines have it.
    Divisor,
}

/// The names of the stored tensors of a quantised one.
pub(super) struct StoredNames<'a> {
    pub codes: &'a str,
    pub scales: &'a str,
    pub global: &'a str,
}

/// Adds the tensor `name` to `found`, and the f32 of its matrices; returns whether rows are stored as columns.
///
/// The caller guarantees that the codes are bytes. Refused are scales of another type or shape.
pub(super) fn add(
    from: &Checkpoint,
    name: &str,
    stored: &StoredNames,
    global: Global,
    found: &mut Found,
) -> Result<bool> {
    let StoredNames { codes, scales, .. } = *stored;
    let (packed, found_scales) = (from.stored(codes)?, from.stored(scales)?);
    let mismatch = || {
        let what = format!(
            "tensor '{scales}' is {:?} of shape {:?}, which does not fit '{codes}' of {:?}; an F8_E4M3 per {GROUP} columns \
             of whole rows is needed",
            found_scales.dtype, found_scales.shape, packed.shape
        );
        StoreError::new(StoreErrorKind::Mismatch, from.path(), what)
    };
    let (transposed, shape) = Some((&packed.shape[..], &found_scales.shape[..]))
        .filter(|_| found_scales.dtype == Dtype::F8_E4M3)
        .and_then(|(codes, scales)| logical_shape(codes, scales))
        .ok_or_else(mismatch)?;
    let matrices = if shape.len() == 2 { 1 } else { shape[0] };
    let [.., cols] = shape[..] else { unreachable!("a matrix has columns") };
    let encoding = Nvfp4 {
        codes: codes.to_owned(),
        scales: scales.to_owned(),
        global: GlobalScale::new(from, stored.global, global, matrices)?,
        matrix: shape.iter().product::<usize>() / matrices,
        cols,
        transposed,
    };
    let scale = encoding.global.clone();
    let tensor = PackedTensor::new(from, name, shape, Box::new(encoding))?;
    let of_matrix = PackedTensor::new(from, scale.name.as_str(), vec![scale.count], Box::new(scale.clone()))?;
    found.tensors.insert(name.to_owned(), tensor);
    found.tensors.insert(matrix_scale_name(name), of_matrix);
    Ok(transposed)
}

/// Whether rows are stored as columns, and the shape of the values; `None` if codes and scales do not fit each other.
fn logical_shape(codes: &[usize], scales: &[usize]) -> Option<(bool, Vec<usize>)> {
    if codes.len() < 2 || codes.len() != scales.len() || codes.contains(&0) {
        return None;
    }
    let (outer, [.., before, last]) = (&codes[..codes.len() - 2], codes) else { return None };
    let [.., groups_before, groups_last] = scales else { return None };
    let cols = |bytes: usize, groups: usize| {
        let cols = bytes.checked_mul(2)?;
        (groups.checked_mul(GROUP) == Some(cols)).then_some(cols)
    };
    let fits = scales.starts_with(outer);
    if let Some(cols) = cols(*last, *groups_last).filter(|_| fits && before == groups_before) {
        return Some((false, [outer, &[*before, cols]].concat()));
    }
    let stacked = fits && outer.len() == 1 && last == groups_last;
    cols(*before, *groups_before).filter(|_| stacked).map(|cols| (true, vec![outer[0], *last, cols]))
}

/// The f32 of one or more matrices.
#[derive(Clone)]
struct GlobalScale {
    name: String,
    is: Global,
    /// One for all matrices, or one for each.
    count: usize,
}

impl GlobalScale {
    fn new(from: &Checkpoint, name: &str, is: Global, matrices: usize) -> Result<Self> {
        let stored = from.stored(name)?;
        let count = stored.shape.iter().try_fold(1usize, |count, side| count.checked_mul(*side));
        match count.filter(|count| stored.dtype == Dtype::F32 && [1, matrices].contains(count)) {
            Some(count) => Ok(GlobalScale { name: name.to_owned(), is, count }),
            None => {
                let wanted = if matrices == 1 { "one".into() } else { format!("1 or {matrices}") };
                let what = format!(
                    "tensor '{name}' is {:?} of shape {:?}; it must be F32 with {wanted} of them",
                    stored.dtype, stored.shape
                );
                Err(StoreError::new(StoreErrorKind::Mismatch, from.path(), what))
            }
        }
    }

    /// What the values of the matrices from number `first` on are multiplied by. Refused are those that are not finite.
    fn read(&self, from: &Checkpoint, first: usize, out: &mut [f32]) -> Result<()> {
        let mut bytes = vec![0; 4 * out.len()];
        from.read(&self.name, 4 * first, &mut bytes)?;
        for (scale, stored) in out.iter_mut().zip(bytes.as_chunks().0) {
            let stored = f32::from_le_bytes(*stored);
            *scale = if self.is == Global::Divisor { 1.0 / stored } else { stored };
            if !stored.is_finite() || !scale.is_finite() {
                let what = format!("tensor '{}' holds the scale {stored}", self.name);
                return Err(StoreError::malformed(from.path(), what));
            }
        }
        Ok(())
    }

    /// What the values of matrix number `index` are multiplied by.
    fn of(&self, from: &Checkpoint, index: usize) -> Result<f32> {
        let mut scale = [0.0];
        self.read(from, if self.count == 1 { 0 } else { index }, &mut scale)?;
        Ok(scale[0])
    }
}

impl Encoding for GlobalScale {
    fn kind(&self) -> NumberFormat {
        NumberFormat::F32
    }

    fn parts(&self) -> Vec<&str> {
        vec![&self.name]
    }

    fn widen(&self, from: &Checkpoint, first: usize, out: &mut [f32]) -> Result<()> {
        self.read(from, first, out)
    }

    fn keep(&self, from: &Checkpoint, first: usize, out: &mut [u8]) -> Result<()> {
        let mut values = vec![0.0; out.len() / 4];
        self.read(from, first, &mut values)?;
        out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_le_bytes());
        Ok(())
    }

    fn ranges(&self, _: Range<usize>) -> Vec<(&str, Range<usize>)> {
        // The values of the matrices need it too.
        vec![]
    }
}

/// A tensor of one matrix, or of several that are stacked.
struct Nvfp4 {
    codes: String,
    scales: String,
    global: GlobalScale,
    /// Values of a matrix, and of a row.
    matrix: usize,
    cols: usize,
    /// Whether rows are stored as columns.
    transposed: bool,
}

impl Nvfp4 {
    /// The bytes of a stored tensor, with one per `each` values, that belong to `count` values from `first` on.
    fn read(&self, from: &Checkpoint, name: &str, each: usize, (first, count): (usize, usize)) -> Result<Vec<u8>> {
        let mut all = vec![0; count / each];
        if !self.transposed {
            from.read(name, first / each, &mut all)?;
            return Ok(all);
        }
        let (mut at, mut rest) = (first, &mut all[..]);
        while at < first + count {
            let (row, col) = (at / self.cols, at % self.cols);
            let left = first + count - at;
            // A part of a row, or whole rows of a matrix.
            let whole = (left / self.cols).min((self.matrix - at % self.matrix) / self.cols);
            let (rows, cols) =
                if col == 0 && whole > 0 { (whole, self.cols) } else { (1, (self.cols - col).min(left)) };
            let (now, behind) = std::mem::take(&mut rest).split_at_mut(rows * cols / each);
            self.read_columns(from, name, each, (row..row + rows, col..col + cols), now)?;
            (at, rest) = (at + rows * cols, behind);
        }
        Ok(all)
    }

    /// Reads the bytes of some columns of rows of one matrix, which are stored as columns.
    fn read_columns(
        &self,
        from: &Checkpoint,
        name: &str,
        each: usize,
        (rows, cols): (Range<usize>, Range<usize>),
        out: &mut [u8],
    ) -> Result<()> {
        let (height, width) = (self.matrix / self.cols, cols.len() / each);
        let (matrix, row) = (rows.start / height, rows.start % height);
        let mut column = vec![0; rows.len()];
        for i in 0..width {
            let stored = matrix * (self.cols / each) + cols.start / each + i;
            from.read(name, stored * height + row, &mut column)?;
            column.iter().enumerate().for_each(|(row, byte)| out[row * width + i] = *byte);
        }
        Ok(())
    }

    /// Calls `put` with each block of `count` values from `first` on: the bytes of its codes, and its scales.
    fn blocks(
        &self,
        from: &Checkpoint,
        first: usize,
        count: usize,
        mut put: impl FnMut(&[u8], [u8; SCALES]),
    ) -> Result<()> {
        let codes = self.read(from, &self.codes, 2, (first, count))?;
        let scales = self.read(from, &self.scales, GROUP, (first, count))?;
        if let Some(bad) = scales.iter().find(|bits| **bits >= 0x7f) {
            let held = if bad & 0x7f == 0x7f { "NaN" } else { "a negative scale" };
            let what = format!("tensor '{}' holds {held} (0x{bad:02x}), which nvfp4 cannot hold", self.scales);
            return Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
        }
        codes.chunks(BLOCK / 2).zip(scales.as_chunks().0).for_each(|(codes, scales)| put(codes, *scales));
        Ok(())
    }
}

/// Code `i` of codes that are two to a byte.
fn code(pairs: &[u8], i: usize) -> u8 {
    (pairs[i / 2] >> (4 * (i % 2))) & 15
}

impl Encoding for Nvfp4 {
    fn kind(&self) -> NumberFormat {
        NumberFormat::Nvfp4
    }

    fn parts(&self) -> Vec<&str> {
        vec![&self.codes, &self.scales, &self.global.name]
    }

    fn widen(&self, from: &Checkpoint, first: usize, out: &mut [f32]) -> Result<()> {
        let mut rest = &mut out[..];
        self.blocks(from, first, rest.len(), |codes, scales| {
            let (block, behind) = std::mem::take(&mut rest).split_at_mut(BLOCK);
            rest = behind;
            for (i, value) in block.iter_mut().enumerate() {
                *value = f32::from(MXFP4_LEVELS[usize::from(code(codes, i))]) * nvfp4_scale(scales[i / GROUP]);
            }
        })?;
        let mut at = first;
        while at < first + out.len() {
            let end = (at / self.matrix + 1) * self.matrix;
            let piece = at - first..end.min(first + out.len()) - first;
            let scale = self.global.of(from, at / self.matrix)?;
            out[piece].iter_mut().for_each(|value| *value *= scale);
            at = end;
        }
        Ok(())
    }

    fn keep(&self, from: &Checkpoint, first: usize, out: &mut [u8]) -> Result<()> {
        let count = out.len() / BLOCK_BYTES * BLOCK;
        let mut blocks = out.chunks_exact_mut(BLOCK_BYTES);
        self.blocks(from, first, count, |codes, scales| {
            let (head, nibbles) = blocks.next().expect("as many as values").split_at_mut(SCALES);
            head.copy_from_slice(&scales);
            for (g, group) in nibbles.chunks_exact_mut(GROUP / 2).enumerate() {
                let low = |i: usize| code(codes, g * GROUP + i);
                group.iter_mut().enumerate().for_each(|(i, byte)| *byte = low(i) | low(GROUP / 2 + i) << 4);
            }
        })
    }

    fn step(&self) -> usize {
        if self.transposed { (LONG_STEP / self.cols).max(1) * self.cols } else { STEP }
    }

    fn ranges(&self, values: Range<usize>) -> Vec<(&str, Range<usize>)> {
        if self.transposed && !(values.start.is_multiple_of(self.matrix) && values.end.is_multiple_of(self.matrix)) {
            // The bytes of some rows are among those of others.
            return vec![];
        }
        let per = |each: usize| values.start / each..values.end / each;
        vec![(&self.codes, per(2)), (&self.scales, per(GROUP))]
    }
}
