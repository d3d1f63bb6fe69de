//! Headers of safetensors files: parses untrusted headers without the data, and writes headers.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    path::Path,
};

use larder_core::{NumberFormat, SHARD_ALIGN};
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::{
    error::{Result, StoreError},
    files::read_at::ReadAt,
};

pub use safetensors::Dtype;

/// The first byte of the data in every shard and row table: their headers are padded to a page.
pub const DATA_START: usize = SHARD_ALIGN;

/// Bytes of the length field before the header.
const PREFIX_BYTES: u64 = 8;
/// Limit of the format for the length of a header.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Largest number of dimensions of a tensor.
const MAX_DIMS: usize = 16;
/// The key of the metadata in a header.
const METADATA: &str = "__metadata__";

/// A tensor of a file, with its range checked against the length of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorEntry {
    /// Type of its values.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub start: u64,
    /// Length in bytes.
    pub bytes: usize,
}

/// A checked header: its tensors cover the data without holes or overlaps, and the data end where the file does.
#[derive(Debug)]
pub struct SafetensorsHeader {
    /// Tensors by name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Metadata of the file.
    pub metadata: BTreeMap<String, String>,
    /// First byte of the data, counted from the start of the file.
    pub data_start: u64,
}

impl SafetensorsHeader {
    /// Reads and checks the header of `file`.
    pub fn read(file: &ReadAt) -> Result<Self> {
        Self::parse(file.path(), file.len(), &Self::read_json(file)?)
    }

    /// Reads the JSON of the header of `file`, after checking its length.
    pub fn read_json(file: &ReadAt) -> Result<Vec<u8>> {
        let mut prefix = [0; PREFIX_BYTES as usize];
        if file.len() < PREFIX_BYTES {
            return Err(StoreError::malformed(
                file.path(),
                format!("is {} bytes long, too short for a safetensors file", file.len()),
            ));
        }
        file.read(0, &mut prefix)?;
        let len = u64::from_le_bytes(prefix);
        if len > MAX_HEADER_BYTES || len > file.len() - PREFIX_BYTES {
            let what = format!("claims a header of {len} bytes in a file of {}", file.len());
            return Err(StoreError::malformed(file.path(), what));
        }
        file.read_vec(PREFIX_BYTES, len)
    }

    /// Checks the header `json` of a file of `len` bytes.
    pub fn parse(path: &Path, len: u64, json: &[u8]) -> Result<Self> {
        let bad = |what: String| StoreError::malformed(path, format!("has a broken header: {what}"));
        let raw: RawHeader = serde_json::from_slice(json).map_err(|e| bad(e.to_string()))?;
        let mut tensors: Vec<_> = raw.tensors.into_iter().collect();
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        let checked = Metadata::new(None, tensors).map_err(|e| bad(e.to_string()))?;
        let data_start = PREFIX_BYTES + json.len() as u64;
        let end = data_start.checked_add(checked.data_len() as u64);
        if end != Some(len) {
            let (want, got) = (checked.data_len(), len.saturating_sub(data_start));
            return Err(bad(format!("it describes {want} bytes of data, but the file holds {got}")));
        }
        let entry = |info: &TensorInfo| TensorEntry {
            dtype: info.dtype,
            shape: info.shape.clone(),
            start: data_start + info.data_offsets.0 as u64,
            bytes: info.data_offsets.1 - info.data_offsets.0,
        };
        let tensors = checked.tensors().into_iter().map(|(name, info)| (name, entry(info))).collect();
        Ok(SafetensorsHeader { tensors, metadata: raw.metadata, data_start })
    }
}

/// The number format of a dtype; `None` if it is not supported for weights.
pub fn kind_of(dtype: Dtype) -> Option<NumberFormat> {
    match dtype {
        Dtype::F32 => Some(NumberFormat::F32),
        Dtype::F16 => Some(NumberFormat::F16),
        Dtype::BF16 => Some(NumberFormat::Bf16),
        _ => None,
    }
}

/// The dtype by which tensors of format `kind` are stored: the same for floats, `U8` for block formats.
pub fn dtype_of(kind: NumberFormat) -> Dtype {
    match kind {
        NumberFormat::F32 => Dtype::F32,
        NumberFormat::F16 => Dtype::F16,
        NumberFormat::Bf16 => Dtype::BF16,
        _ => Dtype::U8,
    }
}

/// Builds a header: tensors in the order of their data, with deterministic output.
#[derive(Default)]
pub struct HeaderWriter {
    metadata: serde_json::Map<String, serde_json::Value>,
    tensors: serde_json::Map<String, serde_json::Value>,
    end: usize,
    pads: usize,
}

impl HeaderWriter {
    /// Adds a metadata entry.
    pub fn describe(&mut self, key: &str, value: impl Into<String>) {
        self.metadata.insert(key.to_owned(), value.into().into());
    }

    /// Appends a tensor of `bytes` bytes.
    pub fn push(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: usize) {
        let offsets = [self.end, self.end + bytes];
        let info = serde_json::json!({ "dtype": format!("{dtype:?}"), "shape": shape, "data_offsets": offsets });
        self.tensors.insert(name.to_owned(), info);
        self.end += bytes;
    }

    /// Fills the gap up to `offset` with a padding tensor, since the format allows no holes.
    pub fn pad_to(&mut self, offset: usize) {
        let gap = offset - self.end;
        if gap > 0 {
            self.push(&format!("{PAD}{}", self.pads), Dtype::U8, &[gap], gap);
            self.pads += 1;
        }
    }

    /// The first bytes of the file, padded with spaces so that the data begin at a multiple of `align`.
    pub fn finish(mut self, align: usize) -> Vec<u8> {
        let mut all = serde_json::Map::new();
        all.insert(METADATA.to_owned(), self.metadata.into());
        all.append(&mut self.tensors);
        let mut bytes = vec![0; PREFIX_BYTES as usize];
        serde_json::to_writer(&mut bytes, &all).expect("text and numbers serialize as JSON");
        bytes.resize(bytes.len().next_multiple_of(align), b' ');
        let len = bytes.len() as u64 - PREFIX_BYTES;
        bytes[..PREFIX_BYTES as usize].copy_from_slice(&len.to_le_bytes());
        bytes
    }
}

/// Prefix of the names of padding tensors.
pub const PAD: &str = "_pad.";

/// A parsed header: names are unique and shapes are short, nothing else is checked yet.
struct RawHeader {
    tensors: HashMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl<'de> de::Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut tensors = HashMap::new();
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            let twice = if name == METADATA {
                metadata.replace(map.next_value::<BTreeMap<String, String>>()?).is_some()
            } else {
                tensors.insert(name.clone(), map.next_value::<RawInfo>()?.0).is_some()
            };
            if twice {
                return Err(de::Error::custom(format_args!("'{name}' occurs twice")));
            }
        }
        Ok(RawHeader { tensors, metadata: metadata.unwrap_or_default() })
    }
}

/// A [`TensorInfo`] whose shape has at most [`MAX_DIMS`] dimensions.
struct RawInfo(TensorInfo);

impl<'de> de::Deserialize<'de> for RawInfo {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Fields {
            dtype: Dtype,
            shape: Shape,
            data_offsets: (usize, usize),
        }
        let Fields { dtype, shape, data_offsets } = Fields::deserialize(d)?;
        Ok(RawInfo(TensorInfo { dtype, shape: shape.0, data_offsets }))
    }
}

struct Shape(Vec<usize>);

impl<'de> de::Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "at most {MAX_DIMS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == MAX_DIMS {
                        return Err(de::Error::invalid_length(MAX_DIMS + 1, &self));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        d.deserialize_seq(Dims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn read(dir: &Path, bytes: &[u8]) -> Result<SafetensorsHeader> {
        let path = dir.join("file.safetensors");
        std::fs::write(&path, bytes).unwrap();
        SafetensorsHeader::read(&ReadAt::open(&path).unwrap())
    }

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    #[test]
    fn a_written_header_round_trips() {
        let mut writer = HeaderWriter::default();
        writer.describe("what", "a test");
        writer.push("b", Dtype::F32, &[3], 12);
        writer.pad_to(64);
        writer.push("a", Dtype::BF16, &[2, 2], 8);
        let mut bytes = writer.finish(4096);
        assert_eq!(bytes.len(), 4096);
        bytes.resize(4096 + 72, 0);
        let dir = tempfile::tempdir().unwrap();
        let header = read(dir.path(), &bytes).unwrap();
        assert_eq!(header.data_start, 4096);
        assert_eq!(header.metadata["what"], "a test");
        assert_eq!(
            header.tensors["a"],
            TensorEntry { dtype: Dtype::BF16, shape: vec![2, 2], start: 4096 + 64, bytes: 8 }
        );
        assert_eq!(header.tensors["_pad.0"].bytes, 52);
        // The reference implementation accepts it too.
        assert_eq!(safetensors::SafeTensors::deserialize(&bytes).unwrap().len(), 3);
    }

    #[test]
    fn hostile_headers_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let info = |shape: &str, from: u64, to: u64| {
            format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
        };
        let one = info("[2]", 0, 8);
        let good = format!(r#"{{"a":{one}}}"#);
        assert!(read(dir.path(), &file(&good, 8)).is_ok());
        let half = "4611686018427387904";
        let hostile = [
            ("empty", vec![]),
            ("short", vec![1, 2, 3]),
            ("length", u64::MAX.to_le_bytes().to_vec()),
            ("beyond", file(&good, 8)[..20].to_vec()),
            ("missing data", file(&good, 7)),
            ("more data", file(&good, 9)),
            ("twice", file(&format!(r#"{{"a":{one},"a":{one}}}"#), 8)),
            ("overlap", file(&format!(r#"{{"a":{one},"b":{}}}"#, info("[2]", 4, 12)), 12)),
            ("hole", file(&format!(r#"{{"a":{one},"b":{}}}"#, info("[2]", 12, 20)), 20)),
            ("backwards", file(&format!(r#"{{"a":{}}}"#, info("[2]", 8, 0)), 8)),
            ("size", file(&format!(r#"{{"a":{}}}"#, info("[3]", 0, 8)), 8)),
            ("overflow", file(&format!(r#"{{"a":{}}}"#, info(&format!("[{half},{half}]"), 0, 8)), 8)),
            ("dims", file(&format!(r#"{{"a":{}}}"#, info(&format!("[{}2]", "1,".repeat(99)), 0, 8)), 8)),
            ("dtype", file(&good.replace("F32", "F99"), 8)),
            ("not a map", file("[]", 0)),
            ("not text", file("{\"\u{1}", 0)),
        ];
        for (name, bytes) in hostile {
            let error = read(dir.path(), &bytes).expect_err(name);
            assert_eq!(error.kind, crate::error::StoreErrorKind::Malformed, "{name}: {error}");
        }
    }
}
