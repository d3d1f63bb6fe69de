//! How fast the tower's matmuls and attention are, beside the most that this processor does:
//!
//!     cargo run --release -p larder-vision --example tower_speed [PIXELS] [THREADS] [BLOCKS]
//!
//! Encodes a picture with random bfloats in the published shape, 27 blocks of 1,152.

use std::sync::Arc;
use std::time::Instant;

use larder_core::{NumberFormat, TensorMeta, Tensors, TensorsError};
use larder_kernels::{Peak, ThreadPool};
use larder_vision::{RgbImage, TowerFile, open_tower};
use serde_json::json;

/// Tensors of any name, in shapes that follow from it, all filled with the same small values.
struct Filled(std::collections::HashMap<String, TensorMeta>);

impl Filled {
    fn new(depth: usize) -> Self {
        let mut all = std::collections::HashMap::new();
        let mut add = |name: String, shape: Vec<usize>| {
            let meta = TensorMeta::new(NumberFormat::Bf16, shape).expect("small shapes");
            all.insert(format!("model.visual.{name}"), meta);
        };
        let mut linear = |name: String, columns: usize, inputs: usize| {
            add(format!("{name}.weight"), vec![columns, inputs]);
            add(format!("{name}.bias"), vec![columns]);
        };
        for block in 0..depth {
            linear(format!("blocks.{block}.attn.qkv"), 3456, 1152);
            linear(format!("blocks.{block}.attn.proj"), 1152, 1152);
            linear(format!("blocks.{block}.mlp.linear_fc1"), 4304, 1152);
            linear(format!("blocks.{block}.mlp.linear_fc2"), 1152, 4304);
        }
        linear("merger.linear_fc1".into(), 4608, 4608);
        linear("merger.linear_fc2".into(), 2048, 4608);
        let norms = (0..depth).flat_map(|block| [1, 2].map(|i| format!("blocks.{block}.norm{i}")));
        for name in norms.chain(["merger.norm".into()]) {
            add(format!("{name}.weight"), vec![1152]);
            add(format!("{name}.bias"), vec![1152]);
        }
        add("patch_embed.proj.weight".into(), vec![1152, 3, 2, 16, 16]);
        add("patch_embed.proj.bias".into(), vec![1152]);
        add("pos_embed.weight".into(), vec![2304, 1152]);
        Filled(all)
    }
}

impl Tensors for Filled {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.0.get(name)
    }

    fn read(&self, _: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        for (i, bytes) in into.chunks_exact_mut(2).enumerate() {
            let mixed = ((offset / 2 + i) as u32).wrapping_mul(2_654_435_761) >> 16;
            let value = (mixed as f32 / 65_536.0 - 0.5) * 0.1;
            bytes.copy_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
        }
        Ok(())
    }
}

fn main() {
    let number = |i, default| std::env::args().nth(i).and_then(|word| word.parse().ok()).unwrap_or(default);
    let (pixels, threads, depth): (usize, usize, usize) = (number(1, 1 << 20), number(2, 1), number(3, 27));
    let pool = Arc::new(ThreadPool::new(threads, false).expect("threads start"));
    let peak = Peak::all()[0].rate(&pool).unwrap_or(f64::NAN);
    let config = json!({
        "model_type": "qwen3_5_moe", "vision_config": {"depth": depth, "out_hidden_size": 2048}
    });
    let file = TowerFile::Checkpoint { config: &config, processor: None };
    let tower = open_tower(&file, &Filled::new(depth), pool).expect("a whole tower");
    let side = pixels.isqrt();
    let bytes = (0..side * side * 3).map(|i| (i * 31 % 251) as u8).collect();
    let image = RgbImage::new(side, side, bytes).expect("a square");
    let grid = tower.grid(side, side).expect("a square");
    let start = Instant::now();
    let encoded = tower.encode(&image).expect("a square");
    let seconds = start.elapsed().as_secs_f64();
    let operations = tower.operations(grid.tokens() * 32 * 32);
    println!("{} tokens in {seconds:.2} s, {:.2} TFLOP", encoded.grid.tokens(), operations / 1e12);
    println!(
        "{:.1} of {:.1} GFLOP/s, {:.0} %",
        operations / seconds / 1e9,
        peak / 1e9,
        operations / seconds / peak * 100.0
    );
    println!(
        "{:.0} MB of weights, {:.0} MB for the picture",
        tower.weight_bytes() as f64 / 1e6,
        tower.memory_bytes(grid.tokens() * 32 * 32) as f64 / 1e6
    );
}
