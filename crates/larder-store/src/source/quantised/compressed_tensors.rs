//! The library compressed-tensors: integers of four bits (kept as q4_0, exactly), MXFP4 and NVFP4 (kept as mxfp4 and
//! nvfp4, exactly) and FP8.

use safetensors::Dtype;
use serde_json::Value;

use super::{Checkpoint, Found, fp8, nibbles, nvfp4};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::Source,
};

/// The forms of storage that are read.
const FORMATS: [&str; 5] =
    ["pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "float-quantized", "naive-quantized"];
/// Values per 32-bit word of packed integers.
const PER_WORD: usize = 8;

pub(super) fn find(from: &Checkpoint, config: &Value) -> Result<Found> {
    check_config(config)
        .map_err(|what| StoreError::new(StoreErrorKind::Unsupported, from.path(), format!("its weights {what}")))?;
    let mut found = Found::default();
    for packed in from.names() {
        let Some(name) = packed.strip_suffix("_packed") else { continue };
        let (stored, scales) = (from.stored(packed)?, format!("{name}_scale"));
        let is_nvfp4 =
            stored.dtype == Dtype::U8 && from.find(&scales).is_some_and(|found| found.dtype == Dtype::F8_E4M3);
        refuse_companions(from, name, is_nvfp4)?;
        if is_nvfp4 {
            let stored = nvfp4::StoredNames { codes: packed, scales: &scales, global: &format!("{name}_global_scale") };
            nvfp4::add(from, name, &stored, nvfp4::Global::Divisor, &mut found)?;
            continue;
        }
        let per_element = match stored.dtype {
            Dtype::I32 => PER_WORD,
            Dtype::U8 => 2,
            other => {
                let what =
                    format!("tensor '{packed}' has dtype {other:?}; I32 and U8 are supported for packed weights");
                return Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
            }
        };
        let mut shape = stored.shape.clone();
        let cols = shape.last_mut().and_then(|cols| {
            *cols = cols.checked_mul(per_element)?;
            Some(*cols)
        });
        if cols.is_none() {
            let what = format!("tensor '{packed}' has shape {:?}, which is not that of a matrix", stored.shape);
            return Err(StoreError::new(StoreErrorKind::Mismatch, from.path(), what));
        }
        let tensor = nibbles::tensor(from, name, (packed, &scales), shape, stored.dtype == Dtype::U8)?;
        found.tensors.insert(name.to_owned(), tensor);
    }
    fp8::add(from, block(config), &mut found)?;
    Ok(found)
}

/// Refuses tensors that change the values of the weight `name` in ways that are not read.
fn refuse_companions(from: &Checkpoint, name: &str, is_nvfp4: bool) -> Result<()> {
    let global = (!is_nvfp4).then_some(("_global_scale", "a global scale"));
    for (suffix, what) in
        [("_zero_point", "zero points"), ("_g_idx", "columns in another order")].into_iter().chain(global)
    {
        if from.find(&format!("{name}{suffix}")).is_some() {
            let what = format!("has the quantised tensor '{name}' with {what}, which is not supported");
            return Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
        }
    }
    Ok(())
}

/// Checks that everything that decides about values is supported; else says what is not.
fn check_config(config: &Value) -> Result<(), String> {
    let format = config["format"].as_str().unwrap_or_default();
    // A model of several forms says so per group.
    let groups: Vec<&Value> = config["config_groups"].as_object().map(|g| g.values().collect()).unwrap_or_default();
    let formats = groups.iter().filter_map(|group| group["format"].as_str());
    let whole = Some(format).filter(|format| *format != "mixed-precision");
    if let Some(other) = whole.into_iter().chain(formats).find(|format| !FORMATS.contains(format)) {
        return Err(format!(
            "are stored as compressed-tensors in the format '{other}', which is not supported; supported are {}",
            FORMATS.join(", ")
        ));
    }
    for key in ["transform_config", "sparsity_config"] {
        let empty = match &config[key] {
            Value::Null => true,
            Value::Object(keys) => keys.is_empty() || keys.get("format").is_some_and(|format| format == "dense"),
            _ => false,
        };
        if !empty {
            return Err(format!("have a {key}, which is not supported"));
        }
    }
    groups.iter().map(|group| &group["weights"]).filter(|weights| !weights.is_null()).try_for_each(check_weights)
}

fn check_weights(weights: &Value) -> Result<(), String> {
    let (kind, bits) = (weights["type"].as_str().unwrap_or("int"), weights["num_bits"].as_u64().unwrap_or(8));
    let symmetric = weights["symmetric"].as_bool().unwrap_or(true);
    match (kind, bits) {
        ("int", 4) | ("float", 4 | 8) if symmetric => Ok(()),
        ("int", 4) | ("float", 4 | 8) => {
            Err("are quantised with zero points (symmetric: false), which is not supported".into())
        }
        _ => Err(format!(
            "are quantised as {kind} with {bits} bits, which is not supported; int with 4 and float with 4 or 8 bits are"
        )),
    }
}

/// The size of the blocks of FP8 weights: the first that a group names.
fn block(config: &Value) -> Option<(usize, usize)> {
    let groups = config["config_groups"].as_object()?;
    groups.values().find_map(|group| {
        let [rows, cols] = group["weights"]["block_structure"].as_array()?.as_slice() else { return None };
        let side = |value: &Value| value.as_u64().and_then(|side| usize::try_from(side).ok()).filter(|side| *side > 0);
        side(rows).zip(side(cols))
    })
}
