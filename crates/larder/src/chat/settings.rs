//! The settings that can be changed during a chat.

use anyhow::{Result, anyhow, bail};
use larder_engine::Sampling;
use larder_policy::eviction::{BELADY, EvictionSpec, POLICIES};
use larder_policy::routing::{RoutingSpec, STRATEGIES};
use larder_policy::spec::Knob;
use larder_text::{ContextFull, GenerationConfig};
use serde_json::{Map, Value, json};

use crate::cli::ThinkingFlag;
use crate::cli::chat::ChatArgs;

/// How answers are generated and shown.
#[derive(Clone)]
pub struct Settings {
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Random seed.
    pub seed: u64,
    /// Maximum number of tokens of an answer.
    pub max_tokens: Option<usize>,
    /// What happens when the context is full.
    pub context_full: ContextFull,
    /// Routing strategy.
    pub routing: RoutingSpec,
    /// Eviction policy of the cache.
    pub eviction: EvictionSpec,
    /// How reasoning is shown.
    pub thinking: ThinkingFlag,
    /// Whether statistics are shown after each answer.
    pub footer: bool,
}

/// A setting with its name.
struct Row {
    name: &'static str,
    /// Its range or unit, for the table of settings.
    about: &'static str,
    /// Its values that have names.
    values: fn() -> Vec<String>,
    show: fn(&Settings) -> String,
    set: fn(&mut Settings, &str) -> Result<()>,
}

/// All settings.
const TABLE: &[Row] = &[
    Row {
        name: "temperature",
        about: "0 is greedy",
        values: Vec::new,
        show: |s| s.sampling.temperature.to_string(),
        set: |s, v| number(v).map(|n| s.sampling.temperature = n),
    },
    Row {
        name: "top-k",
        about: "a number of tokens; 0 is off",
        values: Vec::new,
        show: |s| s.sampling.top_k.to_string(),
        set: |s, v| number(v).map(|n| s.sampling.top_k = n),
    },
    Row {
        name: "top-p",
        about: "a share; 1 is off",
        values: Vec::new,
        show: |s| s.sampling.top_p.to_string(),
        set: |s, v| number(v).map(|n| s.sampling.top_p = n),
    },
    Row {
        name: "min-p",
        about: "a share; 0 is off",
        values: Vec::new,
        show: |s| s.sampling.min_p.to_string(),
        set: |s, v| number(v).map(|n| s.sampling.min_p = n),
    },
    Row {
        name: "repetition-penalty",
        about: "1 is off",
        values: Vec::new,
        show: |s| s.sampling.repetition_penalty.to_string(),
        set: |s, v| number(v).map(|n| s.sampling.repetition_penalty = n),
    },
    Row {
        name: "seed",
        about: "that of the first answer",
        values: Vec::new,
        show: |s| s.seed.to_string(),
        set: |s, v| number(v).map(|n| s.seed = n),
    },
    Row {
        name: "max-tokens",
        about: "of an answer; off for as many as fit",
        values: || words(["off"]),
        show: |s| s.max_tokens.map_or("off".into(), |n| n.to_string()),
        set: set_max_tokens,
    },
    Row {
        name: "context-full",
        about: "stop, drop-turns or shift",
        values: || words(ContextFull::ALL.map(ContextFull::name)),
        show: |s| s.context_full.name().into(),
        set: set_context_full,
    },
    Row {
        name: "routing",
        about: "as --routing; lambda sets that of prior",
        values: || STRATEGIES.iter().map(|strategy| spec_begin(strategy.name, strategy.knobs)).collect(),
        show: |s| s.routing.to_string(),
        set: set_routing,
    },
    Row {
        name: "eviction",
        about: "as -o eviction",
        // The best possible policy needs the future.
        values: || words(POLICIES.iter().map(|policy| policy.name).filter(|name| *name != BELADY)),
        show: |s| s.eviction.to_string(),
        set: set_eviction,
    },
    Row {
        name: "thinking",
        about: "on, off or dim",
        values: || words(THINKING.map(thinking_name)),
        show: |s| thinking_name(s.thinking).into(),
        set: set_thinking,
    },
    Row {
        name: "footer",
        about: "on or off",
        values: || words(["on", "off"]),
        show: |s| if s.footer { "on" } else { "off" }.into(),
        set: set_footer,
    },
];

/// Name of λ of the strategy `prior`, which `/set` takes as a setting.
pub const LAMBDA: &str = "lambda";

/// How reasoning can be shown.
const THINKING: [ThinkingFlag; 3] = [ThinkingFlag::On, ThinkingFlag::Off, ThinkingFlag::Dim];

/// The names that `/set` knows.
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|row| row.name).chain([LAMBDA])
}

/// The values of a setting that have names; none for numbers and unknown settings. One that ends in `=` lacks a number.
pub fn values(name: &str) -> Vec<String> {
    TABLE.iter().find(|row| row.name == name).map(|row| (row.values)()).unwrap_or_default()
}

impl Settings {
    /// The settings of the flags; sampling is the model's where there is none.
    pub fn new(args: &ChatArgs, generation: &GenerationConfig, terminal: bool) -> Self {
        let default = if terminal { ThinkingFlag::Dim } else { ThinkingFlag::Off };
        Settings {
            sampling: generation.into(),
            seed: args.seed.seed,
            max_tokens: args.max_tokens,
            context_full: args.context_full,
            routing: args.engine.settings.options.routing.clone(),
            eviction: args.engine.settings.options.cache.eviction.clone(),
            thinking: args.thinking.unwrap_or(default),
            footer: !args.no_footer,
        }
    }

    /// These settings with one changed; `lambda` changes λ of the strategy `prior`.
    pub fn with(&self, name: &str, value: &str) -> Result<Settings> {
        let mut new = self.clone();
        if name == LAMBDA {
            new.routing = self.routing.with_lambda(value)?;
            return Ok(new);
        }
        let Some(row) = TABLE.iter().find(|row| row.name == name) else {
            bail!("there is no setting {name}; the settings are {}", names().collect::<Vec<_>>().join(", "));
        };
        (row.set)(&mut new, value).map_err(|e| anyhow!("{name}: {e:#}"))?;
        new.sampling = new.sampling.checked()?;
        Ok(new)
    }

    /// Name, value and range of each setting.
    pub fn table(&self) -> Vec<Vec<String>> {
        TABLE.iter().map(|row| vec![row.name.to_owned(), (row.show)(self), row.about.to_owned()]).collect()
    }

    /// The settings as JSON.
    pub fn json(&self) -> Value {
        TABLE.iter().map(|row| (row.name.to_owned(), json!((row.show)(self)))).collect::<Map<_, _>>().into()
    }

    /// These settings, changed by those of a JSON object.
    pub fn with_json(&self, json: &Value) -> Result<Settings> {
        let Value::Object(pairs) = json else { bail!("`settings` must be an object") };
        pairs.iter().try_fold(self.clone(), |settings, (name, value)| match value {
            Value::String(text) => settings.with(name, text),
            _ => Err(anyhow!("{name}: must be a string")),
        })
    }
}

fn words(names: impl IntoIterator<Item = &'static str>) -> Vec<String> {
    names.into_iter().map(str::to_owned).collect()
}

/// The name of a strategy, and the beginning of its first option without a default, which it needs.
fn spec_begin(name: &str, knobs: &[Knob]) -> String {
    let needed = knobs.iter().find(|knob| knob.default.is_none());
    needed.map_or(name.to_owned(), |knob| format!("{name}:{}=", knob.name))
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| anyhow!("{text:?} is not a valid number"))
}

fn set_max_tokens(settings: &mut Settings, value: &str) -> Result<()> {
    settings.max_tokens = match value {
        "off" => None,
        n => match number(n)? {
            0 => bail!("must be at least 1, or off"),
            n => Some(n),
        },
    };
    Ok(())
}

fn set_context_full(settings: &mut Settings, value: &str) -> Result<()> {
    settings.context_full = value.parse().map_err(anyhow::Error::msg)?;
    Ok(())
}

fn set_routing(settings: &mut Settings, value: &str) -> Result<()> {
    settings.routing = value.parse()?;
    Ok(())
}

fn set_eviction(settings: &mut Settings, value: &str) -> Result<()> {
    settings.eviction = value.parse()?;
    Ok(())
}

fn thinking_name(thinking: ThinkingFlag) -> &'static str {
    match thinking {
        ThinkingFlag::On => "on",
        ThinkingFlag::Off => "off",
        ThinkingFlag::Dim => "dim",
    }
}

fn set_thinking(settings: &mut Settings, value: &str) -> Result<()> {
    let found = THINKING.into_iter().find(|t| thinking_name(*t) == value);
    settings.thinking = found.ok_or_else(|| anyhow!("{value:?} must be on, off or dim"))?;
    Ok(())
}

fn set_footer(settings: &mut Settings, value: &str) -> Result<()> {
    settings.footer = match value {
        "on" => true,
        "off" => false,
        _ => bail!("{value:?} must be on or off"),
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            sampling: Sampling::default(),
            seed: 7,
            max_tokens: None,
            context_full: ContextFull::DropTurns,
            routing: "original".parse().unwrap(),
            eviction: "lru".parse().unwrap(),
            thinking: ThinkingFlag::Dim,
            footer: true,
        }
    }

    #[test]
    fn every_setting_accepts_the_value_that_it_shows() {
        let settings = settings();
        for row in settings.table() {
            assert!(settings.with(&row[0], &row[1]).is_ok(), "{row:?}");
        }
        let other = settings.with("temperature", "0.7").unwrap().with("max-tokens", "9").unwrap();
        let back = settings.with_json(&other.json()).unwrap();
        assert_eq!(back.table(), other.table());
        assert_ne!(back.table(), settings.table());
    }

    #[test]
    fn values_with_names_are_accepted() {
        for name in names() {
            for value in values(name) {
                let ends: &[&str] = if value.ends_with('=') { &["1", "2"] } else { &[""] };
                let accepted = |end: &&str| settings().with(name, &format!("{value}{end}")).is_ok();
                assert!(ends.iter().any(accepted), "{name} {value}");
            }
        }
    }

    #[test]
    fn invalid_values_are_refused() {
        for (name, value) in [
            ("temperature", "-1"),
            ("temperature", "hot"),
            ("top-p", "2"),
            ("top-k", "-3"),
            ("max-tokens", "0"),
            ("routing", "nearest"),
            ("lambda", "x"),
            ("eviction", "youngest"),
            ("thinking", "loud"),
            ("footer", "maybe"),
            ("colour", "red"),
        ] {
            assert!(settings().with(name, value).is_err(), "{name} {value}");
        }
    }

    #[test]
    fn lambda_is_set_with_the_standard_options() {
        let with_lambda = settings().with("lambda", "0.3").unwrap();
        assert_eq!(with_lambda.routing.to_string(), "prior:lambda=0.3,j=1");
        let other = settings().with("routing", "prior:lambda=0.1,j=2").unwrap().with("lambda", "0.3").unwrap();
        assert_eq!(other.routing.to_string(), "prior:lambda=0.3,j=2");
    }
}
