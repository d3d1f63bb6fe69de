//! Keys of configs that change nothing about the result of inference, in any architecture that does not read them.

use serde_json::Value;

/// Of training, initialisation, sampling, bookkeeping, and the choice among implementations that compute the same.
const KEYS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "for_llm_compressor",
    "id2label",
    "index_share_for_mtp_iteration",
    "init_method",
    "init_std",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_logits_to_keep",
    "num_mtp_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_mamba_kernels",
    "use_mtp",
];

/// How keys begin: initialisation, the layer for multi-token prediction, which is left out or read by its architecture,
/// operations that are joined in one kernel, and encoders of pictures.
const BEGINNINGS: [&str; 5] = ["initializer_", "mtp", "fuse_", "vit_", "anyres_"];

/// How keys end: tokens, which those of the tokenizer and of `generation_config.json` state for a run, and dropout.
const ENDINGS: [&str; 5] = ["_id", "_token_ids", "_token_index", "_dropout", "dropout_prob"];

/// What keys contain: losses and noise of training, and parts that are computed in f32, as everything is.
const WORDS: [&str; 4] = ["aux_loss", "z_loss", "jitter_noise", "fp32"];

/// Whether a key that its architecture does not read changes nothing, whatever its value.
pub fn is_neutral(key: &str) -> bool {
    let begins = BEGINNINGS.iter().any(|start| key.starts_with(start));
    let ends = ENDINGS.iter().any(|end| key.ends_with(end));
    begins || ends || WORDS.iter().any(|word| key.contains(word)) || KEYS.contains(&key)
}

/// Whether a value turns nothing on.
pub fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(keys) => keys.is_empty(),
    }
}
