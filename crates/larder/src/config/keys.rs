//! What can be configured: the flags of commands that run a model, by their long names.

use clap::{Arg, ArgAction, Args, Command, CommandFactory};

use crate::cli::{Cli, EngineFlags, HotSetFlags, PowerFlags, SamplingFlags, SeedFlag, SpeculateFlags};

/// Keys that a store's file may set: sampling and cache. Stores are downloaded and not trusted, so they may set nothing
/// that names a file, locks memory or changes the machine.
const STORE_KEYS: &[&str] = &[
    "temperature",
    "top-k",
    "top-p",
    "min-p",
    "repetition-penalty",
    "max-tokens",
    "context",
    "context-full",
    "cache-experts",
    "cache-mem",
    "cache-scope",
    "cache-scratch",
    "eviction",
    "routing",
    "prefetch",
    "kv",
];

/// A command that can be configured.
pub struct LeafCommand {
    /// Its name and those of its parents, as in `eval ppl`.
    pub path: Vec<String>,
    /// Its definition, with its arguments.
    pub command: Command,
}

impl LeafCommand {
    /// All commands that have an engine or sampling flag.
    pub fn all() -> Vec<LeafCommand> {
        let (mut all, mut waiting) = (Vec::new(), vec![(Vec::new(), Cli::command())]);
        while let Some((path, command)) = waiting.pop() {
            for sub in command.get_subcommands() {
                let path: Vec<String> = path.iter().cloned().chain([sub.get_name().to_owned()]).collect();
                waiting.push((path, sub.clone()));
            }
            let shared = shared_flags();
            if command.get_arguments().any(|arg| shared.iter().any(|s| s.get_id() == arg.get_id())) {
                all.push(LeafCommand { path, command });
            }
        }
        all.sort_by(|a, b| a.path.cmp(&b.path));
        all
    }

    /// The section of larder.toml for this command.
    pub fn section(&self) -> &str {
        &self.path[0]
    }

    /// Its flags that can be configured.
    pub fn flags(&self) -> impl Iterator<Item = &Arg> {
        self.command.get_arguments().filter(|arg| key(arg).is_some())
    }

    /// The flag with this long name.
    pub fn flag(&self, name: &str) -> Option<&Arg> {
        self.flags().find(|arg| key(arg) == Some(name))
    }

    /// Whether two of its flags conflict.
    pub fn excludes(&self, a: &Arg, b: &Arg) -> bool {
        let names = |one: &Arg, other: &Arg| {
            self.command.get_arg_conflicts_with(one).iter().any(|arg| arg.get_id() == other.get_id())
        };
        names(a, b) || names(b, a)
    }
}

/// The engine and sampling flags, which may stand outside of sections.
pub fn shared_flags() -> Vec<Arg> {
    let engine = HotSetFlags::augment_args(<EngineFlags as Args>::augment_args(Command::new("shared")));
    let engine = PowerFlags::augment_args(engine);
    let command = SeedFlag::augment_args(SamplingFlags::augment_args(SpeculateFlags::augment_args(engine)));
    command.get_arguments().cloned().collect()
}

/// A flag's key in files; `None` if it cannot be configured.
pub fn key(arg: &Arg) -> Option<&str> {
    let usual = matches!(arg.get_action(), ArgAction::Set | ArgAction::SetTrue | ArgAction::Append);
    let of_one_run = arg.get_id() == "model" || arg.get_id() == "prompt_text";
    arg.get_long().filter(|_| usual && !arg.is_required_set() && !of_one_run)
}

/// Whether a flag takes no value.
pub fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

/// Whether a store's file may set `key`.
pub fn is_store_key(key: &str) -> bool {
    STORE_KEYS.contains(&key)
}

/// The keys that a store's file may set, as a list.
pub fn all_store_keys() -> String {
    STORE_KEYS.join(", ")
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
        assert!(!names.iter().any(|n| n == "pull"));
    }

    #[test]
    fn stores_may_set_what_exists_and_no_file() {
        let all = LeafCommand::all();
        for key in STORE_KEYS {
            let args: Vec<&Arg> = all.iter().filter_map(|leaf| leaf.flag(key)).collect();
            assert!(!args.is_empty(), "{key}");
            let paths = args.iter().filter(|arg| arg.get_value_hint() == clap::ValueHint::AnyPath);
            assert_eq!(paths.count(), 0, "{key}");
        }
        for key in ["trace", "telemetry", "evictor", "mlock", "threads", "reader", "profile"] {
            assert!(!is_store_key(key), "{key}");
        }
    }
}
