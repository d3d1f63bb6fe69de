//! The file of an importance matrix, in the form of llama.cpp: a GGUF file with two tensors for each matrix.

use std::{collections::BTreeMap, path::Path};

use larder_core::NumberFormat;

use super::{Importance, SquareSums, gguf_file::GgufFile};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::ReadAt,
    source::{GgufHeader, GgufTensor, MAGIC},
};

/// `general.type` of such a file.
const TYPE: &str = "imatrix";
const TYPE_KEY: &str = "general.type";
const TEXTS_KEY: &str = "imatrix.datasets";
const CHUNKS_KEY: &str = "imatrix.chunk_count";
const CHUNK_TOKENS_KEY: &str = "imatrix.chunk_size";
/// End of the name of a tensor of sums, after the name of the matrix.
const SUMS: &str = ".in_sum2";
/// End of the name of a tensor of counts.
const COUNTS: &str = ".counts";

pub fn write(importance: &Importance, path: &Path) -> Result<()> {
    let Importance { texts, chunk_tokens, chunks, matrices } = importance;
    let mut file = GgufFile::default();
    file.text(TYPE_KEY, TYPE);
    file.texts(TEXTS_KEY, texts);
    file.number(CHUNKS_KEY, u32::try_from(*chunks).unwrap_or(u32::MAX));
    file.number(CHUNK_TOKENS_KEY, u32::try_from(*chunk_tokens).unwrap_or(u32::MAX));
    for (name, SquareSums { sums, counts }) in matrices {
        file.tensor(format!("{name}{SUMS}"), counts.len(), sums);
        file.tensor(format!("{name}{COUNTS}"), counts.len(), counts);
    }
    file.write(path)
}

pub fn read(path: &Path) -> Result<Importance> {
    let file = ReadAt::open(path)?;
    if file.len() < 4 || file.read_vec(0, 4)? != MAGIC {
        let what = "is no importance matrix in GGUF; one in llama.cpp's older .dat format becomes one with \
                    `llama-imatrix --in-file OLD.dat --output-format gguf -o NEW.gguf`";
        return Err(StoreError::new(StoreErrorKind::Unsupported, path, what));
    }
    let GgufHeader { metadata, tensors, .. } = GgufHeader::read(&file)?;
    let kind = metadata.text(TYPE_KEY)?;
    if kind != Some(TYPE) {
        let is = kind.map_or_else(|| "states no type".to_owned(), |kind| format!("is of the type '{kind}'"));
        let what = format!("is no importance matrix: it {is}, not '{TYPE}'");
        return Err(StoreError::new(StoreErrorKind::Unsupported, path, what));
    }
    let number = |key| Ok::<_, StoreError>(metadata.uint(key)?.and_then(|n| usize::try_from(n).ok()).unwrap_or(0));
    let importance = Importance {
        texts: metadata.texts(TEXTS_KEY)?.unwrap_or_default().to_vec(),
        chunk_tokens: number(CHUNK_TOKENS_KEY)?,
        chunks: number(CHUNKS_KEY)?,
        matrices: read_matrices(&file, &tensors)?,
    };
    if importance.is_empty() {
        Err(StoreError::new(StoreErrorKind::Missing, path, "holds no importance of any matrix"))
    } else {
        Ok(importance)
    }
}

fn read_matrices(file: &ReadAt, tensors: &[GgufTensor]) -> Result<BTreeMap<String, SquareSums>> {
    let by_name: BTreeMap<&str, &GgufTensor> = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let of_matrix = |name: &str, end: &str| by_name.get(format!("{name}{end}").as_str()).copied();
    let mut matrices = BTreeMap::new();
    for tensor in tensors {
        if let Some(name) = tensor.name.strip_suffix(SUMS) {
            let counts = of_matrix(name, COUNTS).ok_or_else(|| lone(file, &tensor.name, name, COUNTS))?;
            matrices.insert(name.to_owned(), read_matrix(file, tensor, counts)?);
        } else if let Some(name) = tensor.name.strip_suffix(COUNTS)
            && of_matrix(name, SUMS).is_none()
        {
            return Err(lone(file, &tensor.name, name, SUMS));
        }
    }
    Ok(matrices)
}

fn lone(file: &ReadAt, there: &str, matrix: &str, missing: &str) -> StoreError {
    StoreError::new(
        StoreErrorKind::Missing,
        file.path(),
        format!("has the tensor '{there}', but no '{matrix}{missing}'"),
    )
}

fn read_matrix(file: &ReadAt, sums: &GgufTensor, counts: &GgufTensor) -> Result<SquareSums> {
    let found = SquareSums { sums: read_floats(file, sums)?, counts: read_floats(file, counts)? };
    let rows = |shape: &[usize]| shape.split_last().map_or(1, |(_, outer)| outer.iter().product::<usize>());
    if found.counts.is_empty() || rows(&sums.meta.shape) != found.counts.len() {
        let what = format!(
            "has the tensor '{}' with the shape {:?}, but '{}' counts the tokens of {} experts",
            sums.name,
            sums.meta.shape,
            counts.name,
            found.counts.len()
        );
        return Err(StoreError::new(StoreErrorKind::Mismatch, file.path(), what));
    }
    Ok(found)
}

/// Reads a tensor of floats, all of which must be finite and not negative.
fn read_floats(file: &ReadAt, tensor: &GgufTensor) -> Result<Vec<f32>> {
    let bad = |what: String| StoreError::malformed(file.path(), format!("has the tensor '{}' {what}", tensor.name));
    if tensor.meta.kind != NumberFormat::F32 || tensor.integers {
        return Err(bad("in a format other than f32".into()));
    }
    let bytes = file.read_vec(tensor.offset, tensor.meta.bytes as u64)?;
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    match values.iter().find(|value| !value.is_finite() || **value < 0.0) {
        Some(value) => {
            Err(bad(format!("with the value {value}; sums of squares and counts are finite and not negative")))
        }
        None => Ok(values),
    }
}
