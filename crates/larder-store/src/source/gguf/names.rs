//! Maps the tensors of a GGUF file to the names and shapes of the Hugging Face hub.

use std::{collections::HashMap, path::Path};

use larder_core::{ExpertNames, RowPick, TensorSlice, matrix_scale_name};

use super::{
    architectures::{Architecture, MTP},
    metadata::Metadata,
    reader::GgufTensor,
    remap::{Remap, Rename, split_layer},
    scales::{Role, Scales},
    stored::HubTensor,
};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::MtpTensors,
};

/// All tensors by their names on the hub, and these names in the order of the file.
pub(super) struct HubNames {
    pub tensors: HashMap<String, HubTensor>,
    pub order: Vec<String>,
    pub experts: ExpertNames,
    /// Tensors of divisors of RoPE's frequencies, which the hub has in the config.
    pub rope_factors: Vec<GgufTensor>,
    /// Number of tensors for multi-token prediction that are not used; they do not affect the next token.
    pub unused: usize,
}

impl HubNames {
    /// Maps every tensor. A tensor that the architecture does not have is an error, because ignoring it could change
    /// the result.
    pub fn of(
        architecture: &Architecture,
        metadata: &Metadata,
        tensors: &[GgufTensor],
        (layers, mtp): (u64, MtpTensors),
    ) -> Result<Self> {
        let path = metadata.path();
        let experts = find_experts(path, tensors)?;
        let stored = tensors.iter().filter_map(|t| split_layer(&t.name)).map(|(layer, _)| layer).max();
        if let Some(last) = stored.filter(|last| last.checked_add(1).is_none_or(|stored| stored < layers)) {
            let what = format!("says it has {layers} layers, but its last block is blk.{last}");
            return Err(StoreError::new(StoreErrorKind::Mismatch, path, what));
        }
        if layers > tensors.len() as u64 {
            let what = format!("says it has {layers} layers, but has only {} tensors", tensors.len());
            return Err(StoreError::new(StoreErrorKind::Mismatch, path, what));
        }
        let mut names =
            HubNames { tensors: HashMap::new(), order: Vec::new(), experts, rope_factors: Vec::new(), unused: 0 };
        // Some files hold kv_b_proj twice: whole, and as its two halves.
        let whole = tensors.iter().any(|t| t.name.ends_with(".attn_kv_b.weight"));
        let scales = Scales::of(tensors);
        for entry in tensors {
            if whole && is_half(&entry.name) {
                continue;
            }
            // Some architectures have scales of their own.
            let found = match (architecture.name_of(path, &entry.name, (layers, mtp)), scales.role_of(&entry.name)) {
                (Err(_), Some(Role::InputScale)) => continue,
                (Err(_), Some(Role::ScaleOf(matrix))) => {
                    let of = architecture.name_of(path, &matrix, (layers, mtp))?;
                    of.map(|(name, _)| (matrix_scale_name(&name), Remap::Same))
                }
                (known, _) => known?,
            };
            let Some((name, remap)) = found else {
                names.unused += 1;
                continue;
            };
            if entry.integers != (remap == Remap::Integers) {
                let stored = if entry.integers { "integers" } else { "floats" };
                let what = format!("has the tensor '{}' of {stored}, which it cannot be", entry.name);
                return Err(StoreError::new(StoreErrorKind::Unsupported, path, what));
            }
            if remap == Remap::RopeFactors {
                names.rope_factors.push(entry.clone());
                continue;
            }
            let tensor = remap.hub_tensor(metadata, entry)?;
            if names.tensors.insert(name.clone(), tensor).is_some() {
                return Err(StoreError::malformed(path, format!("has two tensors for '{name}'")));
            }
            names.order.push(name);
        }
        let has_mtp = || tensors.iter().any(|t| t.name.starts_with(&format!("blk.{layers}.nextn.")));
        if mtp == MtpTensors::Kept && !has_mtp() {
            let what = "has no block for multi-token prediction";
            return Err(StoreError::new(StoreErrorKind::Missing, path, what));
        }
        Ok(names)
    }
}

impl Architecture {
    /// The name of a tensor on the hub; `None` if the model does not need the tensor.
    fn name_of(&self, path: &Path, name: &str, (layers, mtp): (u64, MtpTensors)) -> Result<Option<(String, Remap)>> {
        let find = |groups: &[&[Rename]], name: &str| {
            groups.iter().copied().flatten().find(|(gguf, ..)| *gguf == name).map(|(_, hub, remap)| (*hub, *remap))
        };
        let found = match split_layer(name) {
            // Those of further blocks for multi-token prediction, and its copies of embedding and output head, are
            // never used.
            Some((layer, _)) if layer > layers || (layer == layers && mtp == MtpTensors::LeftOut) => return Ok(None),
            Some((_, "nextn.embed_tokens.weight" | "nextn.shared_head_head.weight")) => return Ok(None),
            Some((_, part)) if is_expert(part) => Some((name.to_owned(), Remap::Same)),
            Some((layer, part)) => {
                let mtp = (layer == layers).then(|| find(&[MTP], part)).flatten();
                mtp.or_else(|| find(self.layer, part))
                    .map(|(hub, remap)| (format!("model.layers.{layer}.{hub}"), remap))
            }
            None => find(&[self.outer], name).map(|(hub, remap)| (hub.to_owned(), remap)),
        };
        found.map(Some).ok_or_else(|| {
            let what = format!("has the tensor '{name}', which is unknown for the architecture '{}'", self.arch);
            StoreError::new(StoreErrorKind::Unsupported, path, what)
        })
    }
}

/// Whether it is one of the two parts into which newer files split `attn_kv_b`.
fn is_half(name: &str) -> bool {
    name.ends_with(".attn_k_b.weight") || name.ends_with(".attn_v_b.weight")
}

/// Whether it belongs to an expert: `ffn_gate_exps.weight`, or `ffn_gate.3.weight` in older files.
fn is_expert(part: &str) -> bool {
    if part.ends_with("_exps.weight") || part.ends_with("_exps.bias") {
        return true;
    }
    let number = ["ffn_gate.", "ffn_up.", "ffn_down."].iter().find_map(|p| part.strip_prefix(p));
    number.and_then(|n| n.strip_suffix(".weight")).is_some_and(|n| n.parse::<u16>().is_ok())
}

fn find_experts(path: &Path, tensors: &[GgufTensor]) -> Result<ExpertNames> {
    let part = tensors.iter().filter_map(|t| split_layer(&t.name)).map(|(_, part)| part).find(|part| is_expert(part));
    let part = part.ok_or_else(|| {
        StoreError::new(StoreErrorKind::Unsupported, path, "has no experts; larder runs Mixture-of-Experts models only")
    })?;
    if !part.contains("_exps.") {
        let own = |matrix: &str| TensorSlice::whole(format!("blk.{{l}}.ffn_{matrix}.{{e}}.weight"));
        return Ok(ExpertNames { matrices: ["gate", "up", "down"].map(own).into(), bias: None });
    }
    let has = |suffix: &str| tensors.iter().any(|t| t.name.ends_with(suffix));
    let piece = |tensor: &str, pick| TensorSlice::stacked(format!("blk.{{l}}.ffn_{tensor}"), false, pick);
    let down = piece("down_exps.weight", RowPick::All);
    if !has(".ffn_gate_up_exps.weight") && !has(".ffn_gate_exps.weight") {
        // Experts of two matrices.
        let bias = has(".ffn_up_exps.bias")
            .then(|| ["up_exps.bias", "down_exps.bias"].map(|tensor| piece(tensor, RowPick::All)).into());
        return Ok(ExpertNames { matrices: [piece("up_exps.weight", RowPick::All), down].into(), bias });
    }
    let (gate, up) = if has(".ffn_gate_up_exps.weight") {
        (piece("gate_up_exps.weight", RowPick::FirstHalf), piece("gate_up_exps.weight", RowPick::SecondHalf))
    } else {
        (piece("gate_exps.weight", RowPick::All), piece("up_exps.weight", RowPick::All))
    };
    let bias = has(".ffn_gate_exps.bias")
        .then(|| ["gate_exps.bias", "up_exps.bias", "down_exps.bias"].map(|t| piece(t, RowPick::All)).into());
    Ok(ExpertNames { matrices: [gate, up, down].into(), bias })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expert_tensors_are_recognised() {
        for part in ["ffn_gate_exps.weight", "ffn_down_exps.bias", "ffn_gate_up_exps.weight", "ffn_up.12.weight"] {
            assert!(is_expert(part), "{part}");
        }
        for part in
            ["ffn_gate.weight", "ffn_gate_inp.weight", "ffn_gate_shexp.weight", "ffn_up.x.weight", "ffn_up_exps.scale"]
        {
            assert!(!is_expert(part), "{part}");
        }
    }

    #[test]
    fn unknown_and_superfluous_tensors() {
        let name = |arch: &str, tensor: &str| {
            Architecture::of(arch)
                .unwrap()
                .name_of(Path::new("m.gguf"), tensor, (2, MtpTensors::LeftOut))
                .map(|n| n.map(|(name, _)| name))
        };
        assert_eq!(name("llama", "blk.1.attn_q.weight").unwrap().unwrap(), "model.layers.1.self_attn.q_proj.weight");
        assert_eq!(name("glm4moe", "blk.2.nextn.eh_proj.weight").unwrap(), None);
        let unknown = name("olmoe", "blk.0.attn_q.bias").unwrap_err().to_string();
        assert!(unknown.contains("'blk.0.attn_q.bias', which is unknown for the architecture 'olmoe'"), "{unknown}");
        assert!(name("llama", "rope_freqs.weight").is_err());
    }
}
