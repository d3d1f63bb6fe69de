//! NVIDIA's Model Optimizer: NVFP4 (kept as nvfp4, exactly) and FP8, also mixed. The scales of inputs are left out:
//! they are for products with quantised activations of a fixed range.

use larder_core::{ExpertNames, RowPick, TensorSlice};
use safetensors::Dtype;
use serde_json::Value;

use super::{Checkpoint, Found, fp8, nvfp4};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::{QUANTISATION as FILE, Source, config_json, index::not_json},
};

/// The algorithms whose tensors are read; [`MIXED`] has one for each layer.
const ALGORITHMS: [&str; 3] = ["NVFP4", "W4A16_NVFP4", "FP8"];
const MIXED: &str = "MIXED_PRECISION";

pub(super) fn find(from: &Checkpoint, config: &Value) -> Result<Found> {
    check_config(config)
        .map_err(|what| StoreError::new(StoreErrorKind::Unsupported, from.path(), format!("its weights {what}")))?;
    let mut found = Found::default();
    for name in from.names() {
        if name.ends_with("pre_quant_scale") {
            let what = format!("has the tensor '{name}', which changes inputs and is not supported");
            return Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
        }
        if from.stored(name)?.dtype != Dtype::U8 {
            continue;
        }
        // The tensors of stacked experts have no `.weight` in their names.
        let base = if name.ends_with("weight") { name.to_owned() } else { format!("{name}_weight") };
        let scales = format!("{base}_scale");
        if from.find(&scales).is_some() {
            let stored = nvfp4::StoredNames { codes: name, scales: &scales, global: &format!("{base}_scale_2") };
            let transposed = nvfp4::add(from, name, &stored, nvfp4::Global::Factor, &mut found)?;
            if transposed && found.experts.is_none() {
                found.experts = name.strip_suffix("down_proj").and_then(stacked_experts);
            }
        }
    }
    fp8::add(from, None, &mut found)?;
    Ok(found)
}

/// The names of the experts that are stacked in `gate_up_proj`, gate before up, and `down_proj`, whose rows are seen as
/// rows though they are stored as columns. `start` is what the names of a layer begin with.
fn stacked_experts(start: &str) -> Option<ExpertNames> {
    let (before, behind) = start.split_once(".layers.")?;
    let behind = behind.trim_start_matches(|digit: char| digit.is_ascii_digit());
    let piece = |name, pick| TensorSlice::stacked(format!("{before}.layers.{{l}}{behind}{name}"), false, pick);
    let (gate, up) = (piece("gate_up_proj", RowPick::FirstHalf), piece("gate_up_proj", RowPick::SecondHalf));
    Some(ExpertNames { matrices: [gate, up, piece("down_proj", RowPick::All)].into(), bias: None })
}

/// The config of the quantisation in the file [`FILE`] of a checkpoint whose own config has none, in the form of
/// `quantization_config`; `None` if there is no such file, or if it names no algorithm for weights.
pub(super) fn config_beside(from: &Checkpoint) -> Result<Option<Value>> {
    let Some(bytes) = from.sidecar(FILE)? else { return Ok(None) };
    let path = from.path().join(FILE);
    let mut file: Value = config_json::parse(&bytes).map_err(|e| not_json(&path, &e))?;
    let name = file["producer"]["name"].as_str().unwrap_or_default().to_owned();
    let config = file.get_mut("quantization").map(Value::take).unwrap_or_default();
    let quantises = !config["quant_algo"].is_null();
    let mut config = Some(config).filter(|_| quantises);
    if let Some(config) = config.as_mut().and_then(Value::as_object_mut) {
        config.insert("quant_method".to_owned(), name.into());
    }
    Ok(config)
}

/// Checks that all algorithms are supported; else says which is not.
fn check_config(config: &Value) -> Result<(), String> {
    let algorithm = config["quant_algo"].as_str().unwrap_or_default();
    let layers = config["quantized_layers"].as_object().into_iter().flat_map(|layers| layers.values());
    let of_layers = layers.map(|layer| layer["quant_algo"].as_str().unwrap_or_default());
    let all = Some(algorithm).filter(|algorithm| *algorithm != MIXED).into_iter().chain(of_layers);
    match all.into_iter().find(|algorithm| !ALGORITHMS.contains(algorithm)) {
        None => Ok(()),
        Some(other) => Err(format!(
            "are quantised by modelopt with the algorithm '{other}', which is not supported; supported are {}",
            ALGORITHMS.join(", ")
        )),
    }
}
