//! Integers of two, four or eight bits, packed in words of 32, with a scale and a zero point or bias per group of
//! columns: the forms of GPTQ, AWQ and MLX.
//!
//! A value is `(code - zero) * scale`, or `code * scale + bias`. Four bits less a zero point lie between -16 and 15, so
//! that `q5_0` holds them exactly; with the zero point in the middle `q4_0` does. Codes with a bias are those of
//! `q4_1`.

use std::ops::Range;

use half::{bf16, f16};
use larder_core::{NumberFormat, Tensors};
use safetensors::Dtype;

use super::{Checkpoint, Encoding, PackedTensor, STEP, exact_half};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::Source,
};

/// Values per block of the formats in which the tensors are kept.
const BLOCK: usize = 32;
/// Bits of a word.
const WORD: usize = 32;
/// Values that are converted at a time where a word row holds one column of many rows.
const LONG_STEP: usize = 1 << 22;

/// Order of values in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Packing {
    /// Consecutive columns of one row; word rows are those of the matrix. Scales are `[rows, groups]`.
    Rows,
    /// Consecutive columns of one row; the words are transposed: `[cols / per word, rows]`. Scales are
    /// `[groups, rows]`.
    Transposed,
    /// Eight rows of one column, first the even ones and then the odd ones: `[cols, rows / 8]`. Scales are
    /// `[groups, rows]`.
    Interleaved,
}

/// Zero points, which are subtracted from codes, or biases, which are added to products.
pub(super) enum Offsets {
    /// Zero points, packed like codes but along the rows: `[groups, rows / per word]`. What is stored is less by
    /// `less`.
    Zeros { name: String, less: i32 },
    /// A float for each scale, of the same type.
    Biases(String),
}

/// A tensor of packed integers.
pub(super) struct PackedIntegers {
    pub codes: String,
    pub scales: String,
    pub offsets: Offsets,
    pub packing: Packing,
    /// Rows of all matrices together, and columns: a multiple of `group`.
    pub shape: (usize, usize),
    /// Columns that share a scale, a multiple of 32.
    pub group: usize,
    pub bits: usize,
    /// Type of the scales: F16, BF16 or F32.
    pub dtype: Dtype,
    pub kind: NumberFormat,
}

/// A matrix in a file.
struct StoredMatrix<'a> {
    name: &'a str,
    /// Elements of a row.
    width: usize,
    /// Bytes of an element.
    bytes: usize,
}

/// Some rows and columns of a matrix.
#[derive(Clone)]
struct Region {
    rows: Range<usize>,
    cols: Range<usize>,
}

/// Elements of a region of a stored matrix.
struct Elements {
    region: Region,
    bytes: usize,
    data: Vec<u8>,
}

impl StoredMatrix<'_> {
    fn read(&self, from: &Checkpoint, region: Region) -> Result<Elements> {
        let (width, bytes) = (region.cols.len(), self.bytes);
        let mut data = vec![0; region.rows.len() * width * bytes];
        let at = |row: usize| (row * self.width + region.cols.start) * bytes;
        if width == self.width {
            from.read(self.name, at(region.rows.start), &mut data)?;
        } else if width > 0 {
            for (row, into) in region.rows.clone().zip(data.chunks_exact_mut(width * bytes)) {
                from.read(self.name, at(row), into)?;
            }
        }
        Ok(Elements { region, bytes, data })
    }
}

impl Elements {
    fn get(&self, row: usize, col: usize) -> &[u8] {
        let Region { rows, cols } = &self.region;
        let at = ((row - rows.start) * cols.len() + col - cols.start) * self.bytes;
        &self.data[at..at + self.bytes]
    }

    fn word(&self, row: usize, col: usize) -> u32 {
        u32::from_le_bytes(self.get(row, col).try_into().expect("four bytes"))
    }
}

/// A block of values with one scale.
struct Block {
    codes: [u8; BLOCK],
    scale: f32,
    offset: Offset,
}

#[derive(Clone, Copy)]
enum Offset {
    Zero(i32),
    Bias(f32),
}

/// The parts of a region, as they are stored.
struct RegionParts {
    codes: Elements,
    scales: Elements,
    offsets: Elements,
}

impl PackedIntegers {
    /// The tensor `name` of `shape`, whose last dimension has the columns.
    pub(super) fn tensor(self, from: &Checkpoint, name: &str, shape: Vec<usize>) -> Result<PackedTensor> {
        let refused = |what: String| Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
        let PackedIntegers { group, scales, dtype, .. } = &self;
        if *group == 0 || !group.is_multiple_of(BLOCK) || !self.shape.1.is_multiple_of(*group) {
            return refused(format!(
                "has the tensor '{name}' with a scale per {group} columns of {}; multiples of {BLOCK} that divide the \
                 columns are supported",
                self.shape.1
            ));
        }
        if !matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32) {
            return refused(format!("tensor '{scales}' has dtype {dtype:?}, which is not supported for scales"));
        }
        PackedTensor::new(from, name, shape, Box::new(self))
    }

    fn per_word(&self) -> usize {
        WORD / self.bits
    }

    /// The code in `word` of place `at`.
    fn code(&self, word: u32, at: usize) -> u8 {
        (word >> (self.bits * at)) as u8 & (0xff >> (8 - self.bits))
    }

    /// The place within a word of row `row`, where words hold rows.
    fn place_of_row(&self, row: usize) -> usize {
        let place = row % self.per_word();
        match self.packing {
            Packing::Interleaved => place / 2 + place % 2 * (self.per_word() / 2),
            _ => place,
        }
    }

    fn code_matrix(&self) -> StoredMatrix<'_> {
        let ((rows, cols), per) = (self.shape, self.per_word());
        let width = match self.packing {
            Packing::Rows => cols / per,
            Packing::Transposed => rows,
            Packing::Interleaved => rows / per,
        };
        StoredMatrix { name: &self.codes, width, bytes: size_of::<u32>() }
    }

    fn scale_matrix<'a>(&self, name: &'a str) -> StoredMatrix<'a> {
        let width = if self.packing == Packing::Rows { self.shape.1 / self.group } else { self.shape.0 };
        StoredMatrix { name, width, bytes: self.dtype.bitsize() / 8 }
    }

    /// Reads what the values of a region are made of.
    fn read(&self, from: &Checkpoint, Region { rows, cols }: &Region) -> Result<RegionParts> {
        let per = |range: &Range<usize>, size: usize| range.start / size..range.end.div_ceil(size);
        let (groups, words) = (per(cols, self.group), self.per_word());
        let region = |rows: &Range<usize>, cols: Range<usize>| Region { rows: rows.clone(), cols };
        let of_codes = match self.packing {
            Packing::Rows => region(rows, per(cols, words)),
            Packing::Transposed => region(&per(cols, words), rows.clone()),
            Packing::Interleaved => region(cols, per(rows, words)),
        };
        let of_scales = match self.packing {
            Packing::Rows => region(rows, groups.clone()),
            _ => region(&groups, rows.clone()),
        };
        let offsets = match &self.offsets {
            Offsets::Biases(name) => self.scale_matrix(name).read(from, of_scales.clone())?,
            Offsets::Zeros { name, .. } => {
                let zeros = StoredMatrix { name, width: self.shape.0 / words, bytes: size_of::<u32>() };
                zeros.read(from, region(&groups, per(rows, words)))?
            }
        };
        let (codes, scales) = (self.code_matrix(), self.scale_matrix(&self.scales));
        Ok(RegionParts { codes: codes.read(from, of_codes)?, scales: scales.read(from, of_scales)?, offsets })
    }

    /// The block of `row` that begins with column `col`.
    fn block(&self, from: &Checkpoint, parts: &RegionParts, row: usize, col: usize) -> Result<Block> {
        let (words, group) = (self.per_word(), col / self.group);
        let codes = std::array::from_fn(|i| {
            let col = col + i;
            match self.packing {
                Packing::Rows => self.code(parts.codes.word(row, col / words), col % words),
                Packing::Transposed => self.code(parts.codes.word(col / words, row), col % words),
                Packing::Interleaved => self.code(parts.codes.word(col, row / words), self.place_of_row(row)),
            }
        });
        let float = |elements: &Elements, name: &str| {
            let bytes = if self.packing == Packing::Rows { elements.get(row, group) } else { elements.get(group, row) };
            let value = widened(self.dtype, bytes);
            let finite = value.is_finite().then_some(value);
            finite.ok_or_else(|| StoreError::malformed(from.path(), format!("tensor '{name}' holds the value {value}")))
        };
        let offset = match &self.offsets {
            Offsets::Biases(name) => Offset::Bias(float(&parts.offsets, name)?),
            Offsets::Zeros { less, .. } => {
                let stored = self.code(parts.offsets.word(group, row / words), self.place_of_row(row));
                Offset::Zero(i32::from(stored) + less)
            }
        };
        Ok(Block { codes, scale: float(&parts.scales, &self.scales)?, offset })
    }

    /// Calls `put` with each block of `count` values from `first` on, in order.
    fn blocks(
        &self,
        from: &Checkpoint,
        first: usize,
        count: usize,
        mut put: impl FnMut(Block) -> Result<()>,
    ) -> Result<()> {
        for region in regions(first, count, self.shape.1) {
            let parts = self.read(from, &region)?;
            for row in region.rows.clone() {
                region.cols.clone().step_by(BLOCK).try_for_each(|col| put(self.block(from, &parts, row, col)?))?;
            }
        }
        Ok(())
    }

    /// Writes a block in the format in which it is kept.
    fn keep_block(&self, from: &Checkpoint, block: &Block, out: &mut [u8]) -> Result<()> {
        let half = |name: &str, value| exact_half(from, name, value, self.kind).map(f16::to_le_bytes);
        let (head, codes) = out.split_at_mut(2);
        head.copy_from_slice(&half(&self.scales, block.scale)?);
        match block.offset {
            Offset::Bias(bias) => {
                let Offsets::Biases(name) = &self.offsets else { unreachable!("a bias is read from biases") };
                let (bias_bytes, nibbles) = codes.split_at_mut(2);
                bias_bytes.copy_from_slice(&half(name, bias)?);
                put_nibbles(&block.codes, nibbles);
                Ok(())
            }
            Offset::Zero(zero) => self.put_integers(from, &block.codes.map(|code| i32::from(code) - zero), codes),
        }
    }

    /// Writes the integers of a block behind its scale.
    fn put_integers(&self, from: &Checkpoint, integers: &[i32; BLOCK], out: &mut [u8]) -> Result<()> {
        let least = match self.kind {
            NumberFormat::Q8_0 => -128,
            NumberFormat::Q5_0 => -16,
            _ => -8,
        };
        if let Some(other) = integers.iter().find(|value| !(least..-least).contains(*value)) {
            let what = format!(
                "tensor '{}' holds the integer {other} behind its zero point, which {} cannot hold; convert to bf16 or \
                 another format instead of keeping it",
                self.codes, self.kind
            );
            return Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
        }
        let codes = integers.map(|value| (value - least) as u8);
        match self.kind {
            NumberFormat::Q8_0 => out.iter_mut().zip(integers).for_each(|(out, value)| *out = *value as u8),
            NumberFormat::Q5_0 => {
                let fifth = (0..BLOCK).map(|i| u32::from(codes[i] >> 4) << i).sum::<u32>();
                let (high, nibbles) = out.split_at_mut(4);
                high.copy_from_slice(&fifth.to_le_bytes());
                put_nibbles(&codes.map(|code| code & 15), nibbles);
            }
            _ => put_nibbles(&codes, out),
        }
        Ok(())
    }
}

impl Block {
    fn values(&self) -> [f32; BLOCK] {
        match self.offset {
            Offset::Zero(zero) => self.codes.map(|code| (i32::from(code) - zero) as f32 * self.scale),
            // One rounding: the product of the two is exact in f64.
            Offset::Bias(bias) => {
                let value = |code: u8| f64::from(code) * f64::from(self.scale) + f64::from(bias);
                self.codes.map(|code| value(code) as f32)
            }
        }
    }
}

/// Value `i` in the low bits of byte `i`, and value `16 + i` in the high bits.
fn put_nibbles(codes: &[u8; BLOCK], out: &mut [u8]) {
    out.iter_mut().enumerate().for_each(|(i, byte)| *byte = codes[i] | codes[BLOCK / 2 + i] << 4);
}

fn widened(dtype: Dtype, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (Dtype::F16, [a, b]) => f16::from_le_bytes([*a, *b]).to_f32(),
        (Dtype::BF16, [a, b]) => bf16::from_le_bytes([*a, *b]).to_f32(),
        _ => f32::from_le_bytes(bytes.try_into().expect("the type was checked")),
    }
}

/// `count` values from `first` on, in rows of `cols`, as a part of a row, whole rows, and a part of a row.
fn regions(first: usize, count: usize, cols: usize) -> Vec<Region> {
    let (mut at, end) = (first, first + count);
    let mut regions = vec![];
    while at < end {
        let (row, col) = (at / cols, at % cols);
        let region = if col == 0 && end - at >= cols {
            Region { rows: row..end / cols, cols: 0..cols }
        } else {
            Region { rows: row..row + 1, cols: col..cols.min(col + end - at) }
        };
        at += region.rows.len() * region.cols.len();
        regions.push(region);
    }
    regions
}

impl Encoding for PackedIntegers {
    fn kind(&self) -> NumberFormat {
        self.kind
    }

    fn parts(&self) -> Vec<&str> {
        let (Offsets::Zeros { name, .. } | Offsets::Biases(name)) = &self.offsets;
        vec![&self.codes, &self.scales, name]
    }

    fn step(&self) -> usize {
        match self.packing {
            Packing::Rows => STEP,
            _ => (LONG_STEP / self.shape.1).max(1) * self.shape.1,
        }
    }

    fn widen(&self, from: &Checkpoint, first: usize, out: &mut [f32]) -> Result<()> {
        // Values that are kept as f16 need not be whole blocks.
        let (begin, end) = (first / BLOCK * BLOCK, (first + out.len()).next_multiple_of(BLOCK));
        let (mut at, last) = (begin, first + out.len());
        self.blocks(from, begin, end - begin, |block| {
            let (from, to) = (at.max(first), (at + BLOCK).min(last));
            out[from - first..to - first].copy_from_slice(&block.values()[from - at..to - at]);
            at += BLOCK;
            Ok(())
        })
    }

    fn keep(&self, from: &Checkpoint, first: usize, out: &mut [u8]) -> Result<()> {
        if self.kind == NumberFormat::F16 {
            let halves = out.as_chunks_mut::<2>().0;
            let mut values = vec![0.0; halves.len()];
            self.widen(from, first, &mut values)?;
            halves.iter_mut().zip(values).for_each(|(half, value)| *half = f16::from_f32(value).to_le_bytes());
            return Ok(());
        }
        let bytes = self.kind.block_bytes();
        let mut out = out.chunks_exact_mut(bytes);
        self.blocks(from, first, out.len() * BLOCK, |block| {
            self.keep_block(from, &block, out.next().expect("a place for each block"))
        })
    }

    /// Words that hold several rows, and columns of many rows, are needed by other values too, unless these are all.
    fn ranges(&self, values: Range<usize>) -> Vec<(&str, Range<usize>)> {
        let ((rows, cols), scale_bytes) = (self.shape, self.dtype.bitsize() / 8);
        let (code_bytes, groups) = (rows * cols * self.bits / 8, rows * cols / self.group);
        if values == (0..rows * cols) {
            let (Offsets::Zeros { name, .. } | Offsets::Biases(name)) = &self.offsets;
            let offset_bytes = match &self.offsets {
                Offsets::Zeros { .. } => groups * self.bits / 8,
                Offsets::Biases(_) => groups * scale_bytes,
            };
            let scales = (self.scales.as_str(), 0..groups * scale_bytes);
            return vec![(&self.codes, 0..code_bytes), scales, (name, 0..offset_bytes)];
        }
        match self.packing {
            Packing::Rows => vec![(&self.codes, values.start * self.bits / 8..values.end * self.bits / 8)],
            _ => vec![],
        }
    }

    fn rounds(&self) -> bool {
        self.kind == NumberFormat::F16
    }
}
