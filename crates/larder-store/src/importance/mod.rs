//! Importance matrices: how large the inputs of each weight matrix are, measured on a text.
//!
//! A product with a column of large inputs is wrong by more where that column is rounded badly, so conversion weighs
//! the errors of each column by the mean square of its inputs.

mod file;
mod gguf_file;
mod weighed;

use std::{collections::BTreeMap, path::Path};

use larder_core::LayerIdx;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::{error::Result, format_mix::expert_matrix, source::gguf_names};

/// Tokens for which the other experts of the layer count in the mean squares of an expert. Those of an expert that saw
/// a few tokens are far from what more tokens would give, and columns that happened to be zero would count for nothing.
const PRIOR_TOKENS: f32 = 8.0;

/// Mean squares of the inputs of each weight matrix, measured on a text.
///
/// A resident weight has the name of the hub, such as `model.layers.0.self_attn.q_proj.weight`; the matrices of the
/// experts are called `layers.3.experts.down`, or `gate` or `up`, as in a [`FormatMix`](crate::FormatMix).
#[derive(Clone, PartialEq, Debug)]
pub struct Importance {
    /// Names of the texts.
    texts: Vec<String>,
    chunk_tokens: usize,
    chunks: usize,
    /// By the names of GGUF, or the given names of matrices for which GGUF has none.
    matrices: BTreeMap<String, SquareSums>,
}

/// What a manifest says of an importance matrix.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportanceRecord {
    /// Names of the texts that it was measured on, without folders.
    pub texts: Vec<String>,
    /// Its [digest](Importance::digest).
    pub digest: String,
}

/// Sums of squared inputs.
#[derive(Clone, PartialEq, Debug)]
struct SquareSums {
    /// `[experts, columns]`; one expert for a resident weight.
    sums: Vec<f32>,
    /// The tokens that each expert saw.
    counts: Vec<f32>,
}

impl SquareSums {
    fn columns(&self) -> usize {
        self.sums.len() / self.counts.len()
    }

    fn of_expert(&self, expert: usize) -> Option<(&[f32], f32)> {
        Some((self.sums.chunks_exact(self.columns()).nth(expert)?, *self.counts.get(expert)?))
    }

    /// The mean squares over all experts; `None` if there were no tokens.
    fn mean(&self) -> Option<Vec<f32>> {
        let tokens: f32 = self.counts.iter().sum();
        let mut mean = vec![0.0; self.columns()];
        for sums in self.sums.chunks_exact(self.columns()) {
            mean.iter_mut().zip(sums).for_each(|(mean, sum)| *mean += sum / tokens);
        }
        (tokens > 0.0).then_some(mean)
    }
}

impl Importance {
    /// Without matrices yet, to be measured on `text` in chunks of `chunk_tokens` tokens.
    pub fn new(text: String, chunk_tokens: usize) -> Self {
        Importance { texts: vec![text], chunk_tokens, chunks: 0, matrices: BTreeMap::new() }
    }

    /// Reads llama.cpp's importance matrix in GGUF. A file in the older format of llama.cpp is refused.
    pub fn read(path: &Path) -> Result<Self> {
        file::read(path)
    }

    /// Writes the file that [`read`](Self::read) reads, and llama.cpp as well. Matrices for which GGUF has no name keep
    /// theirs.
    pub fn write(&self, path: &Path) -> Result<()> {
        file::write(self, path)
    }

    /// Adds a matrix: for each expert and column the sum of the squared inputs, and for each expert the number of
    /// tokens that it saw. A resident weight counts as one expert. A matrix of the same name is replaced.
    ///
    /// The caller guarantees at least one column, as many columns for each expert, and sums and counts that are finite
    /// and not negative.
    pub fn insert(&mut self, name: &str, sums: Vec<f32>, counts: Vec<f32>) {
        let whole = !sums.is_empty() && !counts.is_empty() && sums.len().is_multiple_of(counts.len());
        assert!(whole, "{name}: {} sums are not those of {} experts", sums.len(), counts.len());
        let stored = stored_names(name).into_iter().next().unwrap_or_else(|| name.to_owned());
        self.matrices.insert(stored, SquareSums { sums, counts });
    }

    /// States on how many chunks the matrices were measured.
    pub fn set_chunks(&mut self, chunks: usize) {
        self.chunks = chunks;
    }

    /// On how many chunks the matrices were measured.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// The number of matrices; those of all experts of a layer count as one.
    pub fn len(&self) -> usize {
        self.matrices.len()
    }

    /// Whether there is no matrix.
    pub fn is_empty(&self) -> bool {
        self.matrices.is_empty()
    }

    /// Experts and columns of a matrix, by the name that [`insert`](Self::insert) takes.
    pub fn shape(&self, name: &str) -> Option<(usize, usize)> {
        self.find(name).map(|found| (found.counts.len(), found.columns()))
    }

    /// The mean square of each input of a resident weight; `None` if it was not measured.
    pub fn of(&self, name: &str) -> Option<Vec<f32>> {
        self.find(name)?.mean()
    }

    /// The mean square of each input of an expert's matrix `part` (gate, up or down); `None` if nothing is known of
    /// them.
    ///
    /// In gate and up, which have the same inputs in every expert, the mean over all experts of the layer counts as
    /// much as eight tokens. It is all that is known of an expert that saw no token. In down, whose inputs are each
    /// expert's own, it is the expert's mean over its columns that counts as eight tokens, and nothing is known of an
    /// expert that saw none.
    pub fn of_expert(&self, layer: LayerIdx, part: &str, expert: usize) -> Option<Vec<f32>> {
        let found = self.find(&expert_matrix(layer, part))?;
        let (sums, count) = found.of_expert(expert)?;
        let columns = sums.len();
        let expected = match part {
            "down" if count == 0.0 => return None,
            "down" => vec![sums.iter().sum::<f32>() / (count * columns as f32); columns],
            _ => found.mean()?,
        };
        let tokens = count + PRIOR_TOKENS;
        Some(sums.iter().zip(expected).map(|(sum, expected)| (sum + PRIOR_TOKENS * expected) / tokens).collect())
    }

    /// A digest of all sums and counts.
    pub fn digest(&self) -> String {
        let mut hash = XxHash3_128::new();
        for (name, SquareSums { sums, counts }) in &self.matrices {
            hash.write(&(name.len() as u64).to_le_bytes());
            hash.write(name.as_bytes());
            for values in [counts, sums] {
                hash.write(&(values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| hash.write(&value.to_le_bytes()));
            }
        }
        format!("{:032x}", hash.finish_128())
    }

    /// What a manifest says of it.
    pub fn record(&self) -> ImportanceRecord {
        let bare = |text: &String| text.rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
        ImportanceRecord { texts: self.texts.iter().map(bare).collect(), digest: self.digest() }
    }

    fn find(&self, name: &str) -> Option<&SquareSums> {
        self.matrices.get(name).or_else(|| stored_names(name).iter().find_map(|stored| self.matrices.get(stored)))
    }
}

/// The names in a file of the matrix `name`, the preferred one first; none if GGUF has none.
fn stored_names(name: &str) -> Vec<String> {
    let expert = name.strip_prefix("layers.").and_then(|rest| rest.split_once(".experts."));
    match expert {
        Some((layer, part)) => {
            let joined = (part != "down").then(|| format!("blk.{layer}.ffn_gate_up_exps.weight"));
            [format!("blk.{layer}.ffn_{part}_exps.weight")].into_iter().chain(joined).collect()
        }
        None => gguf_names(name),
    }
}

pub(crate) use weighed::WeighedMatrices;

#[cfg(test)]
mod tests;
