//! The same tower under the names of `mmproj` files.

use larder_core::{NumberFormat, TensorMeta};
use larder_kernels::ThreadPool;
use larder_vision::{TowerFile, open_tower};
use serde_json::{Value, json};

use crate::support::{MemoryTensors, PICTURES, Reference};

const PARTS: [(&str, &str); 9] = [
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("merger.norm", "v.post_ln"),
    ("merger.linear_fc1", "mm.0"),
    ("merger.linear_fc2", "mm.2"),
];

/// The metadata that llama.cpp's converter writes for a tower.
fn metadata(reference: &Reference) -> Value {
    let (vision, size) = (&reference.config["vision_config"], &reference.processor["size"]);
    let layers: Vec<u64> =
        vision["deepstack_visual_indexes"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    let flags: Vec<bool> = (0..vision["depth"].as_u64().unwrap()).map(|layer| layers.contains(&layer)).collect();
    json!({
        "clip.projector_type": "qwen3vl_merger", "clip.use_gelu": true, "clip.vision.is_deepstack_layers": flags,
        "clip.vision.patch_size": vision["patch_size"], "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"], "clip.vision.block_count": vision["depth"],
        "clip.vision.projection_dim": vision["out_hidden_size"],
        "clip.vision.attention.head_count": vision["num_heads"],
        "clip.vision.image_min_pixels": size["shortest_edge"], "clip.vision.image_max_pixels": size["longest_edge"],
    })
}

/// The tensors under their other names, and the two time slices of the patch embedding apart, in f32.
fn renamed(reference: &Reference) -> MemoryTensors {
    let layers = reference.config["vision_config"]["deepstack_visual_indexes"].as_array();
    let mut out = MemoryTensors(Default::default());
    for (name, (meta, bytes)) in &reference.weights.0 {
        let Some(name) = name.strip_prefix("model.visual.") else { continue };
        let (stem, kind) = name.rsplit_once('.').unwrap();
        let mut words = stem.split('.');
        let new = match (words.next().unwrap(), words.next()) {
            ("patch_embed", _) if kind == "weight" => {
                slices(meta, bytes).into_iter().zip(["", ".1"]).for_each(|(slice, end)| {
                    out.0.insert(format!("v.patch_embd.weight{end}"), slice);
                });
                continue;
            }
            ("patch_embed", _) => "v.patch_embd".into(),
            ("pos_embed", _) => "v.position_embd".into(),
            ("blocks", Some(block)) => {
                let part = stem.strip_prefix(&format!("blocks.{block}.")).unwrap();
                format!("v.blk.{block}.{}", PARTS.iter().find(|(old, _)| *old == part).unwrap().1)
            }
            ("merger", _) => PARTS.iter().find(|(old, _)| *old == stem).unwrap().1.into(),
            (_, index) => {
                let layer = &layers.unwrap()[index.unwrap().parse::<usize>().unwrap()];
                format!("v.deepstack.{layer}.{}", stem.rsplit('.').next().unwrap().replace("linear_", ""))
            }
        };
        out.0.insert(format!("{new}.{kind}"), (meta.clone(), bytes.clone()));
    }
    out
}

fn slices(meta: &TensorMeta, bytes: &[u8]) -> [(TensorMeta, Vec<u8>); 2] {
    let mut wide = vec![0.0; meta.shape.iter().product()];
    larder_kernels::widen(meta.kind, bytes, &mut wide);
    let [rows, channels, times, height, width] = meta.shape[..] else { panic!("a kernel has five dimensions") };
    let shape = TensorMeta::new(NumberFormat::F32, vec![rows, channels, height, width]).unwrap();
    [0, 1].map(|time| {
        let of_time = wide.chunks_exact(height * width).skip(time).step_by(times);
        (shape.clone(), of_time.flatten().flat_map(|value| value.to_le_bytes()).collect())
    })
}

#[test]
fn a_file_of_llama_cpp_gives_the_bits_of_the_checkpoint() {
    let mut compared = 0;
    for reference in Reference::all().iter().filter(|reference| reference.config["model_type"] != "qwen3_omni_moe") {
        let pool = ThreadPool::new(2, false).unwrap().into();
        let other = open_tower(&TowerFile::Mmproj(&metadata(reference)), &renamed(reference), pool).unwrap();
        let tower = reference.tower();
        for name in PICTURES {
            let picture = reference.picture(name);
            assert!(other.encode(&picture).unwrap() == tower.encode(&picture).unwrap(), "{name}");
        }
        compared += 1;
    }
    assert!(compared > 0);
}

#[test]
fn hostile_metadata_is_refused() {
    let reference = &Reference::all()[0];
    let (good, tensors) = (metadata(reference), renamed(reference));
    let open = |keys: &Value| {
        let pool = ThreadPool::single_threaded().into();
        open_tower(&TowerFile::Mmproj(keys), &tensors, pool).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(open(&good), Ok(()));
    for (key, value) in good.as_object().unwrap() {
        let worse =
            [json!(0), json!(-1), json!(4_294_967_295u64), json!(9e18), json!("x"), json!([]), json!(vec![true; 300])];
        for value in worse.iter().filter(|worse| *worse != value) {
            let mut keys = good.clone();
            keys[key] = value.clone();
            // An empty list of flags is one without a deepstack, and absent limits are those of llama.cpp.
            let may_be = key.ends_with("layers") && *value == json!([]);
            match open(&keys) {
                Ok(()) => assert!(may_be, "{key} = {value}"),
                Err(error) => assert!(error.len() < 200, "{error}"),
            }
        }
    }
}
