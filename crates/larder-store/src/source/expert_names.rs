//! Where a source has the experts: where the architecture says, or in another form in which checkpoints are published.

use larder_core::{Blueprint, ExpertId, ExpertNames, PerMatrix, RowPick, TensorSlice};

use super::Source;
use crate::source::tensor_slice::{ExpertRef, LocatedSlice, PartShape};

/// Endings of the names of tensors that hold all experts of a layer.
const ENDINGS: [&str; 2] = ["", ".weight"];

/// Where `source` has the experts of a model of `blueprint`, found by the names and shapes of the first MoE layer.
/// Where nothing fits, the names are those that the architecture states, so that errors name them.
pub(crate) fn expert_names(source: &dyn Source, blueprint: &Blueprint) -> ExpertNames {
    let stated = &blueprint.experts;
    if let Some(own) = source.expert_names() {
        return own;
    }
    if fits(source, blueprint, stated) {
        return stated.clone();
    }
    let mut others = flipped(stated).into_iter().chain(fused(stated));
    others.find(|names| fits(source, blueprint, names)).unwrap_or_else(|| stated.clone())
}

/// Whether the first expert of the first MoE layer has all matrices under these names, in the shapes of the blueprint.
fn fits(source: &dyn Source, blueprint: &Blueprint, names: &ExpertNames) -> bool {
    let geometry = &blueprint.geometry;
    let Some(layer) = geometry.moe_layers.first() else { return false };
    let first = ExpertRef { layer: *layer, expert: ExpertId(0), experts: geometry.experts };
    names.matrices.named().all(|(name, slice)| {
        let shape = match name {
            "down" => PartShape::Matrix(geometry.hidden, geometry.inter),
            _ => PartShape::Matrix(geometry.inter, geometry.hidden),
        };
        LocatedSlice::locate(source, slice, first, shape, None).is_ok()
    })
}

/// Tensors over all experts in the other orientation: `[in, out]` instead of `[out, in]`, or the reverse.
fn flipped(stated: &ExpertNames) -> Option<ExpertNames> {
    let stacked = stated.matrices.iter().all(|slice| slice.stacked);
    let flip = |slice: TensorSlice| TensorSlice { transposed: !slice.transposed, ..slice };
    stacked.then(|| ExpertNames { matrices: stated.matrices.clone().map(flip), bias: stated.bias.clone() })
}

/// Tensors over all experts in place of one per expert: gate and up in one, first all rows of gate, or apart. MLX has
/// them in a folder of its own, whatever the architecture states.
fn fused(stated: &ExpertNames) -> Vec<ExpertNames> {
    let name = &stated.matrices.up.name;
    let own = name.split_once(".{e}.").map(|(folder, _)| folder);
    let mlx = name.split_once(".experts.").map(|(block, _)| format!("{block}.switch_mlp"));
    let mut forms = vec![];
    for folder in own.into_iter().chain(mlx.as_deref()) {
        for ending in ENDINGS {
            for transposed in [false, true] {
                let piece =
                    |name: &str, pick| TensorSlice::stacked(format!("{folder}.{name}{ending}"), transposed, pick);
                let down = || piece("down_proj", RowPick::All);
                let both = |pick| piece("gate_up_proj", pick);
                let apart = |name| piece(name, RowPick::All);
                let joined = [both(RowPick::FirstHalf), both(RowPick::SecondHalf)];
                for [gate, up] in [joined, [apart("gate_proj"), apart("up_proj")]] {
                    forms.push(PerMatrix { gate: Some(gate), up, down: down() });
                }
            }
        }
    }
    // Experts of two matrices have no fused form with a gate.
    forms.retain(|form| form.gate.is_some() == stated.matrices.gate.is_some());
    forms.into_iter().map(|matrices| ExpertNames { matrices, bias: None }).collect()
}
