//! An `mmproj` file: the image tower of a model in GGUF.

use std::{path::Path, sync::Arc};

use serde_json::{Map, Value};

use super::{TowerForm, TowerPlace, TowerSource, TowerTensor, TowerTensors};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::ReadAt,
    source::gguf::{GgufHeader, MetadataValue},
};

/// What its metadata about a tower begin with.
const PREFIX: &str = "clip.";
/// The most values of a list that is kept: there may be one for each layer.
const MOST_VALUES: usize = 1024;
/// The longest text that is kept, in bytes.
const MOST_TEXT: usize = 256;

/// Opens an `mmproj` file.
///
/// # Errors
/// If the file is damaged, or holds no image tower.
pub fn open_mmproj(path: &Path) -> Result<TowerSource> {
    let file = Arc::new(ReadAt::open(path)?);
    let GgufHeader { metadata, tensors, .. } = GgufHeader::read(&file)?;
    let architecture = metadata.text("general.architecture")?.unwrap_or_default();
    if architecture != "clip" || metadata.flag("clip.has_vision_encoder")? == Some(false) {
        let what = "holds no image tower; name the mmproj file that was published with the model";
        return Err(StoreError::new(StoreErrorKind::Unsupported, path, what));
    }
    let mut keys: Vec<(&str, Value)> =
        metadata.entries(PREFIX).filter_map(|(key, value)| Some((key, json_of(value)?))).collect();
    keys.sort_unstable_by_key(|(key, _)| *key);
    let keys = Value::Object(Map::from_iter(keys.into_iter().map(|(key, value)| (key.to_owned(), value))));
    let tensors = tensors.into_iter().filter(|tensor| !tensor.integers).map(|tensor| {
        let place = TowerPlace::Local(file.clone());
        (tensor.name, TowerTensor { meta: tensor.meta, place, start: tensor.offset })
    });
    TowerTensors(tensors.collect()).into_source(path, TowerForm::Mmproj { keys })
}

/// A value as JSON; `None` for one that says nothing about a tower, because it is too long.
fn json_of(value: &MetadataValue) -> Option<Value> {
    let list = |len: usize| len <= MOST_VALUES;
    match value {
        MetadataValue::Int(number) => i64::try_from(*number).ok().map(Value::from),
        MetadataValue::Float(number) => Some(Value::from(*number)),
        MetadataValue::Flag(flag) => Some(Value::from(*flag)),
        MetadataValue::Text(text) if text.len() <= MOST_TEXT => Some(Value::from(text.as_str())),
        MetadataValue::Ints(all) if list(all.len()) => Some(Value::from(all.as_slice())),
        MetadataValue::Floats(all) if list(all.len()) => Some(Value::from(all.as_slice())),
        MetadataValue::Flags(all) if list(all.len()) => Some(Value::from(all.as_slice())),
        MetadataValue::Text(_)
        | MetadataValue::Ints(_)
        | MetadataValue::Floats(_)
        | MetadataValue::Flags(_)
        | MetadataValue::Texts(_) => None,
    }
}
