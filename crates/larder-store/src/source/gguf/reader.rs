//! Reads the header of a GGUF file, versions 2 and 3, little-endian: metadata, and the range of each tensor.

use std::collections::HashMap;

use larder_core::{NumberFormat, TensorMeta};

use super::{
    cursor::Cursor,
    metadata::{Metadata, Value},
};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::ReadAt,
};

/// The first bytes of every file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
/// Alignment of the data in files that state none.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;
const DIMS_MAX: u32 = 4;
/// Smallest metadata entry: the length of a key, the type of a value, and one byte.
const LEAST_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// Smallest tensor entry: the length of a name, a count of dimensions, a type and an offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// A tensor of the file.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct GgufTensor {
    pub name: String,
    pub meta: TensorMeta,
    /// Whether the values are integers of 32 bits, whatever `meta` says.
    pub integers: bool,
    /// Index of the file that holds it.
    pub file: usize,
    /// First byte, counted from the start of that file.
    pub offset: u64,
}

/// Everything before the data.
pub(crate) struct GgufHeader {
    pub metadata: Metadata,
    /// Tensors in the order of the file. Names are unique, and ranges lie inside the file without overlaps.
    pub tensors: Vec<GgufTensor>,
    /// Length of the header in bytes.
    pub bytes: u64,
}

impl GgufHeader {
    pub fn read(file: &ReadAt) -> Result<Self> {
        let mut cursor = Cursor::new(file);
        check_version(&mut cursor)?;
        let tensors = cursor.u64()?;
        let entries = cursor.u64()?;
        cursor.check_count(entries, LEAST_ENTRY_BYTES, "metadata entries")?;
        let mut metadata = Metadata::new(file.path());
        for _ in 0..entries {
            let key = cursor.text("metadata key")?;
            let value = read_value(&mut cursor, &key)?;
            metadata.insert(key, value)?;
        }
        cursor.check_count(tensors, LEAST_TENSOR_BYTES, "tensors")?;
        let mut tensors = (0..tensors).map(|_| read_entry(&mut cursor)).collect::<Result<Vec<_>>>()?;
        let bytes = cursor.at();
        place(file, bytes, alignment(&metadata)?, &mut tensors)?;
        Ok(GgufHeader { metadata, tensors, bytes })
    }
}

fn check_version(cursor: &mut Cursor) -> Result<()> {
    let path = cursor.file().path();
    if cursor.array()? != MAGIC {
        return Err(cursor.malformed("does not start with the magic bytes of GGUF"));
    }
    match cursor.u32()? {
        2 | 3 => Ok(()),
        v if v.swap_bytes() <= 3 => Err(StoreError::new(
            StoreErrorKind::Unsupported,
            path,
            "is a big-endian GGUF file; only little-endian files are supported",
        )),
        v => Err(StoreError::new(
            StoreErrorKind::Unsupported,
            path,
            format!("is GGUF version {v}; versions 2 and 3 are supported"),
        )),
    }
}

/// GGUF's numbers of value types.
pub(crate) mod tag {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const TEXT: u32 = 8;
    pub const LIST: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

fn read_value(cursor: &mut Cursor, key: &str) -> Result<Value> {
    Ok(match cursor.u32()? {
        tag::F32 => Value::Float(shortest(f32::from_le_bytes(cursor.array()?))),
        tag::F64 => Value::Float(f64::from_le_bytes(cursor.array()?)),
        tag::BOOL => Value::Flag(read_flag(cursor, key)?),
        tag::TEXT => Value::Text(cursor.text("metadata text")?),
        tag::LIST => read_list(cursor, key)?,
        other => Value::Int(read_int(cursor, other, key)?),
    })
}

fn read_list(cursor: &mut Cursor, key: &str) -> Result<Value> {
    let tag = cursor.u32()?;
    let count = cursor.u64()?;
    let least = match tag {
        tag::U16 | tag::I16 => 2,
        tag::U32 | tag::I32 | tag::F32 => 4,
        tag::U64 | tag::I64 | tag::F64 | tag::TEXT => 8,
        _ => 1,
    };
    cursor.check_count(count, least, &format!("values of '{key}'"))?;
    let each = 0..count;
    Ok(match tag {
        tag::F32 => Value::Floats(each.map(|_| cursor.array().map(f32::from_le_bytes)).collect::<Result<_>>()?),
        tag::F64 => {
            Value::Floats(each.map(|_| cursor.array().map(|b| f64::from_le_bytes(b) as f32)).collect::<Result<_>>()?)
        }
        tag::BOOL => Value::Flags(each.map(|_| read_flag(cursor, key)).collect::<Result<_>>()?),
        tag::TEXT => Value::Texts(each.map(|_| cursor.text("metadata text")).collect::<Result<_>>()?),
        tag::LIST => return Err(cursor.malformed(format!("has a list of lists as metadata '{key}'"))),
        other => Value::Ints(each.map(|_| read_small_int(cursor, other, key)).collect::<Result<_>>()?),
    })
}

fn read_flag(cursor: &mut Cursor, key: &str) -> Result<bool> {
    match cursor.array::<1>()?[0] {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(cursor.malformed(format!("has the byte {other} as a boolean in metadata '{key}'"))),
    }
}

fn read_small_int(cursor: &mut Cursor, tag: u32, key: &str) -> Result<i64> {
    let int = read_int(cursor, tag, key)?;
    i64::try_from(int)
        .map_err(|_| cursor.malformed(format!("has the number {int} in metadata '{key}', which is out of range")))
}

fn read_int(cursor: &mut Cursor, tag: u32, key: &str) -> Result<i128> {
    Ok(match tag {
        tag::U8 => cursor.array::<1>()?[0].into(),
        tag::I8 => i8::from_le_bytes(cursor.array()?).into(),
        tag::U16 => u16::from_le_bytes(cursor.array()?).into(),
        tag::I16 => i16::from_le_bytes(cursor.array()?).into(),
        tag::U32 => cursor.u32()?.into(),
        tag::I32 => i32::from_le_bytes(cursor.array()?).into(),
        tag::U64 => cursor.u64()?.into(),
        tag::I64 => i64::from_le_bytes(cursor.array()?).into(),
        other => return Err(cursor.malformed(format!("has metadata '{key}' of the unknown type {other}"))),
    })
}

/// The `f64` with the shortest decimal form of this `f32`: 0.00001 stays 0.00001.
pub(super) fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// Reads a tensor entry; its offset is still counted from the start of the data.
fn read_entry(cursor: &mut Cursor) -> Result<GgufTensor> {
    let name = cursor.text("tensor name")?;
    let dims = cursor.u32()?;
    if dims > DIMS_MAX {
        return Err(cursor.malformed(format!("has the tensor '{name}' with {dims} dimensions, more than {DIMS_MAX}")));
    }
    let mut shape = Vec::new();
    for _ in 0..dims {
        let dim = cursor.u64()?;
        let dim = usize::try_from(dim).ok().filter(|d| *d > 0);
        shape.push(dim.ok_or_else(|| {
            cursor.malformed(format!("has the tensor '{name}' with a dimension that is 0 or too large"))
        })?);
    }
    shape.reverse();
    let (kind, integers) = read_kind(cursor, &name)?;
    let offset = cursor.u64()?;
    let meta = TensorMeta::new(kind, shape.clone()).ok_or_else(|| {
        cursor.malformed(format!("has the tensor '{name}' with the shape {shape:?}, which is invalid for {kind}"))
    })?;
    Ok(GgufTensor { name, meta, integers, file: 0, offset })
}

/// The names of GGUF's tensor types by number; an empty name is an unused or removed type.
const TYPES: [&str; 43] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64",
    "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "", "", "", "MXFP4", "NVFP4", "Q1_0", "Q2_0",
];

/// The format of the values, and whether they are integers instead, which are as long as those of `F32`.
fn read_kind(cursor: &mut Cursor, tensor: &str) -> Result<(NumberFormat, bool)> {
    let number = cursor.u32()?;
    let name = TYPES.get(number as usize).copied().filter(|n| !n.is_empty());
    if name == Some("I32") {
        return Ok((NumberFormat::F32, true));
    }
    let kind = name.and_then(|n| n.parse().ok()).ok_or_else(|| {
        let name = name.map_or_else(|| format!("the unknown type {number}"), |n| format!("type {n}"));
        let supported = NumberFormat::names(|_| true).to_uppercase();
        let what = format!("has the tensor '{tensor}' of {name}; supported: {supported}");
        StoreError::new(StoreErrorKind::Unsupported, cursor.file().path(), what)
    });
    Ok((kind?, false))
}

fn alignment(metadata: &Metadata) -> Result<u64> {
    let alignment = metadata.uint("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() {
        Ok(alignment)
    } else {
        Err(StoreError::malformed(metadata.path(), format!("is aligned to {alignment}, not a power of two")))
    }
}

/// Makes offsets relative to the start of the file, and checks that ranges lie inside the file without overlaps.
fn place(file: &ReadAt, header: u64, alignment: u64, tensors: &mut [GgufTensor]) -> Result<()> {
    let bad = |what: String| StoreError::malformed(file.path(), what);
    let data = header.checked_next_multiple_of(alignment);
    for tensor in tensors.iter_mut() {
        let GgufTensor { name, meta, offset, .. } = tensor;
        if !offset.is_multiple_of(alignment) {
            return Err(bad(format!(
                "has the tensor '{name}' at offset {offset}, which is not a multiple of {alignment}"
            )));
        }
        let start = data.and_then(|d| d.checked_add(*offset));
        *offset = start.filter(|s| s.checked_add(meta.bytes as u64).is_some_and(|end| end <= file.len())).ok_or_else(
            || {
                bad(format!(
                    "is {} bytes long and ends before the end of its tensor '{name}' of {} bytes",
                    file.len(),
                    meta.bytes
                ))
            },
        )?;
    }
    let mut names = HashMap::new();
    if let Some(twice) = tensors.iter().find(|t| names.insert(t.name.as_str(), ()).is_some()) {
        return Err(bad(format!("has the tensor '{}' twice", twice.name)));
    }
    let mut order: Vec<&GgufTensor> = tensors.iter().collect();
    order.sort_by_key(|t| t.offset);
    match order.windows(2).find(|pair| pair[0].offset + pair[0].meta.bytes as u64 > pair[1].offset) {
        Some(pair) => Err(bad(format!("has the overlapping tensors '{}' and '{}'", pair[0].name, pair[1].name))),
        None => Ok(()),
    }
}
