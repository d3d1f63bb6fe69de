//! Names of a checkpoint's tensors where they are not the usual ones: those of a multimodal model's text decoder as in
//! a model of text, other names of the embedding, and which tensors are of other parts.

/// Prefixes of the text decoder's tensors and of its output head, where they are not `model.` and `lm_head.`.
const PREFIXES: [(&str, &str); 5] = [
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("thinker.model.", "thinker.lm_head."),
    ("backbone.", "lm_head."),
    ("", "head."),
];

/// Tensors of DeepSeek-V4 outside the layers: its names have no prefix.
const BARE: [(&str, &str); 3] = [("embed.", "model.embed_tokens."), ("head.", "lm_head."), ("norm.", "model.norm.")];

/// Names of tensors outside the layers, below the prefix of the layers, in Ling and Nemotron-H.
const OUTSIDE: [(&str, &str); 3] =
    [("word_embeddings.", "embed_tokens."), ("embeddings.", "embed_tokens."), ("norm_f.", "norm.")];

/// Names of the embeddings of an encoder-decoder model. Where they are one tensor, a checkpoint has it under any of
/// them.
const EMBEDDINGS: [&str; 3] = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"];

/// The other names under which a checkpoint may have the tensor `name`. In a Kimi Linear that transformers saved, the
/// MLP of a dense layer has the name of the experts.
pub(super) fn same_tensor(name: &str) -> Vec<String> {
    if EMBEDDINGS.contains(&name) {
        return EMBEDDINGS.map(str::to_owned).into();
    }
    let saved = SAVED.iter().find_map(|(end, saved)| Some(format!("{}{saved}", name.strip_suffix(end)?)));
    let dense = name.ends_with("_proj.weight").then(|| name.replace(".mlp.", ".block_sparse_moe."));
    saved.into_iter().chain(dense.filter(|dense| dense != name)).collect()
}

/// Ends of names of DeepSeek-V4, and those that transformers gives them when it saves the model.
const SAVED: [(&str, &str); 5] = [
    ("lm_head.weight", "head.weight"),
    (".hc_head_fn", ".hc_head.hc_fn"),
    (".hc_head_base", ".hc_head.hc_base"),
    (".hc_head_scale", ".hc_head.hc_scale"),
    (".attn.kv_norm.weight", ".attn.norm.weight"),
];

/// What the first two parts of a tensor's name contain if it belongs to images, video, speech or other sound.
const OTHER_PARTS: [&str; 9] =
    ["visual", "vision", "video", "audio", "projector", "talker", "code2wav", "vit_", "patch_merge"];

/// Where checkpoints have the tensors of their image tower.
const TOWERS: [&str; 4] = ["model.visual.", "visual.", "thinker.visual.", "thinker.model.visual."];

/// The prefixes under which a checkpoint has its text decoder.
#[derive(Clone, Copy)]
pub(super) struct TextNames {
    layers: &'static str,
    head: &'static str,
}

impl TextNames {
    /// Finds the prefixes of a checkpoint with tensors of these names; `None` if they are the usual ones.
    pub fn of<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Option<Self> {
        let has = |start: &str| names.clone().any(|name| name.starts_with(start));
        if has("model.layers.") {
            let renamed = OUTSIDE.iter().any(|(own, _)| has(&format!("model.{own}")));
            return renamed.then_some(TextNames { layers: "model.", head: "lm_head." });
        }
        let found = PREFIXES.into_iter().find(|(prefix, _)| has(&format!("{prefix}layers.")));
        found.map(|(layers, head)| TextNames { layers, head })
    }

    /// The name that a model of text has for the tensor `stored`.
    pub fn usual(&self, stored: &str) -> String {
        if self.layers.is_empty() && !stored.starts_with("mtp.") {
            let outside = BARE.iter().find_map(|(bare, usual)| Some((usual, stored.strip_prefix(bare)?)));
            return outside.map_or_else(|| format!("model.{stored}"), |(usual, rest)| format!("{usual}{rest}"));
        }
        match (stored.strip_prefix(self.layers), stored.strip_prefix(self.head)) {
            (Some(rest), _) => {
                let outside = OUTSIDE.iter().find_map(|(own, usual)| Some((usual, rest.strip_prefix(own)?)));
                outside.map_or_else(|| format!("model.{rest}"), |(usual, rest)| format!("model.{usual}{rest}"))
            }
            (None, Some(rest)) => format!("lm_head.{rest}"),
            (None, None) => stored.to_owned(),
        }
    }
}

/// Whether the tensor belongs to images, video, speech or other sound.
pub(super) fn is_of_other_inputs(name: &str) -> bool {
    let mut first = name.split('.').take(2);
    first.any(|part| OTHER_PARTS.iter().any(|other| part.contains(other)))
}

/// Whether the tensor belongs to the image tower.
pub(super) fn is_of_tower(name: &str) -> bool {
    TOWERS.iter().any(|prefix| name.starts_with(prefix))
}

/// The note about `tensors` tensors of other parts than the text decoder and the image tower, if the model has one;
/// `None` if there are none.
pub(super) fn other_inputs_note(tensors: usize, has_tower: bool) -> Option<String> {
    match tensors {
        0 => None,
        1 if has_tower => Some("a tensor for video or audio is not used".into()),
        n if has_tower => Some(format!("{n} tensors for video or audio are not used")),
        1 => Some("runs as a model of text: a tensor for images, video or audio is not used".into()),
        n => Some(format!("runs as a model of text: {n} tensors for images, video or audio are not used")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_found_and_replaced() {
        let usual = |names: [&'static str; 3]| {
            let found = TextNames::of(names.into_iter());
            names.map(|name| found.map_or(name.to_owned(), |found| found.usual(name)))
        };
        let want = ["model.layers.0.a", "lm_head.weight", "model.visual.a"];
        assert_eq!(usual(want), want);
        assert_eq!(usual(["model.language_model.layers.0.a", "lm_head.weight", "model.visual.a"]), want);
        let nested = ["language_model.model.layers.0.a", "language_model.lm_head.weight", "model.visual.a"];
        assert_eq!(usual(nested), want);
        assert_eq!(usual(["thinker.model.layers.0.a", "thinker.lm_head.weight", "model.visual.a"]), want);
        assert_eq!(usual(["layers.0.a", "head.weight", "visual.a"]), want);
        let bare = ["layers.0.a", "embed.weight", "norm.weight"];
        let bare_usual = ["model.layers.0.a", "model.embed_tokens.weight", "model.norm.weight"];
        assert_eq!(usual(bare), bare_usual);
        for own in ["backbone", "model"] {
            let outside = [".layers.0.a", ".embeddings.weight", ".norm_f.weight"].map(|name| format!("{own}{name}"));
            let found = TextNames::of(outside.iter().map(String::as_str)).unwrap();
            assert_eq!(outside.map(|name| found.usual(&name)), bare_usual);
        }
        let embedding = ["model.layers.0.a", "lm_head.weight", "model.word_embeddings.weight"];
        assert_eq!(usual(embedding), ["model.layers.0.a", "lm_head.weight", "model.embed_tokens.weight"]);
    }

    #[test]
    fn embeddings_of_encoder_and_decoder_may_be_one_tensor() {
        assert_eq!(same_tensor("decoder.embed_tokens.weight"), EMBEDDINGS);
        assert!(same_tensor("model.embed_tokens.weight").is_empty());
    }

    #[test]
    fn tensors_of_deepseek_v4_may_have_the_names_that_transformers_saves() {
        assert_eq!(same_tensor("model.hc_head_fn"), ["model.hc_head.hc_fn"]);
        assert_eq!(same_tensor("model.layers.3.attn.kv_norm.weight"), ["model.layers.3.attn.norm.weight"]);
    }

    #[test]
    fn dense_layers_of_kimi_linear_may_have_the_names_of_experts() {
        let dense = same_tensor("model.layers.0.mlp.up_proj.weight");
        assert_eq!(dense, ["model.layers.0.block_sparse_moe.up_proj.weight"]);
    }

    #[test]
    fn tensors_of_other_inputs_are_recognised() {
        for name in [
            "model.visual.blocks.0.attn.qkv.weight",
            "vision_tower.a",
            "mm_projector.proj.0.weight",
            "thinker.audio_tower.conv1.weight",
            "talker.model.layers.0.a",
            "vit_large_projector.weight",
            "patch_merge_mlp.linear_1.weight",
        ] {
            assert!(is_of_other_inputs(name), "{name}");
        }
        for name in ["model.layers.0.audio.weight", "lm_head.weight", "model.norm.weight", "mtp.layers.0.a"] {
            assert!(!is_of_other_inputs(name), "{name}");
        }
    }
}
