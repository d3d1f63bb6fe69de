//! A strict reader of `config.json`: every key is used, known to have no effect on inference, or refused.
//!
//! Keys are refused together: those whose value an architecture does not have ([`Config::only`]) while it reads the
//! config, and those that it has not read behind it ([`Config::judge`]). What a model cannot be built without is an
//! error at once.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

mod neutral;
mod refusal;
mod text_config;

pub use neutral::{is_neutral, is_off};
use refusal::shown;
pub use refusal::{Refusal, Refusals, refused};
pub use text_config::{TextConfig, text_config, without_ignored};

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
    /// Refusals so far, of this object and those around it.
    refusals: Refusals,
    /// Whether the layer for multi-token prediction is used.
    pub(crate) with_mtp: bool,
}

impl<'a> Config<'a> {
    /// Reads `value`, which must be a JSON object.
    pub fn new(value: &'a Value) -> Result<Self> {
        let keys = value.as_object().ok_or_else(|| config_error("the file is not a JSON object"))?;
        Ok(Self::inner(keys, "", Refusals::default()))
    }

    fn inner(keys: &'a Map<String, Value>, prefix: &'static str, refusals: Refusals) -> Self {
        let used = BTreeSet::new();
        Config { keys, prefix, used, further_names: &[], left_out: &[], refusals, with_mtp: false }
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
        config_error(format!("{}{name} is {}, not {want}", self.prefix, shown(&got.to_string())))
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
            Some(keys) => Ok(Some(Config::inner(keys, prefix, self.refusals.clone()))),
            None => Err(self.type_error(name, "an object", v)),
        }
    }

    /// Declares keys that configs of this architecture have, but that do not affect its results.
    pub fn ignore(&mut self, names: &[&str]) {
        self.used.extend(names.iter().map(|n| n.to_string()));
    }

    /// Fails if the number of experts of a token is stated as null: there is no default for it.
    pub fn require_experts_per_token(&self) -> Result<()> {
        const KEY: &str = "num_experts_per_tok";
        match self.keys.get(KEY) {
            Some(Value::Null) => {
                Err(config_error(format!("{KEY} is null; it must be the number of experts that a token uses")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses any value of a key but `known`, which the architecture has anyway. A key that is absent or null passes.
    pub fn only(&mut self, name: &str, known: impl Into<Value>) {
        self.only_of(name, &[known.into()]);
    }

    /// As [`only`](Self::only), with several values that mean the same.
    pub fn only_of(&mut self, name: &str, known: &[Value]) {
        if let Some(value) = self.get(&[name]).filter(|value| !known.iter().any(|known| same(known, value))) {
            let known: Vec<String> = known.iter().map(|known| shown(&known.to_string())).collect();
            let why =
                if known.is_empty() { "this model has it anyway" } else { &format!("only {}", known.join(" or ")) };
            self.refuse(name, value, why);
        }
    }

    /// Refuses a key, as one of several.
    fn refuse(&self, name: &str, value: &Value, why: &str) {
        self.refusals.borrow_mut().push(Refusal::new(format!("{}{name}", self.prefix), value, why));
    }

    /// Refuses the keys of a nested object that have not been read and turn something on.
    pub fn finish(self) {
        let unread = self.keys.iter().filter(|(key, value)| !self.used.contains(*key) && !is_off(value));
        let refusals = unread.map(|(key, value)| Refusal::unknown(format!("{}{key}", self.prefix), value));
        self.refusals.borrow_mut().extend(refusals);
    }

    /// All refusals of the config, those of keys that have not been read among them. A key of `stated` says what the
    /// model does anyway, and may have one of these values; others may be neutral, or turn nothing on.
    pub fn judge(mut self, stated: &[(&str, Vec<Value>)]) -> Vec<Refusal> {
        let unread = |used: &BTreeSet<String>, key: &str| !used.contains(key) && !is_neutral(key);
        for (key, values) in stated {
            // Some configs turn off with false what others state as a number.
            let absent = self.keys.get(*key) == Some(&Value::Bool(false)) && values.iter().all(Value::is_number);
            if unread(&self.used, key) && !absent {
                self.only_of(key, values);
            }
        }
        self.ignore(&self.keys.keys().filter(|key| is_neutral(key)).map(String::as_str).collect::<Vec<_>>());
        let refusals = self.refusals.clone();
        self.finish();
        refusals.take()
    }
}

/// Whether two values of a key mean the same: 1 and 1.0 do, and numbers that are one in f32, in which they are computed
/// with.
fn same(a: &Value, b: &Value) -> bool {
    let number = |value: &Value| value.as_f64().map(|number| number as f32);
    a == b || number(a).is_some_and(|a| number(b) == Some(a))
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
mod tests;
