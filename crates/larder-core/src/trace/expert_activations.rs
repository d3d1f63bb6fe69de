//! Statistics of a trace: how often experts are chosen, and which of them by the same token.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use larder_os::{read_regular, write_atomically};

use crate::{EXPERTS_MAX, Geometry, Trace};

const VERSION: u32 = 1;
/// Maximum length of a file.
const BYTES_MAX: u64 = 256 << 20;

/// Experts of one layer that a token chose together, ascending, and the number of tokens that did.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Coactivation(pub Vec<u16>, pub u64);

/// How often the experts of a model are chosen, alone and together; input of placement.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertActivations {
    version: u32,
    /// Name of the model.
    pub model: String,
    /// Sizes of the model.
    pub geometry: Geometry,
    /// Bytes of one expert as it is stored.
    pub expert_bytes: u64,
    /// Tokens that were counted.
    pub tokens: u64,
    /// The coactivations of each MoE layer.
    pub layers: Vec<Vec<Coactivation>>,
}

/// Why statistics cannot be counted, read or written.
#[derive(Debug, thiserror::Error)]
pub enum ExpertActivationsError {
    /// The file cannot be read or written, or is not a file of statistics.
    #[error("{} {why}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The trace was recorded with another model.
    #[error(
        "the trace is of another model: it chooses {} of {} experts in {} layers, and {model} chooses {} of {} in {}",
        trace_shape[2], trace_shape[1], trace_shape[0], model_shape[2], model_shape[1], model_shape[0]
    )]
    Foreign {
        /// Name of the model.
        model: String,
        /// Layers, experts and experts per token of the model.
        model_shape: [usize; 3],
        /// Layers, experts and experts per token of the trace.
        trace_shape: [usize; 3],
    },
    /// The trace has no tokens to count.
    #[error("the trace has no generated tokens")]
    Nothing,
}

impl ExpertActivations {
    /// Counts the choices of a trace of the model; with `decode_only`, only those of generated tokens.
    pub fn count(
        trace: &Trace,
        model: &str,
        geometry: &Geometry,
        expert_bytes: u64,
        decode_only: bool,
    ) -> Result<Self, ExpertActivationsError> {
        let model_shape = [geometry.moe_layers.len(), geometry.experts, geometry.top_k];
        let trace_shape = [trace.rows, trace.experts, trace.top_k];
        if model_shape != trace_shape {
            return Err(ExpertActivationsError::Foreign { model: model.to_owned(), model_shape, trace_shape });
        }
        let mut layers = vec![BTreeMap::<Vec<u16>, u64>::new(); trace.rows];
        let counted = (0..trace.tokens()).filter(|token| !decode_only || trace.origins[*token].decode);
        let mut tokens = 0;
        for token in counted {
            tokens += 1;
            for (row, counts) in layers.iter_mut().enumerate() {
                let mut group = trace.chosen(token, row).to_vec();
                group.sort_unstable();
                *counts.entry(group).or_default() += 1;
            }
        }
        if tokens == 0 {
            return Err(ExpertActivationsError::Nothing);
        }
        let listed = |counts: BTreeMap<Vec<u16>, u64>| counts.into_iter().map(|(e, n)| Coactivation(e, n)).collect();
        let layers = layers.into_iter().map(listed).collect();
        let (model, geometry) = (model.to_owned(), geometry.clone());
        Ok(ExpertActivations { version: VERSION, model, geometry, expert_bytes, tokens, layers })
    }

    /// Reads a file and checks all of it.
    pub fn read(path: &Path) -> Result<Self, ExpertActivationsError> {
        let wrong = |why: String| ExpertActivationsError::File { path: path.to_owned(), why };
        let bytes = read_regular(path, BYTES_MAX).map_err(|e| wrong(format!("cannot be read: {e}")))?;
        let all: ExpertActivations = serde_json::from_slice(&bytes)
            .map_err(|e| wrong(format!("is not what `larder lab activations` writes: {e}")))?;
        all.check().map_err(wrong)?;
        Ok(all)
    }

    /// Writes a file atomically: it appears whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), ExpertActivationsError> {
        let wrong = |e: std::io::Error| ExpertActivationsError::File {
            path: path.to_owned(),
            why: format!("cannot be written: {e}"),
        };
        let text = serde_json::to_string(self).expect("names and numbers serialize as JSON");
        write_atomically(path, |out| writeln!(out, "{text}")).map_err(wrong)
    }

    fn check(&self) -> Result<(), String> {
        let Geometry { layers, moe_layers, experts, top_k, hidden, inter, .. } = &self.geometry;
        if self.version != VERSION {
            return Err(format!("has version {}; this larder reads version {VERSION}", self.version));
        }
        let sizes = [("experts", *experts), ("top_k", *top_k), ("hidden", *hidden), ("inter", *inter)];
        if let Some((name, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(format!("has a geometry in which '{name}' is 0"));
        }
        if self.expert_bytes == 0 || self.tokens == 0 {
            return Err("has an expert_bytes or tokens of 0".into());
        }
        if *layers > u16::MAX as usize || *experts >= u16::MAX as usize {
            return Err(format!("has a geometry of {layers} layers and {experts} experts, which is too large"));
        }
        if top_k > experts || moe_layers.len().checked_mul(*experts).is_none_or(|n| n > EXPERTS_MAX) {
            return Err(format!(
                "has an invalid geometry: {top_k} of {experts} experts in {} layers",
                moe_layers.len()
            ));
        }
        let ordered = moe_layers.windows(2).all(|pair| pair[0] < pair[1]);
        if !ordered || moe_layers.last().is_none_or(|last| last.index() >= *layers) {
            return Err("has a geometry whose MoE layers are not an ascending list of its layers".into());
        }
        if self.layers.len() != moe_layers.len() {
            return Err(format!("counts {} of {} MoE layers", self.layers.len(), moe_layers.len()));
        }
        self.layers
            .iter()
            .zip(moe_layers)
            .try_for_each(|(groups, layer)| self.check_layer(groups).map_err(|why| format!("has {why} in {layer}")))
    }

    fn check_layer(&self, groups: &[Coactivation]) -> Result<(), String> {
        let mut tokens = 0u64;
        for Coactivation(experts, count) in groups {
            let ascending = experts.windows(2).all(|pair| pair[0] < pair[1]);
            let known = experts.last().is_some_and(|last| (*last as usize) < self.geometry.experts);
            if !ascending || !known || experts.len() > self.geometry.top_k {
                return Err(format!("an invalid group {experts:?}"));
            }
            tokens = tokens.saturating_add(*count);
        }
        if tokens == self.tokens { Ok(()) } else { Err(format!("{tokens} tokens instead of {}", self.tokens)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LayerIdx, TracePass};

    fn geometry() -> Geometry {
        let moe_layers = vec![LayerIdx(1), LayerIdx(3)];
        Geometry { layers: 4, moe_layers, experts: 4, top_k: 2, hidden: 8, inter: 4, bias: false }
    }

    fn trace() -> Trace {
        let mut trace = Trace::new(2, 4, 2);
        // A prompt of two tokens, then a token.
        trace.push(&TracePass { ids: &[1, 0, 3, 2, 0, 1, 2, 0], ..TracePass::default() }).unwrap();
        trace.push(&TracePass { ids: &[3, 0, 2, 3], ..TracePass::default() }).unwrap();
        trace
    }

    #[test]
    fn groups_are_counted_regardless_of_rank() {
        let all = ExpertActivations::count(&trace(), "m", &geometry(), 100, false).unwrap();
        assert_eq!(all.layers[0], [Coactivation(vec![0, 1], 2), Coactivation(vec![0, 3], 1)]);
        assert_eq!(all.layers[1], [Coactivation(vec![0, 2], 1), Coactivation(vec![2, 3], 2)]);
        let written = ExpertActivations::count(&trace(), "m", &geometry(), 100, true).unwrap();
        assert_eq!((written.tokens, &written.layers[0]), (1, &vec![Coactivation(vec![0, 3], 1)]));
    }

    #[test]
    fn a_trace_of_another_model_is_refused() {
        let other = Geometry { experts: 8, ..geometry() };
        let error = ExpertActivations::count(&trace(), "m", &other, 100, false).unwrap_err().to_string();
        assert!(error.contains("2 of 4 experts in 2 layers, and m chooses 2 of 8 in 2"), "{error}");
        let prompt = trace().select(0..1);
        let (ids, origins) = (prompt.ids[..8].to_vec(), prompt.origins[..2].to_vec());
        let only = Trace { ids, origins, passes: vec![2], sequences: vec![2], ..prompt };
        assert!(ExpertActivations::count(&only, "m", &geometry(), 100, true).is_err());
    }

    #[test]
    fn a_written_file_reads_back_and_a_damaged_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let all = ExpertActivations::count(&trace(), "m", &geometry(), 100, false).unwrap();
        all.write(&path).unwrap();
        assert_eq!(ExpertActivations::read(&path).unwrap(), all);
        let good = std::fs::read_to_string(&path).unwrap();
        for (from, to, why) in [
            ("\"version\":1", "\"version\":2", "version 2"),
            ("[[0,1],2]", "[[1,0],2]", "invalid group"),
            ("[[0,1],2]", "[[0,4],2]", "invalid group"),
            ("[[0,1],2]", "[[0,1],3]", "4 tokens instead of 3 in layer 1"),
            ("\"experts\":4", "\"experts\":0", "'experts' is 0"),
            ("\"moe_layers\":[1,3]", "\"moe_layers\":[1,4]", "not an ascending list of its layers"),
            ("\"layers\":4", "\"layers\":99999999999", "too large"),
            ("{", "", "is not what"),
        ] {
            assert!(good.contains(from), "{from}");
            std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
            let error = ExpertActivations::read(&path).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("a.json"), "{error}");
        }
    }
}
