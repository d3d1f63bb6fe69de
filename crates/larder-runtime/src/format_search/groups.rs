//! The matrices that get a number format together.

use std::collections::BTreeMap;

use larder_core::{Blueprint, NumberFormat, TensorSpec};
use larder_store::{Assembler, Result, Source};

/// Matrices that are stored in the same number format.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MatrixGroup {
    /// Their names, as the rules of a mix have them.
    pub names: Vec<String>,
    /// Rows and columns of each, those of all experts of a layer together.
    pub shapes: Vec<(usize, usize)>,
    /// Whether they are matrices of experts.
    pub of_experts: bool,
}

impl MatrixGroup {
    /// Number of weights.
    pub fn weights(&self) -> u64 {
        self.shapes.iter().map(|(rows, cols)| (rows * cols) as u64).sum()
    }

    /// Bytes in a number format; `None` if a row is not a number of whole blocks.
    pub fn bytes(&self, kind: NumberFormat) -> Option<u64> {
        self.shapes.iter().map(|(rows, cols)| Some(kind.matrix_bytes(*rows, *cols)? as u64)).sum()
    }
}

/// The groups of a model: gate, up and down of the experts of each layer, and with `resident` also the matrices of each
/// layer's attention and other blocks, and each matrix outside of the layers.
///
/// Routers are in none: they are small, and decide about all others. Matrices that are transposed when they are loaded
/// are in none either, because no quantised form of them stays.
pub fn groups(source: &dyn Source, blueprint: &Blueprint, resident: bool) -> Result<Vec<MatrixGroup>> {
    let experts = blueprint.geometry.experts;
    let assembler = Assembler::new(source, blueprint, None)?;
    let mut groups = Vec::new();
    for (layer, layout) in assembler.layouts() {
        let parts = layout.matrices_and_biases().filter(|(name, _)| !name.ends_with("_bias"));
        groups.extend(parts.map(|(part, matrix)| MatrixGroup {
            names: vec![format!("layers.{}.experts.{part}", layer.0)],
            shapes: vec![(matrix.rows * experts, matrix.cols)],
            of_experts: true,
        }));
    }
    if resident {
        groups.extend(resident_groups(&blueprint.resident, experts, blueprint.vocab));
    }
    Ok(groups)
}

fn resident_groups(specs: &[TensorSpec], experts: usize, vocab: usize) -> impl Iterator<Item = MatrixGroup> {
    let mut groups: BTreeMap<String, BTreeMap<&str, (usize, usize)>> = BTreeMap::new();
    for spec in specs.iter().filter(|spec| (spec.product || spec.by_row) && !spec.by_head) {
        match spec.shape[..] {
            // A table that is larger than an embedding is not held in memory.
            [rows, cols] if rows != experts && (rows == vocab || !spec.by_row) => {
                groups.entry(block_of(&spec.name)).or_default().insert(&spec.name, (rows, cols));
            }
            _ => {}
        }
    }
    groups.into_values().map(|matrices| MatrixGroup {
        names: matrices.keys().map(|name| (*name).to_owned()).collect(),
        shapes: matrices.into_values().collect(),
        of_experts: false,
    })
}

/// The part of a tensor's name up to the number of its layer; the whole name outside of layers.
fn block_of(name: &str) -> String {
    let mut parts = name.split('.');
    let numbered = parts.position(|part| part.parse::<usize>().is_ok());
    numbered.map_or_else(|| name.to_owned(), |at| name.split('.').take(at + 1).collect::<Vec<_>>().join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, shape: &[usize]) -> TensorSpec {
        TensorSpec::new(name, shape, true)
    }

    #[test]
    fn resident_matrices_are_grouped_by_layer_without_routers() {
        let specs = [
            spec("model.embed_tokens.weight", &[50, 32]),
            spec("model.layers.0.self_attn.q_proj.weight", &[64, 32]),
            spec("model.layers.0.mlp.gate.weight", &[8, 32]),
            spec("model.layers.0.self_attn.o_proj.weight", &[32, 64]),
            TensorSpec { by_head: true, ..spec("model.layers.0.self_attn.kv_b_proj.weight", &[64, 32]) },
            TensorSpec { product: false, ..spec("model.layers.0.input_layernorm.weight", &[32]) },
            TensorSpec { by_row: true, ..spec("model.ngrams.weight", &[5000, 32]) },
            spec("model.layers.1.self_attn.q_proj.weight", &[64, 32]),
        ];
        let found: Vec<_> = resident_groups(&specs, 8, 50).map(|group| (group.names.len(), group.weights())).collect();
        assert_eq!(found, [(1, 50 * 32), (2, 2 * 64 * 32), (1, 64 * 32)]);
    }

    #[test]
    fn a_format_whose_blocks_do_not_fit_is_none_for_a_group() {
        let shapes = vec![(2, 256), (1, 64)];
        let group = MatrixGroup { names: vec![], shapes, of_experts: true };
        assert_eq!((group.bytes(NumberFormat::Q8_0), group.bytes(NumberFormat::Q4K)), (Some(576 * 34 / 32), None));
    }
}
