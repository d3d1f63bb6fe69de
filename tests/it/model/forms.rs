//! Forms in which one model is published: experts one by one or fused, alone or as the text part of a larger model.

use std::path::Path;

use larder_store::open_source;
use serde_json::{Value, json};

use crate::support::checkpoint::{NamedTensor, tensors, with_tensors};
use crate::support::fixture;
use crate::support::reference::check;

const GOLDEN: &str = "golden/qwen3_moe";

/// Puts the config of a text model into that of a larger one.
type Nest<'a> = &'a dyn Fn(Value) -> Value;

/// How the experts of a layer are stored.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Form {
    /// `gate_up_proj [experts, 2 · inter, hidden]`, `down_proj [experts, hidden, inter]`.
    Fused,
    /// The same as `[experts, in, out]`.
    Transposed,
    /// `gate_proj.weight`, `up_proj.weight` and `down_proj.weight`, each over all experts.
    Stacked,
}

/// `[rows, cols]` → `[cols, rows]`
fn transposed(values: &[f32], cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|c| values[c..].iter().step_by(cols)).copied().collect()
}

/// The tensors of the golden model with the experts of each layer in the form `form`.
fn with_experts(form: Form) -> Vec<NamedTensor> {
    let mut all = tensors(&fixture(GOLDEN));
    let experts: Vec<_> = all.extract_if(.., |t| t.name.contains(".experts.")).collect();
    let find = |name: &str| experts.iter().find(|t| t.name == name);
    let layers: Vec<String> = (0..9).map(|layer| format!("model.layers.{layer}.mlp.experts")).collect();
    for folder in layers.iter().filter(|folder| find(&format!("{folder}.0.up_proj.weight")).is_some()) {
        let of = |part: &str| -> Vec<&NamedTensor> {
            (0..).map_while(|e| find(&format!("{folder}.{e}.{part}.weight"))).collect()
        };
        let (gate, up, down) = (of("gate_proj"), of("up_proj"), of("down_proj"));
        let (count, inter, hidden) = (up.len(), up[0].shape[0], up[0].shape[1]);
        let values = |parts: &[&NamedTensor]| -> Vec<f32> { parts.iter().flat_map(|t| t.values()).collect() };
        let mut add = |part: &str, shape: [usize; 2], values: Vec<f32>| {
            all.push(NamedTensor::f32(format!("{folder}.{part}"), &[count, shape[0], shape[1]], &values));
        };
        if form == Form::Stacked {
            add("gate_proj.weight", [inter, hidden], values(&gate));
            add("up_proj.weight", [inter, hidden], values(&up));
            add("down_proj.weight", [hidden, inter], values(&down));
            continue;
        }
        let both = gate.iter().zip(&up).map(|(gate, up)| values(&[gate, up]));
        if form == Form::Fused {
            add("gate_up_proj", [2 * inter, hidden], both.flatten().collect());
            add("down_proj", [hidden, inter], values(&down));
        } else {
            add("gate_up_proj", [hidden, 2 * inter], both.flat_map(|v| transposed(&v, hidden)).collect());
            add("down_proj", [inter, hidden], down.iter().flat_map(|t| transposed(&t.values(), inter)).collect());
        }
    }
    all
}

#[test]
fn experts_over_all_in_one_tensor_give_the_logits_of_the_reference() {
    for form in [Form::Fused, Form::Transposed, Form::Stacked] {
        let dir = tempfile::tempdir().unwrap();
        with_tensors(&fixture(GOLDEN), dir.path(), &with_experts(form), |_| {});
        check(dir.path(), "config.json");
    }
}

/// The golden model as the text part of a larger one, with its tensors below `layers` and its output head below `head`.
fn nested(folder: &Path, [layers, head]: [&str; 2], nest: impl FnOnce(Value) -> Value) {
    let mut all = with_experts(Form::Fused);
    for tensor in &mut all {
        let name = tensor.name.strip_prefix("model.").map(|rest| format!("{layers}{rest}"));
        tensor.name = name.unwrap_or_else(|| tensor.name.replace("lm_head.", head));
    }
    for other in ["model.visual.merger.weight", "audio_tower.conv.weight", "mtp.norm.weight"] {
        all.push(NamedTensor::f32(other, &[2], &[1.0, 2.0]));
    }
    with_tensors(&fixture(GOLDEN), folder, &all, |config| *config = nest(config.take()));
}

#[test]
fn multimodal_checkpoints_run_as_models_of_text() {
    let text = |config: Value| {
        let outer = json!({"model_type": "qwen_of_eyes", "image_token_id": 7, "vision_config": {"depth": 2}});
        let mut outer = outer.as_object().unwrap().clone();
        outer.insert("text_config".into(), config);
        Value::Object(outer)
    };
    let omni = |config: Value| json!({"model_type": "omni", "talker_config": {}, "thinker_config": text(config)});
    let usual = ["model.", "lm_head."];
    let inside = ["model.language_model.", "lm_head."];
    let outside = ["language_model.model.", "language_model.lm_head."];
    let thinker = ["thinker.model.", "thinker.lm_head."];
    let nests: [Nest; 5] = [&text, &text, &text, &omni, &|config| config];
    let none_is_a_tower = "runs as a model of text: 2 tensors for images, video or audio are not used";
    let one_is = "a tensor for video or audio is not used";
    let told = [one_is, one_is, one_is, one_is, none_is_a_tower];
    for ((prefixes, nest), told) in [usual, inside, outside, thinker, inside].into_iter().zip(nests).zip(told) {
        let dir = tempfile::tempdir().unwrap();
        nested(dir.path(), prefixes, nest);
        check(dir.path(), "config.json");
        let notes = open_source(dir.path()).unwrap().notes();
        let want = [told, "a tensor for multi-token prediction is not used"];
        assert_eq!(notes, want, "{prefixes:?}");
    }
}
