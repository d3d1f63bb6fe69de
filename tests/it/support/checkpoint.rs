//! Checkpoint folders that are made of others.

use std::path::Path;

use larder_core::NumberFormat;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

/// A tensor of a safetensors file.
#[derive(Clone)]
pub struct NamedTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

impl NamedTensor {
    pub fn f32(name: impl Into<String>, shape: &[usize], values: &[f32]) -> Self {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        NamedTensor { name: name.into(), dtype: Dtype::F32, shape: shape.to_vec(), data }
    }

    /// The values of a tensor of floats.
    pub fn values(&self) -> Vec<f32> {
        let kind = match self.dtype {
            Dtype::F32 => NumberFormat::F32,
            Dtype::F16 => NumberFormat::F16,
            Dtype::BF16 => NumberFormat::Bf16,
            other => panic!("{} has dtype {other:?}", self.name),
        };
        let mut values = vec![0.0; self.shape.iter().product()];
        larder_store::decode_floats(kind, &self.data, &mut values);
        values
    }
}

/// The tensors of `folder`, which has one file of weights.
pub fn tensors(folder: &Path) -> Vec<NamedTensor> {
    tensors_of(&folder.join("model.safetensors"))
}

/// The tensors of a safetensors file.
pub fn tensors_of(path: &Path) -> Vec<NamedTensor> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<_> = file
        .iter()
        .map(|(name, t)| NamedTensor {
            name: name.to_owned(),
            dtype: t.dtype(),
            shape: t.shape().to_vec(),
            data: t.data().to_vec(),
        })
        .collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// Makes the folder `to` of the folder `from`, with other tensors and another config, and all other files unchanged.
pub fn with_tensors(from: &Path, to: &Path, tensors: &[NamedTensor], config: impl FnOnce(&mut Value)) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_owned();
        if name != "model.safetensors" && name != "config.json" {
            std::fs::copy(&path, to.join(name)).unwrap();
        }
    }
    let mut json = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    config(&mut json);
    std::fs::write(to.join("config.json"), json.to_string()).unwrap();
    let views = tensors.iter().map(|t| (&t.name, TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
    std::fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}
