//! `generation_config.json`: end-of-text ids and recommended sampling.

use serde_json::{Map, Value};

use super::tokenizer_config::{ConfigError, json_object};

const FILE: &str = "generation_config.json";
const MODEL_FILE: &str = "config.json";

/// The settings of a `generation_config.json`; `None` for a key that the file does not have.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct GenerationConfig {
    /// Token ids that end the text (EOS).
    pub eos: Vec<u32>,
    /// Token id that begins a text (BOS).
    pub bos: Option<u32>,
    /// Whether to sample; otherwise generation is greedy.
    pub do_sample: Option<bool>,
    /// Divides the logits; 0 is greedy.
    pub temperature: Option<f32>,
    /// Tokens that are kept, the most likely first.
    pub top_k: Option<usize>,
    /// Probability of the tokens that are kept together.
    pub top_p: Option<f32>,
    /// Least probability of a token that is kept, relative to the most likely.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that were there before.
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// These settings of sampling, with those that `other` has in their place. A temperature turns sampling on or off.
    pub fn with_sampling(self, other: &GenerationConfig) -> Self {
        GenerationConfig {
            do_sample: other.temperature.map(|t| t != 0.0).or(self.do_sample),
            temperature: other.temperature.or(self.temperature),
            top_k: other.top_k.or(self.top_k),
            top_p: other.top_p.or(self.top_p),
            min_p: other.min_p.or(self.min_p),
            repetition_penalty: other.repetition_penalty.or(self.repetition_penalty),
            ..self
        }
    }

    /// Reads a model's `generation_config.json`, if it has one. Missing EOS and BOS ids come from `config.json`.
    pub fn from_bytes(generation: Option<&[u8]>, config: &[u8]) -> Result<Self, ConfigError> {
        let mut own = match generation {
            Some(bytes) => Self::read(&Keys { file: FILE, json: json_object(FILE, bytes)? })?,
            None => Self::default(),
        };
        let model = Keys { file: MODEL_FILE, json: json_object(MODEL_FILE, config)? };
        let thinker = model.json.get("thinker_config").and_then(Value::as_object).unwrap_or(&model.json);
        let text = match thinker.get("text_config") {
            Some(Value::Object(text)) => Keys { file: MODEL_FILE, json: text.clone() },
            _ => Keys { file: MODEL_FILE, json: Map::new() },
        };
        for keys in [model, text] {
            if own.eos.is_empty() {
                own.eos = keys.ids("eos_token_id")?;
            }
            own.bos = own.bos.or(keys.ids("bos_token_id")?.first().copied());
        }
        Ok(own)
    }

    fn read(keys: &Keys) -> Result<Self, ConfigError> {
        Ok(GenerationConfig {
            eos: keys.ids("eos_token_id")?,
            bos: keys.ids("bos_token_id")?.first().copied(),
            do_sample: keys.get("do_sample", "true or false", Value::as_bool)?,
            temperature: keys.number("temperature")?,
            top_k: keys.get("top_k", "a whole number", Value::as_u64)?.map(|k| k as usize),
            top_p: keys.number("top_p")?,
            min_p: keys.number("min_p")?,
            repetition_penalty: keys.number("repetition_penalty")?,
        })
    }
}

struct Keys {
    file: &'static str,
    json: Map<String, Value>,
}

impl Keys {
    fn get<T>(&self, key: &str, expected: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>, ConfigError> {
        match self.json.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(ConfigError::new(self.file, format!("`{key}` is not {expected}"))),
            },
        }
    }

    fn number(&self, key: &str) -> Result<Option<f32>, ConfigError> {
        self.get(key, "a number", |value| value.as_f64().map(|number| number as f32))
    }

    /// A token id or a list of token ids.
    fn ids(&self, key: &str) -> Result<Vec<u32>, ConfigError> {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let list = |value: &Value| match value {
            Value::Array(list) => list.iter().map(id).collect(),
            value => Some(vec![id(value)?]),
        };
        Ok(self.get(key, "a token id or a list of token ids", list)?.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(generation: &str, config: &str) -> Result<GenerationConfig, ConfigError> {
        GenerationConfig::from_bytes(Some(generation.as_bytes()), config.as_bytes())
    }

    #[test]
    fn known_keys_are_read_and_the_rest_ignored() {
        let got = read(
            r#"{"eos_token_id": [7, 9], "bos_token_id": 1, "do_sample": true, "temperature": 0.5, "top_k": 20,
                "top_p": 0.9, "min_p": 0.125, "repetition_penalty": 1.25, "transformers_version": "4.45.0"}"#,
            r#"{"eos_token_id": 3, "bos_token_id": 4}"#,
        )
        .unwrap();
        let expected = GenerationConfig {
            eos: vec![7, 9],
            bos: Some(1),
            do_sample: Some(true),
            temperature: Some(0.5),
            top_k: Some(20),
            top_p: Some(0.9),
            min_p: Some(0.125),
            repetition_penalty: Some(1.25),
        };
        assert_eq!(got, expected);
    }

    #[test]
    fn ids_fall_back_to_the_model() {
        let got = GenerationConfig::from_bytes(None, br#"{"eos_token_id": [5], "bos_token_id": null}"#).unwrap();
        assert_eq!((got.eos, got.bos), (vec![5], None));
        let nested = read("{}", r#"{"text_config": {"eos_token_id": 6, "bos_token_id": 2}}"#).unwrap();
        assert_eq!((nested.eos, nested.bos), (vec![6], Some(2)));
        assert!(read("{}", r#"{"eos_token_id": null}"#).unwrap().eos.is_empty());
    }

    #[test]
    fn wrong_types_are_named() {
        for (generation, config, part) in [
            (r#"{"eos_token_id": "x"}"#, "{}", "generation_config.json: `eos_token_id`"),
            (r#"{"eos_token_id": [-1]}"#, "{}", "generation_config.json: `eos_token_id`"),
            (r#"{"bos_token_id": 4294967296}"#, "{}", "generation_config.json: `bos_token_id`"),
            (r#"{"temperature": "hot"}"#, "{}", "`temperature`"),
            (r#"{"top_k": 1.5}"#, "{}", "`top_k`"),
            (r#"{"do_sample": 1}"#, "{}", "`do_sample`"),
            ("{}", r#"{"eos_token_id": {}}"#, "config.json: `eos_token_id`"),
            ("[]", "{}", "generation_config.json: is not a JSON object"),
            ("{}", "nope", "config.json: is not valid JSON"),
        ] {
            let error = read(generation, config).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
