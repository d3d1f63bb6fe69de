//! Four-bit values with a scale per group of columns, two to a byte: the value of even index in the low bits.
//!
//! Both forms have an exact equivalent among the number formats, with the same codes in another order.

use std::ops::Range;

use half::{bf16, f16};
use larder_core::{MXFP4_LEVELS, NumberFormat, Tensors, mxfp4_scale};
use safetensors::Dtype;

use super::{Checkpoint, Encoding, PackedTensor, exact_half};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::Source,
};

/// Values per block of the formats in which the tensors are kept.
const BLOCK: usize = 32;
/// The byte of an E8M0 scale that stands for NaN.
const E8M0_NAN: u8 = 255;

/// What the four bits of a value are.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Code {
    /// A float of four bits, times a power of two whose exponent is a byte.
    Fp4,
    /// An integer from -8 to 7 plus 8, times a float scale of this type.
    Integer(Dtype),
}

/// A tensor of four-bit values.
struct Nibbles {
    packed: String,
    scales: String,
    code: Code,
    /// Columns per scale, a multiple of [`BLOCK`].
    group: usize,
}

/// The tensor `name` of `shape`, whose codes, floats or integers, are in `packed` and whose scales are in `scales`.
///
/// The caller guarantees that `packed` holds half a byte for each value of the shape. Refused are scales of another
/// shape or type.
pub(super) fn tensor(
    from: &Checkpoint,
    name: &str,
    (packed, scales): (&str, &str),
    shape: Vec<usize>,
    floats: bool,
) -> Result<PackedTensor> {
    let found = from.stored(scales)?;
    let code = match found.dtype {
        Dtype::U8 | Dtype::F8_E8M0 if floats => Code::Fp4,
        Dtype::F32 | Dtype::F16 | Dtype::BF16 if !floats => Code::Integer(found.dtype),
        other => {
            let what = format!("tensor '{scales}' has dtype {other:?}, which is not supported for these scales");
            return Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
        }
    };
    let groups = found.shape.last().copied().unwrap_or(0);
    let cols = shape.last().copied().unwrap_or(0);
    let outer = &shape[..shape.len().saturating_sub(1)];
    let group = cols.checked_div(groups).filter(|group| group * groups == cols && group.is_multiple_of(BLOCK));
    let group = group.filter(|_| found.shape.len() == shape.len() && found.shape[..outer.len()] == *outer);
    let group = group.filter(|group| *group == BLOCK || code != Code::Fp4).ok_or_else(|| {
        let what = format!("tensor '{scales}' has shape {:?}, which does not fit '{name}' of {shape:?}", found.shape);
        StoreError::new(StoreErrorKind::Mismatch, from.path(), what)
    })?;
    let nibbles = Nibbles { packed: packed.to_owned(), scales: scales.to_owned(), code, group };
    PackedTensor::new(from, name, shape, Box::new(nibbles))
}

impl Nibbles {
    /// Bytes of a scale.
    fn scale_bytes(&self) -> usize {
        match self.code {
            Code::Fp4 => 1,
            Code::Integer(dtype) => dtype.bitsize() / 8,
        }
    }

    /// The scales of `values`, as they are stored. Rows are whole groups.
    fn scale_range(&self, values: &Range<usize>) -> Range<usize> {
        values.start / self.group..values.end.div_ceil(self.group)
    }

    /// Reads the codes of `count` values from `first` on, and the scale of each block of them.
    fn read(&self, from: &Checkpoint, first: usize, count: usize) -> Result<(Vec<u8>, Vec<Scale>)> {
        let mut codes = vec![0; count / 2];
        from.read(&self.packed, first / 2, &mut codes)?;
        let range = self.scale_range(&(first..first + count));
        let size = self.scale_bytes();
        let mut bytes = vec![0; range.len() * size];
        from.read(&self.scales, range.start * size, &mut bytes)?;
        let scale = |value: usize| self.scale(from, &bytes[(value / self.group - range.start) * size..][..size]);
        let scales = (first..first + count).step_by(BLOCK).map(scale).collect::<Result<_>>()?;
        Ok((codes, scales))
    }

    fn scale(&self, from: &Checkpoint, bytes: &[u8]) -> Result<Scale> {
        let scale = match self.code {
            Code::Fp4 if bytes[0] == E8M0_NAN => Scale::Float(f32::NAN),
            Code::Fp4 => return Ok(Scale::Exponent(bytes[0])),
            Code::Integer(Dtype::F32) => Scale::Float(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
            Code::Integer(Dtype::F16) => Scale::Float(f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()),
            Code::Integer(_) => Scale::Float(bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()),
        };
        match scale {
            Scale::Float(value) if !value.is_finite() => {
                let what = format!("tensor '{}' holds the scale {value}", self.scales);
                Err(StoreError::malformed(from.path(), what))
            }
            scale => Ok(scale),
        }
    }
}

#[derive(Clone, Copy)]
enum Scale {
    /// 2 to the power of this, less 127.
    Exponent(u8),
    Float(f32),
}

/// The codes of a block with value `i` in the low bits of byte `i`, and value `16 + i` in the high bits.
fn halves(pairs: &[u8], out: &mut [u8]) {
    let code = |value: usize| (pairs[value / 2] >> (4 * (value % 2))) & 15;
    out.iter_mut().enumerate().for_each(|(i, byte)| *byte = code(i) | code(BLOCK / 2 + i) << 4);
}

impl Encoding for Nibbles {
    fn kind(&self) -> NumberFormat {
        match self.code {
            Code::Fp4 => NumberFormat::Mxfp4,
            Code::Integer(_) => NumberFormat::Q4_0,
        }
    }

    fn parts(&self) -> Vec<&str> {
        vec![&self.packed, &self.scales]
    }

    fn widen(&self, from: &Checkpoint, first: usize, out: &mut [f32]) -> Result<()> {
        let (codes, scales) = self.read(from, first, out.len())?;
        for ((pairs, scale), out) in codes.chunks(BLOCK / 2).zip(scales).zip(out.chunks_mut(BLOCK)) {
            for (i, value) in out.iter_mut().enumerate() {
                let code = (pairs[i / 2] >> (4 * (i % 2))) & 15;
                *value = match scale {
                    Scale::Exponent(e) => f32::from(MXFP4_LEVELS[usize::from(code)]) * mxfp4_scale(e),
                    Scale::Float(scale) => (f32::from(code) - 8.0) * scale,
                };
            }
        }
        Ok(())
    }

    fn keep(&self, from: &Checkpoint, first: usize, out: &mut [u8]) -> Result<()> {
        let bytes = self.kind().block_bytes();
        let (codes, scales) = self.read(from, first, out.len() / bytes * BLOCK)?;
        for ((pairs, scale), block) in codes.chunks(BLOCK / 2).zip(scales).zip(out.chunks_mut(bytes)) {
            let (head, tail) = block.split_at_mut(bytes - BLOCK / 2);
            match scale {
                Scale::Exponent(exponent) => head[0] = exponent,
                Scale::Float(scale) => {
                    head.copy_from_slice(&exact_half(from, &self.scales, scale, self.kind())?.to_le_bytes())
                }
            }
            halves(pairs, tail);
        }
        Ok(())
    }

    fn ranges(&self, values: Range<usize>) -> Vec<(&str, Range<usize>)> {
        let (scales, size) = (self.scale_range(&values), self.scale_bytes());
        vec![(&self.packed, values.start / 2..values.end / 2), (&self.scales, scales.start * size..scales.end * size)]
    }
}
