//! A folder of routing traces in the format published for gpt-oss: `index.json`, and for each sequence a safetensors
//! file with `expert_ids [tokens, layers, k]` and optionally `weights`.

use std::fs;
use std::path::{Component, Path, PathBuf};

use half::f16;
use larder_core::{Trace, TraceToken};
use larder_os::read_regular;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::ImportOptions;
use crate::LabError;

/// Limit of the index's size.
const INDEX_MAX: u64 = 64 << 20;

#[derive(serde::Deserialize)]
struct Index {
    layers: usize,
    experts: usize,
    top_k: usize,
    sequences: Vec<Sequence>,
    model: Option<String>,
    source: Option<String>,
    license: Option<String>,
    note: Option<String>,
}

#[derive(serde::Deserialize)]
struct Sequence {
    file: PathBuf,
    #[serde(default)]
    has_repetition: bool,
}

pub(super) fn read(folder: &Path, options: &ImportOptions) -> Result<Trace, LabError> {
    let path = folder.join("index.json");
    let index: Index = serde_json::from_slice(&bytes(&path, INDEX_MAX)?)
        .map_err(|e| LabError::malformed(&path, format!("is not a trace index: {e}")))?;
    let mut trace = Trace::new(index.layers, index.experts, index.top_k);
    for sequence in &index.sequences {
        if options.skip_repetitive && sequence.has_repetition {
            continue;
        }
        let plain = matches!(sequence.file.components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
        if !plain {
            let why = format!("names '{}', which is not a file in the same folder", sequence.file.display());
            return Err(LabError::malformed(&path, why));
        }
        trace.append(&read_sequence(&folder.join(&sequence.file), &index)?)?;
    }
    let facts = [("model", index.model), ("source", index.source), ("license", index.license), ("note", index.note)];
    trace.meta = facts.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
    Ok(trace)
}

fn bytes(path: &Path, limit: u64) -> Result<Vec<u8>, LabError> {
    read_regular(path, limit).map_err(LabError::io(path, "reading"))
}

fn read_sequence(path: &Path, index: &Index) -> Result<Trace, LabError> {
    let length = fs::metadata(path).map_err(LabError::io(path, "opening"))?.len();
    let bytes = bytes(path, length)?;
    let wrong = |why: String| LabError::malformed(path, why);
    let file = SafeTensors::deserialize(&bytes).map_err(|e| wrong(format!("is not a safetensors file: {e}")))?;
    let view = file.tensor("expert_ids").map_err(|_| wrong("has no tensor 'expert_ids'".into()))?;
    let [tokens, layers, k] = *view.shape() else {
        return Err(wrong(format!("has 'expert_ids' of shape {:?}, not [tokens, layers, k]", view.shape())));
    };
    if (layers, k) != (index.layers, index.top_k) {
        let want = (index.layers, index.top_k);
        return Err(wrong(format!("has {k} experts in {layers} layers, but its index says {} in {}", want.1, want.0)));
    }
    let ids = integers(&view).ok_or_else(|| wrong("has an invalid expert id".into()))?;
    let weights = match file.tensor("weights") {
        Ok(weights) if weights.shape() == view.shape() => halves(&weights),
        _ => Vec::new(),
    };
    let tokens = u32::try_from(tokens).map_err(|_| wrong("has too many tokens".into()))?;
    let sequence = Trace {
        ids,
        weights,
        origins: vec![TraceToken { sequence: 0, decode: true }; tokens as usize],
        passes: vec![1; tokens as usize],
        sequences: vec![tokens],
        ..Trace::new(layers, index.experts, k)
    };
    sequence.check().map_err(|e| wrong(e.to_string().trim_start_matches("the trace ").to_owned()))?;
    Ok(sequence)
}

/// Expert ids as `u16`; `None` if one is out of range or the type is not supported.
fn integers(view: &TensorView) -> Option<Vec<u16>> {
    let data = view.data();
    let below = |n: i64| u16::try_from(n).ok();
    match view.dtype() {
        Dtype::U8 => Some(data.iter().map(|b| u16::from(*b)).collect()),
        Dtype::U16 => Some(data.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect()),
        Dtype::I32 => data.as_chunks().0.iter().map(|b| below(i32::from_le_bytes(*b).into())).collect(),
        Dtype::I64 => data.as_chunks().0.iter().map(|b| below(i64::from_le_bytes(*b))).collect(),
        _ => None,
    }
}

/// Weights as f16; types other than f16 and f32 are ignored.
fn halves(view: &TensorView) -> Vec<f16> {
    let data = view.data();
    match view.dtype() {
        Dtype::F16 => data.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect(),
        Dtype::F32 => data.as_chunks().0.iter().map(|b| f16::from_f32(f32::from_le_bytes(*b))).collect(),
        _ => Vec::new(),
    }
}
