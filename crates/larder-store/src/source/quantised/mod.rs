//! Checkpoints with tensors that are quantised in a form of the hub, or divided into parts, as plain tensors under
//! plain names.
//!
//! The config's `quantization_config` names a method; [`METHODS`] has a row for each, with a file of its own. A method
//! says of which stored tensors each quantised tensor is made ([`Encoding`]). Such a tensor is seen in two ways: in the
//! number format in which it is kept, its exact equivalent where there is one, or widened to f32
//! ([`Source::as_floats`]), from which it can be rounded to any other. Tables in parts ([`joined`]) are found in any
//! checkpoint, also if the parts are quantised.

use std::{collections::BTreeMap, ops::Range, path::Path, sync::Arc};

use half::f16;
use larder_core::{ExpertNames, NumberFormat, TensorMeta, TensorRows, Tensors, TensorsError};
use serde_json::Value;

use super::{Checkpoint, Source, SourceFile, TowerSource, config_json::text_value};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::checksum::checksum_of,
    source::identity::sampled,
};

mod awq;
mod compressed_tensors;
mod fp8;
mod gptq;
mod joined;
mod mlx;
mod modelopt;
mod mxfp4;
mod nibbles;
mod nvfp4;
mod packed_integers;
#[cfg(test)]
mod tests;

/// The key of the config.
const KEY: &str = "quantization_config";
/// The key of MLX, which has the other one too, but not always.
const MLX_KEY: &str = "quantization";
/// Values that are converted at a time.
const STEP: usize = 1 << 18;

/// One method of quantisation.
struct Method {
    /// `quant_method` in the config.
    name: &'static str,
    /// Finds the quantised tensors of a checkpoint; the second argument is its `quantization_config`.
    find: fn(&Checkpoint, &Value) -> Result<Found>,
}

const METHODS: [Method; 7] = [
    Method { name: "mxfp4", find: mxfp4::find },
    Method { name: "fp8", find: fp8::find },
    Method { name: "compressed-tensors", find: compressed_tensors::find },
    Method { name: "gptq", find: gptq::find },
    Method { name: "awq", find: awq::find },
    Method { name: "mlx", find: mlx::find },
    Method { name: "modelopt", find: modelopt::find },
];

/// What a method finds in a checkpoint.
#[derive(Default)]
struct Found {
    /// Quantised tensors by their plain names.
    tensors: BTreeMap<String, PackedTensor>,
    /// Where the experts are, if not where the architecture has them.
    experts: Option<ExpertNames>,
}

/// A quantised tensor.
struct PackedTensor {
    /// As it is kept.
    kept: TensorMeta,
    /// Widened to f32.
    floats: TensorMeta,
    encoding: Box<dyn Encoding>,
}

/// How the values of a tensor are stored.
trait Encoding: Send + Sync {
    /// The number format in which the tensor is kept.
    fn kind(&self) -> NumberFormat;

    /// The names of the stored tensors that it is made of.
    fn parts(&self) -> Vec<&str>;

    /// Writes the values from value `first` on.
    ///
    /// The caller guarantees that they exist, that there is at least one, and that `first` and the length are whole
    /// blocks of [`kind`](Self::kind).
    fn widen(&self, from: &Checkpoint, first: usize, out: &mut [f32]) -> Result<()>;

    /// Writes the blocks of [`kind`](Self::kind) from value `first` on, under the conditions of [`widen`](Self::widen).
    fn keep(&self, from: &Checkpoint, first: usize, out: &mut [u8]) -> Result<()>;

    /// The ranges of bytes of the stored tensors that only these values need.
    fn ranges(&self, values: Range<usize>) -> Vec<(&str, Range<usize>)>;

    /// Values that are converted at a time: whole blocks of [`kind`](Self::kind).
    fn step(&self) -> usize {
        STEP
    }

    /// Whether [`keep`](Self::keep) rounds the values.
    fn rounds(&self) -> bool {
        false
    }
}

impl PackedTensor {
    /// A tensor called `name`; refused if its rows are not whole blocks of the format in which it is kept.
    fn new(from: &Checkpoint, name: &str, shape: Vec<usize>, encoding: Box<dyn Encoding>) -> Result<Self> {
        let metas = [encoding.kind(), NumberFormat::F32].map(|kind| TensorMeta::new(kind, shape.clone()));
        let [Some(kept), Some(floats)] = metas else {
            let what = format!("has the tensor '{name}' of shape {shape:?}, which {} cannot hold", encoding.kind());
            return Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
        };
        Ok(PackedTensor { kept, floats, encoding })
    }
}

/// `checkpoint` with plain tensors under plain names, in whatever form they are stored.
pub fn plain(checkpoint: Checkpoint) -> Result<Box<dyn Source>> {
    let mut found = quantised(&checkpoint)?;
    joined::join(&checkpoint, &mut found)?;
    if found.tensors.is_empty() {
        Ok(Box::new(checkpoint))
    } else {
        Ok(Box::new(QuantisedCheckpoint::new(checkpoint, found)))
    }
}

/// The f16 that is exactly this scale or bias of the tensor `name`, which is kept in the format `kind`.
fn exact_half(from: &Checkpoint, name: &str, value: f32, kind: NumberFormat) -> Result<f16> {
    let half = f16::from_f32(value);
    if half.to_f32() == value {
        return Ok(half);
    }
    let what = format!(
        "tensor '{name}' holds the scale {value:e}, which the f16 scales of {kind} cannot hold; convert to bf16 or \
         another format instead of keeping it"
    );
    Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what))
}

/// What the method that the config names finds; nothing if it names none.
fn quantised(checkpoint: &Checkpoint) -> Result<Found> {
    let keys = [KEY, MLX_KEY].map(|key| text_value(checkpoint.config(), key));
    let in_config = keys.into_iter().find(|value| !value.is_null()).cloned();
    let quantised = match in_config {
        Some(quantised) => Some(quantised),
        None => modelopt::config_beside(checkpoint)?,
    };
    let Some(quantised) = &quantised else { return Ok(Found::default()) };
    if *quantised == Value::Bool(false) {
        return Ok(Found::default());
    }
    let name = method_name(quantised);
    let method = METHODS.iter().find(|method| method.name == name).ok_or_else(|| {
        let known: Vec<_> = METHODS.iter().map(|method| method.name).collect();
        let what = format!(
            "is quantised by the method '{name}', which is not supported; supported are {}, unquantised checkpoints and \
             GGUF files",
            known.join(", ")
        );
        StoreError::new(StoreErrorKind::Unsupported, checkpoint.path(), what)
    })?;
    let found = (method.find)(checkpoint, quantised)?;
    if found.tensors.is_empty() {
        let what = format!("names the quantisation method {name}, but has no tensor that is quantised so");
        return Err(StoreError::new(StoreErrorKind::Missing, checkpoint.path(), what));
    }
    Ok(found)
}

/// The method of a `quantization_config`. MLX names none, and AutoRound the form in which it stores.
fn method_name(quantised: &Value) -> &str {
    let text = |key: &str| quantised[key].as_str().unwrap_or_default();
    match text("quant_method") {
        "" if quantised["bits"].is_u64() && quantised["group_size"].is_u64() => "mlx",
        "auto-round" => match text("packing_format") {
            "auto_round:auto_gptq" => "gptq",
            "auto_round:auto_awq" => "awq",
            _ => "auto-round",
        },
        name => name,
    }
}

/// Removes [`KEY`] and [`MLX_KEY`] from a config and from those that are nested in it.
fn remove_keys(config: &mut Value) {
    let Some(config) = config.as_object_mut() else { return };
    config.retain(|key, _| ![KEY, MLX_KEY].contains(&key.as_str()));
    for nest in ["thinker_config", "text_config"] {
        config.get_mut(nest).into_iter().for_each(remove_keys);
    }
}

/// A checkpoint with tensors in other forms, seen in one of the two ways.
struct QuantisedCheckpoint {
    model: Arc<QuantisedModel>,
    /// The same model widened to f32; `None` if this is that view.
    floats: Option<Box<QuantisedCheckpoint>>,
}

struct QuantisedModel {
    stored: Checkpoint,
    /// The config without [`KEY`] and [`MLX_KEY`].
    config: Value,
    found: Found,
    /// Plain names of all tensors, sorted.
    names: Vec<String>,
}

impl QuantisedCheckpoint {
    fn new(stored: Checkpoint, found: Found) -> Self {
        let mut config = stored.config().clone();
        remove_keys(&mut config);
        let parts: std::collections::BTreeSet<&str> =
            found.tensors.values().flat_map(|tensor| tensor.encoding.parts()).collect();
        let others = stored.names().into_iter().filter(|name| !parts.contains(name)).map(str::to_owned);
        let mut names: Vec<String> = others.chain(found.tensors.keys().cloned()).collect();
        names.sort_unstable();
        names.dedup();
        let model = Arc::new(QuantisedModel { stored, config, found, names });
        let floats = QuantisedCheckpoint { model: model.clone(), floats: None };
        QuantisedCheckpoint { model, floats: Some(Box::new(floats)) }
    }

    fn packed(&self, name: &str) -> Option<&PackedTensor> {
        self.model.found.tensors.get(name)
    }

    fn meta_of<'a>(&self, tensor: &'a PackedTensor) -> &'a TensorMeta {
        if self.floats.is_some() { &tensor.kept } else { &tensor.floats }
    }

    /// Writes whole blocks from byte `offset` on, a few at a time.
    fn read_blocks(&self, name: &str, tensor: &PackedTensor, offset: usize, into: &mut [u8]) -> Result<()> {
        let meta = self.meta_of(tensor);
        let (len, bytes) = (meta.kind.block_len(), meta.kind.block_bytes());
        let mut first = offset / bytes * len;
        for piece in into.chunks_mut(tensor.encoding.step() / len * bytes) {
            match self.floats {
                Some(_) => tensor.encoding.keep(&self.model.stored, first, piece)?,
                None => self.widen(name, tensor, first, piece)?,
            }
            first += piece.len() / bytes * len;
        }
        Ok(())
    }

    fn widen(&self, name: &str, tensor: &PackedTensor, first: usize, into: &mut [u8]) -> Result<()> {
        // An encoding may need whole blocks of the kept format.
        let block = tensor.kept.kind.block_len();
        let (begin, end) = (first / block * block, (first + into.len() / 4).next_multiple_of(block));
        let mut values = vec![0.0; end - begin];
        tensor.encoding.widen(&self.model.stored, begin, &mut values)?;
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            let what = format!("tensor '{name}' holds the value {value}");
            return Err(StoreError::malformed(self.path(), what));
        }
        into.as_chunks_mut().0.iter_mut().zip(&values[first - begin..]).for_each(|(o, v)| *o = v.to_le_bytes());
        Ok(())
    }
}

impl Tensors for QuantisedCheckpoint {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        match self.packed(name) {
            Some(tensor) => Some(self.meta_of(tensor)),
            None => self.model.stored.meta(name),
        }
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        let Some(tensor) = self.packed(name) else { return self.model.stored.read(name, offset, into) };
        let block = self.meta_of(tensor).kind.block_bytes();
        let (begin, end) = (offset / block * block, (offset + into.len()).next_multiple_of(block));
        if (begin, end) == (offset, offset + into.len()) {
            return Ok(self.read_blocks(name, tensor, offset, into)?);
        }
        let mut blocks = vec![0; end - begin];
        self.read_blocks(name, tensor, begin, &mut blocks)?;
        into.copy_from_slice(&blocks[offset - begin..][..into.len()]);
        Ok(())
    }

    fn rows(&self, name: &str) -> Option<Arc<dyn TensorRows>> {
        let stored = &self.model.stored;
        match self.packed(name) {
            Some(tensor) => {
                let meta = tensor.kept.clone();
                let readable = self.floats.is_some() && meta.shape.len() == 2 && meta.bytes > 0;
                readable.then(|| Arc::new(PackedRows { model: self.model.clone(), name: name.to_owned(), meta }) as _)
            }
            None => stored.rows(name),
        }
    }
}

/// The rows of a matrix in another form, as they are kept.
struct PackedRows {
    model: Arc<QuantisedModel>,
    name: String,
    meta: TensorMeta,
}

impl TensorRows for PackedRows {
    fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    fn read_rows(&self, rows: &[usize], into: &mut [u8]) -> Result<(), TensorsError> {
        let [all, cols] = self.meta.shape[..] else { unreachable!("the shape was checked") };
        let PackedRows { model, name, meta } = self;
        if let Some(row) = rows.iter().find(|row| **row >= all) {
            return Err(TensorsError(format!("{}: has no row {row} of '{name}'", model.stored.path().display())));
        }
        let encoding = &model.found.tensors[name].encoding;
        for (row, into) in rows.iter().zip(into.chunks_exact_mut(meta.bytes / all)) {
            encoding.keep(&model.stored, row * cols, into)?;
        }
        Ok(())
    }
}

impl Source for QuantisedCheckpoint {
    fn config(&self) -> &Value {
        &self.model.config
    }

    fn names(&self) -> Vec<&str> {
        self.model.names.iter().map(String::as_str).collect()
    }

    fn expert_names(&self) -> Option<ExpertNames> {
        self.model.found.experts.clone()
    }

    fn unsupported_dtype(&self, name: &str) -> Option<&str> {
        if self.packed(name).is_some() { None } else { self.model.stored.unsupported_dtype(name) }
    }

    fn as_floats(&self) -> Option<&dyn Source> {
        self.floats.as_deref().map(|floats| floats as &dyn Source)
    }

    fn sidecar(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.model.stored.sidecar(name)
    }

    /// Towers are not quantised.
    fn tower(&self) -> Result<Option<TowerSource>> {
        self.model.stored.tower()
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.model.stored.notes();
        if let Some(rounded) = self.model.found.tensors.values().find(|tensor| tensor.encoding.rounds()) {
            let kind = rounded.kept.kind;
            notes.push(format!("some quantised weights are rounded to {kind} where no other format is asked for"));
        }
        notes
    }

    fn path(&self) -> &Path {
        self.model.stored.path()
    }

    fn use_direct_io(&self) {
        self.model.stored.use_direct_io();
    }

    fn download_rank(&self, name: &str) -> Option<usize> {
        match self.packed(name) {
            Some(tensor) => {
                tensor.encoding.parts().into_iter().filter_map(|part| self.model.stored.download_rank(part)).max()
            }
            None => self.model.stored.download_rank(name),
        }
    }

    fn release(&self, name: &str, offset: usize, bytes: usize) -> Result<()> {
        let Some(tensor) = self.packed(name) else { return self.model.stored.release(name, offset, bytes) };
        let kind = self.meta_of(tensor).kind;
        let value = |at: usize| at / kind.block_bytes() * kind.block_len();
        let ranges = tensor.encoding.ranges(value(offset)..value(offset + bytes));
        ranges.into_iter().try_for_each(|(part, range)| self.model.stored.release(part, range.start, range.len()))
    }

    /// The digest of such a tensor is that of the stored tensors, whatever it is converted to.
    fn samples(&self, name: &str) -> Result<Option<String>> {
        let Some(tensor) = self.packed(name) else { return self.model.stored.samples(name) };
        let stored = &self.model.stored;
        let of_part = |part: &str| match stored.samples(part)? {
            Some(taken) => Ok(taken),
            None => sampled(stored.stored(part)?.bytes, |offset, into| Ok(stored.read(part, offset, into)?)),
        };
        let digests = tensor.encoding.parts().into_iter().map(of_part).collect::<Result<Vec<_>>>()?;
        Ok(Some(checksum_of(digests.concat().as_bytes())))
    }

    fn published(&self) -> Option<String> {
        self.model.stored.published()
    }

    fn files(&self) -> Vec<SourceFile> {
        self.model.stored.files()
    }

    fn fingerprint(&self) -> u64 {
        self.model.stored.fingerprint()
    }
}
