//! What can be configured: flags of the commands that run a model, by their long names.

use clap::{Arg, ArgAction, Args, Command, CommandFactory};

use crate::cli::{Cli, EngineFlags, SamplingFlags};

/// What a store's file may set: how answers are drawn and what the cache does. A store comes from strangers, so nothing
/// that names a file, takes memory away from others or leaves the machine otherwise than it was.
const STORE_KEYS: &[&str] = &[
    "temperature",
    "top-k",
    "top-p",
    "min-p",
    "repetition-penalty",
    "max-tokens",
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
    /// Its names, as in `eval ppl`.
    pub path: Vec<String>,
    /// What it takes.
    pub command: Command,
}

impl LeafCommand {
    /// All of them: those that have flags of the engine or for drawing.
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

    /// The section of a file for this command.
    pub fn section(&self) -> &str {
        &self.path[0]
    }

    /// Its flags that can be configured.
    pub fn flags(&self) -> impl Iterator<Item = &Arg> {
        self.command.get_arguments().filter(|arg| key(arg).is_some())
    }

    /// The flag of that name.
    pub fn flag(&self, name: &str) -> Option<&Arg> {
        self.flags().find(|arg| key(arg) == Some(name))
    }

    /// Whether two of its flags exclude each other.
    pub fn excludes(&self, a: &Arg, b: &Arg) -> bool {
        let names = |one: &Arg, other: &Arg| {
            self.command.get_arg_conflicts_with(one).iter().any(|arg| arg.get_id() == other.get_id())
        };
        names(a, b) || names(b, a)
    }
}

/// The flags that all commands which run a model share.
pub fn shared_flags() -> Vec<Arg> {
    let command = SamplingFlags::augment_args(EngineFlags::augment_args(Command::new("shared")));
    command.get_arguments().cloned().collect()
}

/// A flag's name in files, if it can be in one.
pub fn key(arg: &Arg) -> Option<&str> {
    let usual = matches!(arg.get_action(), ArgAction::Set | ArgAction::SetTrue | ArgAction::Append);
    arg.get_long().filter(|name| usual && !arg.is_required_set() && *name != "model")
}

/// Whether a flag takes no value.
pub fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

/// Whether a store's file may have it.
pub fn is_store_key(key: &str) -> bool {
    STORE_KEYS.contains(&key)
}

/// All that a store's file may have.
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
        assert!(!names.iter().any(|n| n == "convert"));
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
        for key in ["trace", "telemetry", "evictor", "mlock", "threads", "reader"] {
            assert!(!is_store_key(key), "{key}");
        }
    }
}
