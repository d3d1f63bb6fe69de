//! How a source is opened, and what a store remembers of it: which of its config a user has larder ignore.

use larder_core::IGNORED_KEY;
use serde_json::Value;

use super::MtpTensors;

/// How a source is opened.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct SourceOptions {
    /// Whether the tensors of its layer for multi-token prediction are there.
    pub mtp: MtpTensors,
    /// Keys of its config that count as absent, although they might change the result.
    pub ignored_keys: Vec<String>,
}

impl From<MtpTensors> for SourceOptions {
    fn from(mtp: MtpTensors) -> Self {
        SourceOptions { mtp, ..SourceOptions::default() }
    }
}

/// The keys that a config says are ignored.
pub(crate) fn ignored_keys(config: &Value) -> Vec<String> {
    let names = config[IGNORED_KEY].as_array().into_iter().flatten();
    names.filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

/// Makes a config say which keys are ignored.
pub(crate) fn set_ignored(config: &mut Value, names: &[String]) {
    let Some(keys) = config.as_object_mut() else { return };
    match names {
        [] => _ = keys.remove(IGNORED_KEY),
        names => _ = keys.insert(IGNORED_KEY.to_owned(), names.into()),
    }
}

/// The note about the keys of a config that are ignored; `None` if there are none.
pub(crate) fn ignored_note(config: &Value) -> Option<String> {
    match &ignored_keys(config)[..] {
        [] => None,
        names => {
            Some(format!("ignores {} of config.json, as asked: the output may not be the model's", names.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_config_says_which_keys_are_ignored() {
        let mut config = json!({"a": 1});
        set_ignored(&mut config, &["a".into(), "b.c".into()]);
        assert_eq!(ignored_keys(&config), ["a", "b.c"]);
        assert!(ignored_note(&config).is_some_and(|note| note.starts_with("ignores a, b.c of config.json")));
        set_ignored(&mut config, &[]);
        assert_eq!((config, ignored_note(&Value::Null)), (json!({"a": 1}), None));
    }
}
