//! What can be configured: the flags of commands that run a model, and the settings of their engine.

use clap::{Arg, ArgAction, Args, Command, CommandFactory};
use larder_runtime::settings::{SETTINGS, SettingRow};

use crate::cli::engine::settings_of;
use crate::cli::{Cli, SamplingFlags, SeedFlag};

/// Flags, beside settings, that a store's file may set.
const STORE_FLAGS: &[&str] =
    &["temperature", "top-k", "top-p", "min-p", "repetition-penalty", "max-tokens", "context-full"];

/// Something that has a value.
#[derive(Clone)]
pub enum ConfigKey {
    /// A flag of a command.
    Flag(Box<Arg>),
    /// A setting of the engine.
    Setting(&'static SettingRow),
}

impl ConfigKey {
    /// Its name in files.
    pub fn name(&self) -> &str {
        match self {
            ConfigKey::Flag(flag) => flag.get_long().unwrap_or_default(),
            ConfigKey::Setting(row) => row.name,
        }
    }

    /// Whether it is true or false.
    pub fn is_switch(&self) -> bool {
        match self {
            ConfigKey::Flag(flag) => matches!(flag.get_action(), ArgAction::SetTrue),
            ConfigKey::Setting(row) => row.is_switch(),
        }
    }

    /// Whether it takes several values.
    pub fn is_list(&self) -> bool {
        matches!(self, ConfigKey::Flag(flag) if matches!(flag.get_action(), ArgAction::Append))
    }

    /// What counts without it.
    pub fn default(&self) -> Option<String> {
        match self {
            ConfigKey::Setting(row) => Some(row.default.to_owned()),
            ConfigKey::Flag(_) if self.is_switch() => Some("false".to_owned()),
            ConfigKey::Flag(flag) => {
                flag.get_default_values().first().map(|value| value.to_string_lossy().into_owned())
            }
        }
    }

    /// A value as it is typed.
    pub fn typed(&self, value: &str) -> Vec<String> {
        match self {
            ConfigKey::Setting(row) => vec!["-o".to_owned(), format!("{}={value}", row.name)],
            ConfigKey::Flag(_) if self.is_switch() => vec![format!("--{}", self.name())],
            ConfigKey::Flag(_) => vec![format!("--{}={value}", self.name())],
        }
    }
}

/// A command that can be configured.
pub struct LeafCommand {
    /// Its name and those of its parents, as in `eval ppl`.
    pub path: Vec<String>,
    /// Its definition, with its arguments.
    pub command: Command,
    /// What can be configured of it.
    pub keys: Vec<ConfigKey>,
}

impl LeafCommand {
    /// All commands that have a setting or a sampling flag.
    pub fn all() -> Vec<LeafCommand> {
        let (mut all, mut waiting) = (Vec::new(), vec![(Vec::new(), Cli::command())]);
        while let Some((path, command)) = waiting.pop() {
            for sub in command.get_subcommands() {
                let path: Vec<String> = path.iter().cloned().chain([sub.get_name().to_owned()]).collect();
                waiting.push((path, sub.clone()));
            }
            let settings = settings_of(&command);
            if !settings.is_empty() {
                let flags = command.get_arguments().filter(|flag| is_configurable(flag));
                let flags = flags.filter(|flag| SettingRow::named(flag.get_id().as_str()).is_none());
                let keys = flags.map(flag_key).chain(settings.into_iter().map(ConfigKey::Setting)).collect();
                all.push(LeafCommand { path, command, keys });
            }
        }
        all.sort_by(|a, b| a.path.cmp(&b.path));
        all
    }

    /// The section of larder.toml for this command.
    pub fn section(&self) -> &str {
        &self.path[0]
    }

    /// The flag or setting of this name.
    pub fn key(&self, name: &str) -> Option<&ConfigKey> {
        self.keys.iter().find(|key| key.name() == name)
    }

    /// Whether two keys conflict.
    pub fn excludes(&self, a: &ConfigKey, b: &ConfigKey) -> bool {
        let names = |one: &Arg, other: &Arg| {
            self.command.get_arg_conflicts_with(one).iter().any(|arg| arg.get_id() == other.get_id())
        };
        match (a, b) {
            (ConfigKey::Flag(a), ConfigKey::Flag(b)) => names(a, b) || names(b, a),
            (ConfigKey::Setting(a), ConfigKey::Setting(b)) => a.excludes(b.name),
            (ConfigKey::Flag(flag), ConfigKey::Setting(row)) | (ConfigKey::Setting(row), ConfigKey::Flag(flag)) => {
                let of_setting = self.command.get_arguments().find(|arg| arg.get_id() == row.name);
                of_setting.is_some_and(|of_setting| names(flag, of_setting) || names(of_setting, flag))
            }
        }
    }
}

/// The settings and sampling flags, which may stand outside of sections.
pub fn shared() -> Vec<ConfigKey> {
    let sampling = SeedFlag::augment_args(SamplingFlags::augment_args(Command::new("shared")));
    let sampling = sampling.get_arguments().map(flag_key).collect::<Vec<_>>();
    SETTINGS.iter().map(ConfigKey::Setting).chain(sampling).collect()
}

fn flag_key(flag: &Arg) -> ConfigKey {
    ConfigKey::Flag(Box::new(flag.clone()))
}

fn is_configurable(flag: &Arg) -> bool {
    let usual = matches!(flag.get_action(), ArgAction::Set | ArgAction::SetTrue | ArgAction::Append);
    let of_one_run = ["model", "prompt_text", crate::cli::engine::OPTION].iter().any(|id| flag.get_id() == id);
    flag.get_long().is_some() && usual && !flag.is_required_set() && !of_one_run
}

/// Whether a store's file may set it.
pub fn is_store_key(name: &str) -> bool {
    SettingRow::named(name).map_or(STORE_FLAGS.contains(&name), |row| row.by_store)
}

/// The keys that a store's file may set, as a list.
pub fn all_store_keys() -> String {
    let settings = SETTINGS.iter().filter(|row| row.by_store).map(|row| row.name);
    STORE_FLAGS.iter().copied().chain(settings).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_run_a_model_can_be_configured() {
        let all = LeafCommand::all();
        let names: Vec<String> = all.iter().map(|leaf| leaf.path.join(" ")).collect();
        for name in ["run", "chat", "bench", "eval ppl"] {
            assert!(names.iter().any(|n| n == name), "{name}: {names:?}");
        }
        assert!(!names.iter().any(|n| n == "pull" || n == "lab replay"));
    }

    #[test]
    fn commands_do_not_take_settings_that_they_would_refuse() {
        let all = LeafCommand::all();
        for (path, refused) in [
            ("serve", &["trace", "trace-logits"][..]),
            ("report", &["trace", "routing", "quality", "speculate", "context"]),
            ("eval sensitivity", &["trace", "routing", "measure-every"]),
            ("eval sweep", &["trace", "routing", "cache", "device", "edge"]),
            ("plan", &["hot-set", "threads-on-battery"]),
        ] {
            let leaf = all.iter().find(|leaf| leaf.path.join(" ") == path).unwrap();
            assert!(leaf.key("eviction").is_some(), "{path}");
            for name in refused {
                assert!(leaf.key(name).is_none(), "{path} takes {name}");
            }
        }
        let run = all.iter().find(|leaf| leaf.path == ["run"]).unwrap();
        assert!(run.key("trace").is_some());
        assert!(SETTINGS.iter().all(|row| run.key(row.name).is_some()), "run takes every setting");
    }

    #[test]
    fn stores_may_set_what_exists_and_no_file() {
        let all = LeafCommand::all();
        for name in STORE_FLAGS {
            let flags: Vec<&ConfigKey> = all.iter().filter_map(|leaf| leaf.key(name)).collect();
            assert!(!flags.is_empty(), "{name}");
            let paths = flags.iter().filter(
                |key| matches!(key, ConfigKey::Flag(flag) if flag.get_value_hint() == clap::ValueHint::AnyPath),
            );
            assert_eq!(paths.count(), 0, "{name}");
        }
        for name in ["trace", "telemetry", "evictor", "mlock", "threads", "kernels", "reader", "profile"] {
            assert!(!is_store_key(name), "{name}");
        }
    }
}
