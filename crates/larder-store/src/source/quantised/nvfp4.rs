//! NVFP4: floats of four bits, two to a byte (the value of even index in the low bits), an E4M3 scale per 16 columns, and an f32
//! per matrix. Kept as nvfp4, exactly, with the f32 beside it under [`matrix_scale_name`].

use std::ops::Range;

use larder_core::{MXFP4_LEVELS, NumberFormat, Tensors, matrix_scale_name, nvfp4_scale};
use safetensors::Dtype;

use super::{Checkpoint, Encoding, Found, PackedTensor};
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

/// Adds the tensor `name` to `found`, and the f32 of its matrices.
///
/// The caller guarantees that the codes are bytes. Refused are scales of another type or shape.
pub(super) fn add(
    from: &Checkpoint,
    name: &str,
    stored: &StoredNames,
    global: Global,
    found: &mut Found,
) -> Result<()> {
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
    let (Some((bytes, outer)), Some((groups, outer_scales))) =
        (packed.shape.split_last(), found_scales.shape.split_last())
    else {
        return Err(mismatch());
    };
    let cols = bytes.checked_mul(2).filter(|cols| *cols > 0).ok_or_else(mismatch)?;
    let fits = found_scales.dtype == Dtype::F8_E4M3 && outer == outer_scales && groups.checked_mul(GROUP) == Some(cols);
    if !fits || outer.is_empty() || outer.contains(&0) {
        return Err(mismatch());
    }
    let matrices = if outer.len() == 1 { 1 } else { outer[0] };
    let encoding = Nvfp4 {
        codes: codes.to_owned(),
        scales: scales.to_owned(),
        global: GlobalScale::new(from, stored.global, global, matrices)?,
        matrix: outer.iter().product::<usize>() / matrices * cols,
    };
    let scale = encoding.global.clone();
    let tensor = PackedTensor::new(from, name, [outer, &[cols]].concat(), Box::new(encoding))?;
    let of_matrix = PackedTensor::new(from, scale.name.as_str(), vec![scale.count], Box::new(scale.clone()))?;
    found.tensors.insert(name.to_owned(), tensor);
    found.tensors.insert(matrix_scale_name(name), of_matrix);
    Ok(())
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
    /// Values of a matrix.
    matrix: usize,
}

impl Nvfp4 {
    /// Calls `put` with each block of `count` values from `first` on: the bytes of its codes, and its scales.
    fn blocks(
        &self,
        from: &Checkpoint,
        first: usize,
        count: usize,
        mut put: impl FnMut(&[u8], [u8; SCALES]),
    ) -> Result<()> {
        let (mut codes, mut scales) = (vec![0; count / 2], vec![0; count / GROUP]);
        from.read(&self.codes, first / 2, &mut codes)?;
        from.read(&self.scales, first / GROUP, &mut scales)?;
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

    fn ranges(&self, values: Range<usize>) -> Vec<(&str, Range<usize>)> {
        let per = |each: usize| values.start / each..values.end / each;
        vec![(&self.codes, per(2)), (&self.scales, per(GROUP))]
    }
}
