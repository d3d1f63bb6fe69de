//! Models of a few thousand drawn weights, for tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_core::{CheckpointPolicy, ExpertLayout, NumberFormat, Rng, RowOrder, TensorMeta, Tensors, TensorsError};
use larder_model::{AllResident, ComputeContext, Decoder, blueprint};
use serde_json::Value;

/// Weights drawn from their names.
struct DrawnWeights(BTreeMap<String, TensorMeta>);

fn drawn(name: &str, values: usize) -> Vec<f32> {
    let mut rng = Rng::new(name.bytes().fold(7, |seed, byte| seed * 31 % 1_000_003 + u64::from(byte)));
    let is_norm = name.contains("norm");
    (0..values).map(|_| if is_norm { 1.0 } else { (rng.unit() as f32 - 0.5) * 0.7 }).collect()
}

impl Tensors for DrawnWeights {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.0.get(name)
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        let bytes: Vec<u8> = drawn(name, self.0[name].bytes / 4).iter().flat_map(|value| value.to_le_bytes()).collect();
        into.copy_from_slice(&bytes[offset..offset + into.len()]);
        Ok(())
    }
}

/// A model of a few thousand weights.
pub fn tiny(config: &Value) -> (Decoder, AllResident) {
    let described = blueprint(config).unwrap();
    let meta = |shape: &[usize]| TensorMeta {
        kind: NumberFormat::F32,
        order: RowOrder::Plain,
        bytes: shape.iter().product::<usize>() * 4,
        shape: shape.to_vec(),
    };
    let tensors = DrawnWeights(described.resident.iter().map(|spec| (spec.name.clone(), meta(&spec.shape))).collect());
    let kv_checkpoints = CheckpointPolicy { every: 64, most: 4, pins: 4 };
    let compute = Arc::new(ComputeContext { kv_checkpoints, ..ComputeContext::new(1, false).unwrap() });
    let decoder = Decoder::load(config, &tensors, compute.clone()).unwrap();
    let geometry = described.geometry;
    let mut experts = AllResident::new(geometry.layers, compute);
    for layer in &geometry.moe_layers {
        let layout = ExpertLayout::new(geometry.hidden, geometry.inter, [NumberFormat::F32; 3], false).unwrap();
        let expert = |index| {
            let values = drawn(&format!("{layer:?} {index}"), layout.bytes / 4);
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        };
        let all = (0..geometry.experts).map(expert).collect();
        experts.set(*layer, layout, all);
    }
    (decoder, experts)
}
