//! `mmproj` files that are made of checkpoints with an image tower of Qwen3-VL's kind.

use std::path::Path;

use serde_json::Value;

use super::checkpoint::{NamedTensor, tensors};
use super::gguf::{entry, file, text};

/// Parts of a block, in a checkpoint and in GGUF.
const BLOCK: [(&str, &str); 6] = [
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
];

/// Parts of a merger in a checkpoint, in GGUF at the end, and there behind a block.
const MERGER: [(&str, &str, &str); 3] =
    [("norm", "v.post_ln", "norm"), ("linear_fc1", "mm.0", "fc1"), ("linear_fc2", "mm.2", "fc2")];

/// Types of values.
const U32: u32 = 4;
const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const LIST: u32 = 9;

/// Writes the tower of the checkpoint in `folder` as an `mmproj` file, in f32.
pub fn write_mmproj(folder: &Path, path: &Path) {
    let json = |name: &str| -> Value { serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap() };
    let (config, processor) = (json("config.json")["vision_config"].clone(), json("preprocessor_config.json"));
    std::fs::write(path, file(&entries(&config, &processor["size"]), &renamed(folder, &config))).unwrap();
}

fn deepstack(config: &Value) -> Vec<u64> {
    let layers = config["deepstack_visual_indexes"].as_array().into_iter().flatten();
    layers.map(|layer| layer.as_u64().unwrap()).collect()
}

fn list<const N: usize>(kind: u32, values: impl IntoIterator<Item = [u8; N]>) -> Vec<u8> {
    let values: Vec<[u8; N]> = values.into_iter().collect();
    [&kind.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), values.as_flattened()].concat()
}

fn entries(config: &Value, size: &Value) -> Vec<Vec<u8>> {
    let number = |json: &Value| (json.as_u64().unwrap() as u32).to_le_bytes();
    let sizes = [
        ("patch_size", &config["patch_size"]),
        ("embedding_length", &config["hidden_size"]),
        ("feed_forward_length", &config["intermediate_size"]),
        ("block_count", &config["depth"]),
        ("projection_dim", &config["out_hidden_size"]),
        ("attention.head_count", &config["num_heads"]),
        ("spatial_merge_size", &config["spatial_merge_size"]),
        ("image_min_pixels", &size["shortest_edge"]),
        ("image_max_pixels", &size["longest_edge"]),
    ];
    let halves = || list(F32, [0.5f32; 3].map(f32::to_le_bytes));
    let layers = deepstack(config);
    let flags = (0..config["depth"].as_u64().unwrap()).map(|layer| [u8::from(layers.contains(&layer))]);
    let mut all = vec![
        entry("general.architecture", TEXT, &text("clip")),
        entry("clip.has_vision_encoder", BOOL, &[1]),
        entry("clip.projector_type", TEXT, &text("qwen3vl_merger")),
        entry("clip.use_gelu", BOOL, &[1]),
        entry("clip.vision.attention.layer_norm_epsilon", F32, &1e-6f32.to_le_bytes()),
        entry("clip.vision.image_mean", LIST, &halves()),
        entry("clip.vision.image_std", LIST, &halves()),
        entry("clip.vision.is_deepstack_layers", LIST, &list(BOOL, flags)),
    ];
    all.extend(sizes.map(|(key, value)| entry(&format!("clip.vision.{key}"), U32, &number(value))));
    all
}

fn renamed(folder: &Path, config: &Value) -> Vec<NamedTensor> {
    let layers = deepstack(config);
    let all = tensors(folder);
    let of_tower = all.iter().filter_map(|tensor| Some((tensor.name.strip_prefix("model.visual.")?, tensor)));
    of_tower.flat_map(|(name, tensor)| in_gguf(name, tensor, &layers)).collect()
}

/// A tensor of a tower under its name in GGUF; the kernels of the time slices are two tensors.
fn in_gguf(name: &str, tensor: &NamedTensor, layers: &[u64]) -> Vec<NamedTensor> {
    let values = tensor.values();
    let (stem, kind) = name.rsplit_once('.').unwrap();
    if name == "patch_embed.proj.weight" {
        let [hidden, channels, 2, height, width] = tensor.shape[..] else { panic!("{:?}", tensor.shape) };
        let square = height * width;
        let slice = |time: usize| -> Vec<f32> {
            values.chunks_exact(2 * square).flat_map(|both| &both[time * square..][..square]).copied().collect()
        };
        let named = ["v.patch_embd.weight", "v.patch_embd.weight.1"].into_iter().enumerate();
        return named
            .map(|(time, name)| NamedTensor::f32(name, &[hidden, channels, height, width], &slice(time)))
            .collect();
    }
    let found = |parts: &[(&str, &str)], part: &str| parts.iter().find(|(own, _)| *own == part).unwrap().1.to_owned();
    let words: Vec<&str> = stem.splitn(3, '.').collect();
    let own = match words[..] {
        ["patch_embed", "proj"] => format!("v.patch_embd.{kind}"),
        ["pos_embed"] => "v.position_embd.weight".to_owned(),
        ["blocks", layer, part] => format!("v.blk.{layer}.{}.{kind}", found(&BLOCK, part)),
        ["merger", part] => format!("{}.{kind}", found(&MERGER.map(|(own, end, _)| (own, end)), part)),
        ["deepstack_merger_list", number, part] => {
            let layer = layers[number.parse::<usize>().unwrap()];
            format!("v.deepstack.{layer}.{}.{kind}", found(&MERGER.map(|(own, _, inner)| (own, inner)), part))
        }
        _ => panic!("{name}"),
    };
    vec![NamedTensor::f32(own, &tensor.shape, &values)]
}
