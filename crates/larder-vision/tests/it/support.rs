//! Folders of references: checkpoints with a tower, and what transformers makes of pictures.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_core::{NumberFormat, TensorMeta, Tensors, TensorsError};
use larder_kernels::ThreadPool;
use larder_vision::{DecodeLimits, RgbImage, Tower, TowerFile, decode, open_tower};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Names of the pictures of a reference.
pub const PICTURES: [&str; 5] = ["tall", "plain", "odd", "dot", "wide"];

/// The tensors of a file in memory.
#[derive(Clone)]
pub struct MemoryTensors(pub HashMap<String, (TensorMeta, Vec<u8>)>);

impl MemoryTensors {
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let kind = |dtype| match dtype {
            Dtype::F16 => NumberFormat::F16,
            Dtype::BF16 => NumberFormat::Bf16,
            // Integers are read as bits.
            _ => NumberFormat::F32,
        };
        let tensor = |(name, view): (String, safetensors::tensor::TensorView)| {
            let meta = TensorMeta::new(kind(view.dtype()), view.shape().to_vec()).unwrap();
            (name, (meta, view.data().to_vec()))
        };
        MemoryTensors(file.tensors().into_iter().map(tensor).collect())
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.0[name].1.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    pub fn integers(&self, name: &str) -> Vec<usize> {
        self.0[name].1.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize).collect()
    }
}

impl Tensors for MemoryTensors {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.0.get(name).map(|(meta, _)| meta)
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        into.copy_from_slice(&self.0[name].1[offset..][..into.len()]);
        Ok(())
    }
}

/// A folder written by `scripts/make/make_vision.py`.
pub struct Reference {
    pub folder: PathBuf,
    pub config: Value,
    pub processor: Value,
    pub weights: MemoryTensors,
    pub expected: MemoryTensors,
}

impl Reference {
    fn read(folder: &Path) -> Self {
        let json = |name: &str| serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap();
        Reference {
            folder: folder.to_path_buf(),
            config: json("config.json"),
            processor: json("preprocessor_config.json"),
            weights: MemoryTensors::read(&folder.join("model.safetensors")),
            expected: MemoryTensors::read(&folder.join("reference.safetensors")),
        }
    }

    /// Those of the repository, and those of the folder `LARDER_VISION_REFERENCE`.
    pub fn all() -> Vec<Self> {
        let more = std::env::var_os("LARDER_VISION_REFERENCE").map(PathBuf::from);
        let mut all = Reference::of_repository();
        all.extend(more.iter().flat_map(|folder| Reference::within(folder)));
        all
    }

    pub fn of_repository() -> Vec<Self> {
        Reference::within(&folder())
    }

    fn within(folder: &Path) -> Vec<Self> {
        let mut folders: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        folders.retain(|folder| folder.join("reference.safetensors").is_file());
        folders.sort();
        folders.iter().map(|folder| Reference::read(folder)).collect()
    }

    pub fn picture(&self, name: &str) -> RgbImage {
        let own = self.folder.join("images");
        let images = if own.is_dir() { own } else { folder().join("images") };
        let bytes = std::fs::read(images.join(format!("{name}.png"))).unwrap();
        decode(&bytes, &DecodeLimits::default()).unwrap()
    }

    pub fn tower_on(&self, threads: usize) -> Box<dyn Tower> {
        let pool = Arc::new(ThreadPool::new(threads, false).unwrap());
        let file = TowerFile::Checkpoint { config: &self.config, processor: Some(&self.processor) };
        open_tower(&file, &self.weights, pool).unwrap()
    }

    pub fn tower(&self) -> Box<dyn Tower> {
        self.tower_on(2)
    }
}

/// The files of the repository.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vision")
}

/// The norm of the difference, divided by that of what is expected.
pub fn relative_error(got: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(got.len(), expected.len(), "lengths differ");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let off = norm(&mut got.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    off / norm(&mut expected.iter().map(|v| f64::from(*v)))
}
