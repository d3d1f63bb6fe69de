//! A strict reader of `config.json`: every key is used, known to have no effect on inference, or an error.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// Keys without effect on the result of inference: training, sampling defaults, bookkeeping, and keys of the hub.
pub const NEUTRAL_KEYS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "input_jitter_noise",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "mtp_layer_types",
    "mtp_mlp_layer_types",
    "mtp_num_hidden_layers",
    "mtp_transformer_layers",
    "mtp_use_dedicated_embeddings",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_mtp_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "sep_token_id",
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
    "use_bfloat16",
    "use_cache",
];

/// Upper limit of every size and count: far above any model, and small enough that products of sizes do not overflow.
const MAX_SIZE: u64 = 1 << 24;

/// A config, which records the keys that have been read.
pub struct Config<'a> {
    keys: &'a Map<String, Value>,
    /// Path of this object in messages: empty, or `rope_scaling.` and the like.
    prefix: &'static str,
    used: BTreeSet<String>,
    /// Further names of keys, behind their usual ones.
    further_names: &'static [(&'static str, &'static str)],
    /// Keys that count as absent.
    left_out: &'static [&'static str],
    /// Whether the layer for multi-token prediction is used.
    pub(crate) with_mtp: bool,
}

impl<'a> Config<'a> {
    /// Reads `value`, which must be a JSON object.
    pub fn new(value: &'a Value) -> Result<Self> {
        let keys = value.as_object().ok_or_else(|| config_error("the file is not a JSON object"))?;
        Ok(Self::inner(keys, ""))
    }

    fn inner(keys: &'a Map<String, Value>, prefix: &'static str) -> Self {
        Config { keys, prefix, used: BTreeSet::new(), further_names: &[], left_out: &[], with_mtp: false }
    }

    /// Lets keys have a further name each, stated behind the usual one.
    pub fn also_named(&mut self, names: &'static [(&'static str, &'static str)]) {
        self.further_names = names;
    }

    /// Lets these keys count as absent, whatever their values, which have no effect.
    pub fn leave_out(&mut self, names: &'static [&'static str]) {
        self.left_out = names;
        self.ignore(names);
    }

    /// The value of the first of `names` that is present; `None` if it is null.
    fn get(&mut self, names: &[&str]) -> Option<&'a Value> {
        let further = self.further_names.iter().filter(|(usual, _)| names.contains(usual)).map(|(_, further)| *further);
        let names: Vec<&str> = names.iter().copied().chain(further).collect();
        self.used.extend(names.iter().map(|n| n.to_string()));
        let kept = names.iter().filter(|n| !self.left_out.contains(n));
        kept.filter_map(|n| self.keys.get(*n)).next().filter(|v| !v.is_null())
    }

    /// Whether a key is present, also with the value null.
    pub fn contains(&self, name: &str) -> bool {
        self.keys.contains_key(name) && !self.left_out.contains(&name)
    }

    /// Whether the value of a key is a list.
    pub fn is_list(&self, name: &str) -> bool {
        self.keys.get(name).is_some_and(Value::is_array)
    }

    /// Whether a key is present and not null.
    pub fn is_set(&self, name: &str) -> bool {
        self.keys.get(name).is_some_and(|v| !v.is_null())
    }

    fn type_error(&self, name: &str, want: &str, got: &Value) -> ModelError {
        let mut shown = got.to_string();
        if let Some((cut, _)) = shown.char_indices().nth(60) {
            shown.truncate(cut);
            shown.push('…');
        }
        config_error(format!("{}{name} is {shown}, not {want}", self.prefix))
    }

    /// A size of at least one, which is required. Messages use the first name.
    pub fn size(&mut self, names: &[&str]) -> Result<usize> {
        match self.opt_size(names)? {
            Some(n) => Ok(n),
            None => Err(config_error(format!("{}{} is missing", self.prefix, names[0]))),
        }
    }

    /// A size of at least one, or `default`.
    pub fn size_or(&mut self, names: &[&str], default: usize) -> Result<usize> {
        Ok(self.opt_size(names)?.unwrap_or(default))
    }

    /// A size of at least one, or `None`.
    pub fn opt_size(&mut self, names: &[&str]) -> Result<Option<usize>> {
        match self.opt_count(names)? {
            Some(0) => Err(config_error(format!("{}{} is 0; it must be at least 1", self.prefix, names[0]))),
            other => Ok(other),
        }
    }

    /// A size of at least one that may exceed [`MAX_SIZE`], as numbers of rows of a table do; or `default`.
    pub fn wide_size_or(&mut self, name: &str, default: u64) -> Result<u64> {
        let Some(v) = self.get(&[name]) else { return Ok(default) };
        let size = v.as_u64().filter(|n| (1..=u64::from(u32::MAX)).contains(n));
        size.ok_or_else(|| self.type_error(name, &format!("a size from 1 to {}", u32::MAX), v))
    }

    /// A size of at least one, stated once or in a list with the same for every layer; or `None`.
    pub fn opt_size_of_layers(&mut self, names: &[&str], layers: usize) -> Result<Option<usize>> {
        let Some(Value::Array(list)) = self.get(names) else { return self.opt_size(names) };
        let first = list.first().and_then(Value::as_u64).filter(|n| (1..=MAX_SIZE).contains(n));
        match first {
            Some(n) if list.len() >= layers && list.iter().all(|v| v.as_u64() == first) => Ok(Some(n as usize)),
            _ => Err(config_error(format!(
                "{}{} must be the same size, at least 1, for each of {layers} layers",
                self.prefix, names[0]
            ))),
        }
    }

    /// A size of at least one, or `None` if the value is `auto`.
    pub fn opt_size_or_auto(&mut self, names: &[&str]) -> Result<Option<usize>> {
        match self.get(names) {
            Some(Value::String(text)) if text == "auto" => Ok(None),
            _ => self.opt_size(names),
        }
    }

    /// A count that may be zero, or `default`.
    pub fn count_or(&mut self, names: &[&str], default: usize) -> Result<usize> {
        Ok(self.opt_count(names)?.unwrap_or(default))
    }

    /// A count that may be zero, or `None`.
    pub fn opt_count(&mut self, names: &[&str]) -> Result<Option<usize>> {
        let Some(v) = self.get(names) else { return Ok(None) };
        match v.as_u64() {
            Some(n) if n <= MAX_SIZE => Ok(Some(n as usize)),
            _ => Err(self.type_error(names[0], &format!("a count of at most {MAX_SIZE}"), v)),
        }
    }

    /// A finite number, or `default`.
    pub fn number_or(&mut self, name: &str, default: f64) -> Result<f64> {
        Ok(self.opt_number(name)?.unwrap_or(default))
    }

    /// A finite number, or `None`.
    pub fn opt_number(&mut self, name: &str) -> Result<Option<f64>> {
        let Some(v) = self.get(&[name]) else { return Ok(None) };
        match v.as_f64().filter(|n| n.is_finite()) {
            Some(n) => Ok(Some(n)),
            None => Err(self.type_error(name, "a number", v)),
        }
    }

    /// A finite number, which is required.
    pub fn number(&mut self, name: &str) -> Result<f64> {
        self.opt_number(name)?.ok_or_else(|| config_error(format!("{}{name} is missing", self.prefix)))
    }

    /// A positive number, or `default`.
    pub fn positive_or(&mut self, name: &str, default: f64) -> Result<f64> {
        match self.number_or(name, default)? {
            n if n > 0.0 => Ok(n),
            n => Err(config_error(format!("{}{name} is {n}, not a positive number", self.prefix))),
        }
    }

    /// A boolean, or `default`.
    pub fn flag_or(&mut self, name: &str, default: bool) -> Result<bool> {
        let Some(v) = self.get(&[name]) else { return Ok(default) };
        v.as_bool().ok_or_else(|| self.type_error(name, "true or false", v))
    }

    /// A string, or `None`.
    pub fn opt_text(&mut self, name: &str) -> Result<Option<&'a str>> {
        let Some(v) = self.get(&[name]) else { return Ok(None) };
        v.as_str().map(Some).ok_or_else(|| self.type_error(name, "a string", v))
    }

    /// A list of finite numbers, or `None`.
    pub fn opt_numbers(&mut self, name: &str) -> Result<Option<Vec<f64>>> {
        self.opt_list(name, "a list of numbers", |v| v.as_f64().filter(|n| n.is_finite()))
    }

    /// A lower and an upper limit, each of which may be infinite; or `None`.
    pub fn opt_limits(&mut self, name: &str) -> Result<Option<[f64; 2]>> {
        let limits = self.opt_list(name, "a lower and an upper limit", number_or_infinity)?;
        match limits.as_deref() {
            None => Ok(None),
            Some(&[least, most]) if least <= most => Ok(Some([least, most])),
            _ => Err(config_error(format!("{}{name} must be a lower and an upper limit", self.prefix))),
        }
    }

    /// A list of finite numbers, of which those that are null get the value `null`; or `None`.
    pub fn opt_numbers_or(&mut self, name: &str, null: f64) -> Result<Option<Vec<f64>>> {
        let number = |v: &Value| if v.is_null() { Some(null) } else { v.as_f64().filter(|n| n.is_finite()) };
        self.opt_list(name, "a list of numbers", number)
    }

    /// A list of counts or layer indices, or `None`.
    pub fn opt_counts(&mut self, name: &str) -> Result<Option<Vec<usize>>> {
        self.opt_list(name, "a list of counts", |v| v.as_u64().filter(|n| *n <= MAX_SIZE).map(|n| n as usize))
    }

    /// A list of integers, or `None`.
    pub fn opt_integers(&mut self, name: &str) -> Result<Option<Vec<i64>>> {
        self.opt_list(name, "a list of integers", Value::as_i64)
    }

    /// A token, or the first of a list of tokens; or `None`.
    pub fn opt_token(&mut self, name: &str) -> Result<Option<u32>> {
        let all =
            if self.is_list(name) { self.opt_counts(name)? } else { self.opt_count(&[name])?.map(|token| vec![token]) };
        Ok(all.and_then(|all| all.first().map(|token| *token as u32)))
    }

    /// A list of counts, which may be a text with commas between them; or `None`.
    pub fn opt_counts_or_text(&mut self, name: &str) -> Result<Option<Vec<usize>>> {
        let Some(Value::String(text)) = self.get(&[name]) else { return self.opt_counts(name) };
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        let counts: Option<Vec<usize>> = parts.map(|part| part.parse().ok()).collect();
        let counts = counts.filter(|counts| counts.iter().all(|n| *n as u64 <= MAX_SIZE));
        counts.map(Some).ok_or_else(|| self.type_error(name, "a list of counts", &Value::String(text.clone())))
    }

    /// Lists of counts, or `None`.
    pub fn opt_lists_of_counts(&mut self, name: &str) -> Result<Option<Vec<Vec<usize>>>> {
        let Some(value) = self.get(&[name]) else { return Ok(None) };
        let count = |v: &Value| v.as_u64().filter(|n| *n <= MAX_SIZE).map(|n| n as usize);
        let list = |v: &Value| v.as_array()?.iter().map(count).collect();
        let lists = value.as_array().and_then(|lists| lists.iter().map(list).collect());
        lists.map(Some).ok_or_else(|| self.type_error(name, "a list of lists of counts", value))
    }

    /// A list of strings, or `None`.
    pub fn opt_texts(&mut self, name: &str) -> Result<Option<Vec<&'a str>>> {
        self.opt_list(name, "a list of strings", |v| v.as_str())
    }

    fn opt_list<T>(&mut self, name: &str, want: &str, item: impl Fn(&'a Value) -> Option<T>) -> Result<Option<Vec<T>>> {
        let Some(v) = self.get(&[name]) else { return Ok(None) };
        let items = v.as_array().and_then(|list| list.iter().map(item).collect());
        items.map(Some).ok_or_else(|| self.type_error(name, want, v))
    }

    /// A nested object, or `None`.
    pub fn opt_object(&mut self, name: &str, prefix: &'static str) -> Result<Option<Config<'a>>> {
        let Some(v) = self.get(&[name]) else { return Ok(None) };
        match v.as_object() {
            Some(keys) => Ok(Some(Config::inner(keys, prefix))),
            None => Err(self.type_error(name, "an object", v)),
        }
    }

    /// Declares keys that configs of this architecture have, but that do not affect its results.
    pub fn ignore(&mut self, names: &[&str]) {
        self.used.extend(names.iter().map(|n| n.to_string()));
    }

    /// Fails on a key that has not been read and might change the result. Keys that are `null` or `false` pass, since
    /// they enable nothing.
    pub fn finish(self) -> Result<()> {
        for (key, value) in self.keys {
            let neutral = self.prefix.is_empty() && NEUTRAL_KEYS.contains(&key.as_str());
            let off = value.is_null() || *value == Value::Bool(false);
            if !self.used.contains(key) && !neutral && !off {
                let message = format!("{}{key} is not supported and might change the result", self.prefix);
                return Err(config_error(message));
            }
        }
        Ok(())
    }
}

/// A number, which is an object in a newer config if it is infinite.
fn number_or_infinity(value: &Value) -> Option<f64> {
    match value.get("__float__").unwrap_or(value) {
        Value::String(name) if name == "Infinity" => Some(f64::INFINITY),
        Value::String(name) if name == "-Infinity" => Some(f64::NEG_INFINITY),
        other => other.as_f64(),
    }
}

/// An error about the config.
pub fn config_error(message: impl Into<String>) -> ModelError {
    ModelError::Config(message.into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_keys_are_errors_unless_they_are_off() {
        let check = |v: Value| Config::new(&v).unwrap().finish().map_err(|e| e.to_string());
        assert!(check(json!({"use_cache": true, "attention_flavour": null, "fancy": false})).is_ok());
        assert_eq!(
            check(json!({"attention_flavour": "x"})).unwrap_err(),
            "config.json: attention_flavour is not supported and might change the result"
        );
    }

    #[test]
    fn keys_may_have_further_names() {
        let v = json!({"model_max_length": 8, "renormalise": false});
        let mut c = Config::new(&v).unwrap();
        c.also_named(&[("context", "model_max_length"), ("norm", "renormalise")]);
        assert_eq!((c.size(&["context"]).unwrap(), c.flag_or("norm", true).unwrap()), (8, false));
        assert!(c.size(&["other"]).is_err() && c.finish().is_ok());
        let mut c = Config::new(&v).unwrap();
        c.leave_out(&["model_max_length"]);
        assert_eq!((c.size_or(&["model_max_length"], 3).unwrap(), c.contains("model_max_length")), (3, false));
    }

    #[test]
    fn sizes_are_bounded_and_typed() {
        let v = json!({"zero": 0, "huge": 1e18 as u64, "minus": -4, "text": "8", "float": 1.5, "ok": 7});
        let mut c = Config::new(&v).unwrap();
        for key in ["zero", "huge", "minus", "text", "float", "absent"] {
            assert!(c.size(&[key]).is_err(), "{key}");
        }
        assert_eq!(c.size(&["absent", "ok"]).unwrap(), 7);
    }

    #[test]
    fn lists_may_have_nulls_or_be_texts_where_the_reader_says_so() {
        let v = json!({"text": "3, 4,5,", "list": [3, 4], "bad": "3,x", "huge": "99999999999", "nulls": [null, 1.5]});
        let mut c = Config::new(&v).unwrap();
        assert_eq!(c.opt_counts_or_text("text").unwrap(), Some(vec![3, 4, 5]));
        assert_eq!(c.opt_counts_or_text("list").unwrap(), Some(vec![3, 4]));
        assert_eq!(c.opt_counts_or_text("absent").unwrap(), None);
        assert!(c.opt_counts_or_text("bad").is_err() && c.opt_counts_or_text("huge").is_err());
        assert_eq!(c.opt_numbers_or("nulls", 0.0).unwrap(), Some(vec![0.0, 1.5]));
        assert!(c.opt_numbers_or("text", 0.0).is_err());
    }

    #[test]
    fn limits_may_be_infinite_and_are_in_order() {
        let read = |v: Value| Config::new(&json!({ "k": v })).unwrap().opt_limits("k").ok();
        assert_eq!(read(json!([0.0, {"__float__": "Infinity"}])), Some(Some([0.0, f64::INFINITY])));
        assert_eq!(read(json!([{"__float__": "-Infinity"}, 2])), Some(Some([f64::NEG_INFINITY, 2.0])));
        assert_eq!((read(json!(null)), read(json!([1.5, 1.5]))), (Some(None), Some(Some([1.5, 1.5]))));
        for bad in [json!([2, 1]), json!([1]), json!(["x", 1]), json!([{"__float__": "NaN"}, 1]), json!(3)] {
            assert_eq!(read(bad.clone()), None, "{bad}");
        }
    }

    #[test]
    fn a_size_may_be_auto() {
        let v = json!({"auto": "auto", "given": 3, "other": "some"});
        let mut c = Config::new(&v).unwrap();
        assert_eq!((c.opt_size_or_auto(&["auto"]).unwrap(), c.opt_size_or_auto(&["given"]).unwrap()), (None, Some(3)));
        assert!(c.opt_size_or_auto(&["absent"]).unwrap().is_none() && c.opt_size_or_auto(&["other"]).is_err());
    }

    #[test]
    fn a_size_of_layers_is_one_number_or_the_same_for_all() {
        let read = |v: Value| Config::new(&json!({ "k": v })).unwrap().opt_size_of_layers(&["k"], 2).ok();
        assert_eq!(read(json!(3)), Some(Some(3)));
        assert_eq!(read(json!(null)), Some(None));
        assert_eq!((read(json!([3, 3])), read(json!([3, 3, 3]))), (Some(Some(3)), Some(Some(3))));
        for other in [json!([3]), json!([3, 4]), json!([]), json!([0, 0]), json!([3, "3"]), json!([1e18, 1e18])] {
            assert_eq!(read(other.clone()), None, "{other}");
        }
    }
}
