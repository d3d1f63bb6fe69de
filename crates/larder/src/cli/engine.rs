//! The flags of commands that run a model, made of the table of settings.

use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, CommandFactory, Error, FromArgMatches};
use larder_runtime::settings::{SETTINGS, SettingError, SettingPart, SettingRow, renamed};
use larder_runtime::{EngineSettings, THREADS_MAX, TraceOptions};

use super::output::{OutputFile, ReplaceFlag};
use super::{ByteSize, Cli, at_least_one, byte_size, heading};

/// The flag that sets what has no flag of its own.
pub const OPTION: &str = "option";

/// Parts of an engine whose settings a command takes.
pub mod takes {
    use larder_runtime::settings::SettingPart::{
        Battery, Cache, CacheSize, Compute, Context, Device, Edge, HotSet, Kernels, Measurement, Reading, Routing,
        Speculation, Vision,
    };

    /// Commands that choose the routing strategy, and the context by their text.
    pub const FIXED_ROUTING: u16 =
        CacheSize.bit() | Cache.bit() | Reading.bit() | Compute.bit() | KERNELS | Device.bit() | Edge.bit();
    /// Commands that choose the context by their text.
    pub const EVALUATION: u16 = FIXED_ROUTING | Routing.bit() | Measurement.bit();
    /// Commands that run a model as one for people does, once.
    pub const MEASUREMENT: u16 = EVALUATION | Context.bit() | Speculation.bit();
    /// Commands that show what generating takes.
    pub const PLAN: u16 = MEASUREMENT | Vision.bit();
    /// Commands that generate text for people.
    pub const GENERATION: u16 = PLAN | HotSet.bit() | Battery.bit();
    /// Commands that try several sizes of the cache, in main memory.
    pub const SWEEP: u16 = Cache.bit() | Measurement.bit() | Reading.bit() | Compute.bit() | KERNELS;
    /// Commands that run a model in main memory, by themselves in several ways.
    pub const PROOF: u16 = CacheSize.bit() | Cache.bit() | Reading.bit() | Routing.bit() | Compute.bit() | KERNELS;
    /// Commands that run no model.
    pub const KERNELS: u16 = Kernels.bit();
}

/// Settings with flags that a person needs; the others are in `--help-all`.
const SHORT: [&str; 5] = ["context", "cache", "quality", "device", "threads"];

/// How the engine runs: flags for some settings, and `-o` for all of the parts that the command takes.
#[derive(Clone)]
pub struct EngineFlags<const TAKES: u16 = { takes::GENERATION }> {
    pub settings: EngineSettings,
}

impl<const TAKES: u16> Args for EngineFlags<TAKES> {
    fn augment_args(command: Command) -> Command {
        let flags = SETTINGS.iter().filter(|row| row.has_flag && row.is_in(TAKES)).map(flag);
        command.args(flags).arg(option(TAKES)).after_long_help(explanation(TAKES))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const TAKES: u16> FromArgMatches for EngineFlags<TAKES> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut settings = EngineSettings::taking(TAKES);
        let options = given(matches).map(|given| (given.row.name, &given.value));
        let flags = SETTINGS.iter().filter(|row| row.has_flag && row.is_in(TAKES));
        let flags = flags.filter_map(|row| Some((row.name, matches.get_one::<String>(row.name)?)));
        let set = options.chain(flags).try_for_each(|(name, value)| settings.set(name, value));
        set.map_err(|why| Cli::command().error(ErrorKind::ArgumentConflict, why))?;
        Ok(EngineFlags { settings })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The settings that `-o` of a command line names.
pub fn given(matches: &ArgMatches) -> impl Iterator<Item = &GivenSetting> {
    matches.try_get_many::<GivenSetting>(OPTION).ok().flatten().into_iter().flatten()
}

/// The settings that a command takes.
pub fn settings_of(command: &Command) -> Vec<&'static SettingRow> {
    let option = command.get_arguments().find(|arg| arg.get_id() == OPTION);
    let names = option.map(Arg::get_possible_values).unwrap_or_default();
    names.iter().filter_map(|name| SettingRow::named(name.get_name())).collect()
}

fn flag(row: &'static SettingRow) -> Arg {
    let check = |text: &str| row.check(text).map(|()| text.to_owned());
    let flag = Arg::new(row.name).long(row.name).value_name(row.values).value_parser(check);
    let flag = flag.help(row.help).help_heading(heading::ENGINE);
    flag.hide_short_help(!SHORT.contains(&row.name)).conflicts_with_all(rival(row))
}

/// The flag that says the same as another in a different way.
fn rival(row: &SettingRow) -> Option<&'static str> {
    SETTINGS.iter().find(|other| other.has_flag && row.excludes(other.name)).map(|other| other.name)
}

fn option(takes: u16) -> Arg {
    Arg::new(OPTION)
        .short('o')
        .long(OPTION)
        .value_name("KEY=VALUE")
        .action(ArgAction::Append)
        .value_parser(SettingParser { takes })
        .hide_possible_values(true)
        .help("Any setting by its name; repeatable. --help-all lists them")
        .help_heading(heading::ENGINE)
}

/// The settings of these parts, for `--help-all`.
fn explanation(takes: u16) -> String {
    let mut text =
        String::from("Settings: -o KEY=VALUE, KEY = VALUE in larder.toml, or LARDER_KEY in the environment\n");
    for (part, title) in SettingPart::ALL.into_iter().filter(|(part, _)| part.bit() & takes != 0) {
        text += &format!("\n  {title}\n");
        for row in SETTINGS.iter().filter(|row| row.part == part && !row.is_hidden) {
            let value = if row.is_switch() { "true|false" } else { row.values };
            text += &format!("    {}={value} [default: {}]\n        {}\n", row.name, row.default, row.help);
        }
    }
    text
}

/// What `-o` gives a value.
#[derive(Clone)]
pub struct GivenSetting {
    pub row: &'static SettingRow,
    pub value: String,
}

/// Reads `KEY=VALUE`, or the name of a switch.
#[derive(Clone)]
struct SettingParser {
    takes: u16,
}

impl TypedValueParser for SettingParser {
    type Value = GivenSetting;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &std::ffi::OsStr) -> Result<GivenSetting, Error> {
        let takes = self.takes;
        (move |text: &str| given_setting(takes, text)).parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let taken = SETTINGS.iter().filter(|row| row.is_in(self.takes));
        Some(Box::new(taken.map(|row| PossibleValue::new(row.name))))
    }
}

fn given_setting(takes: u16, text: &str) -> Result<GivenSetting, SettingError> {
    let (name, value) = match text.split_once('=') {
        Some(pair) => pair,
        None if SettingRow::named(text).is_none_or(SettingRow::is_switch) => (text, "true"),
        None => return Err(format!("{text} needs a value, as in -o {text}=VALUE").into()),
    };
    EngineSettings::taking(takes).set(name, value).map_err(|why| {
        renamed(name).map_or(why, |row| format!("{name} is now {}", row.typed_with(value, false)).into())
    })?;
    let row = SettingRow::named(name).ok_or_else(|| format!("there is no setting {name}"))?;
    Ok(GivenSetting { row, value: value.to_owned() })
}

/// Recording a trace.
#[derive(Args, Clone, Default)]
pub struct RecordFlags {
    /// Record each token's experts to FILE, for `larder lab`
    #[arg(long = "trace", value_name = "FILE", id = "trace", hide_short_help = true, help_heading = heading::OUTPUT)]
    pub trace: Option<OutputFile>,
    /// With --trace: record the router logits too
    #[arg(long = "trace-logits", id = "trace_logits", requires = "trace", hide_short_help = true)]
    #[arg(help_heading = heading::OUTPUT)]
    pub logits: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

impl RecordFlags {
    /// Settings with this trace.
    pub fn set(&self, mut settings: EngineSettings) -> EngineSettings {
        let trace = self.trace.clone().map(|file| TraceOptions { path: file.0, logits: self.logits });
        settings.options.trace = trace;
        settings
    }
}

/// A timeline of the run.
#[derive(Args, Clone)]
pub struct TimelineFlags {
    /// Write a timeline of steps, layers, products, reads and waits to FILE, for Perfetto or chrome://tracing; a file
    /// that exists is replaced
    #[arg(long, value_name = "FILE", hide_short_help = true, help_heading = heading::OUTPUT)]
    pub profile: Option<PathBuf>,
    /// With --profile: the bytes after which the timeline ends
    #[arg(long, value_name = "SIZE", value_parser = byte_size, default_value = "1G", requires = "profile")]
    #[arg(hide_short_help = true, help_heading = heading::OUTPUT)]
    pub profile_max: ByteSize,
}

/// Parses a number of compute threads.
pub fn parse_threads(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        n if n > THREADS_MAX => Err(format!("must be at most {THREADS_MAX}")),
        n => Ok(n),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use larder_runtime::{CacheSize, ContextSize, DeviceKind};

    use super::*;
    use crate::cli::Command as CliCommand;

    fn settings_of_line(flags: &[&str]) -> Result<EngineSettings, String> {
        let line = [&["larder", "plan"], flags].concat();
        match Cli::try_parse_from(line).map_err(|error| error.to_string())?.command {
            CliCommand::Plan(args) => Ok(args.engine.settings),
            _ => panic!("plan was typed"),
        }
    }

    #[test]
    fn flags_and_options_set_the_same() {
        for line in [&["--cache", "3x"][..], &["-o", "cache=3x"], &["-o", "cache=4x", "--cache", "3x"]] {
            assert_eq!(settings_of_line(line).unwrap().options.cache.size, CacheSize::ExpertsPerLayer(3), "{line:?}");
        }
        let all = settings_of_line(&["--device", "cuda", "-o", "pin", "-o", "mlock=false", "-o", "scratch=2"]).unwrap();
        assert_eq!((all.options.device.kind, all.options.cache.scratch), (DeviceKind::Cuda, 2));
        assert!(all.options.compute.pin && !all.options.compute.mlock);
        assert_eq!(settings_of_line(&["--context", "2K"]).unwrap().options.context, ContextSize::Tokens(2048));
    }

    /// The short and the whole help of a command, on a screen of 100 columns.
    fn helps(path: &str) -> [String; 2] {
        let mut cli = Cli::command().term_width(100);
        cli.build();
        let command = path.split(' ').fold(&mut cli, |command, name| command.find_subcommand_mut(name).unwrap());
        [command.render_help(), command.render_long_help()].map(|help| help.to_string())
    }

    #[test]
    fn help_of_sweeps_and_replays_fits_on_a_screen() {
        for (path, hidden) in [("eval sweep", "--prune"), ("lab sweep", "--heat-layer"), ("lab replay", "--overlap")] {
            let [short, whole] = helps(path);
            assert!(short.lines().count() <= 40, "{path}:\n{short}");
            assert!(!short.contains(hidden) && whole.contains(hidden), "{path}");
        }
    }

    #[test]
    fn help_fits_on_a_screen_and_whole_help_has_everything() {
        for name in ["run", "chat", "serve"] {
            let [short, whole] = helps(name);
            let widest = short.lines().map(|line| line.chars().count()).max();
            assert!(short.lines().count() <= 40 && widest <= Some(100), "{name}: {widest:?}\n{short}");
            for flag in ["--model", "--context", "--cache", "--quality", "--device", "--threads", "-o, ", "--help-all"]
            {
                assert!(short.contains(flag), "{name} {flag}: {short}");
            }
            let command = Cli::command().find_subcommand(name).unwrap().clone();
            for flag in command.get_arguments().filter(|flag| !flag.is_hide_set()).filter_map(Arg::get_long) {
                assert!(whole.contains(&format!("--{flag}")), "{name} --{flag}");
            }
        }
    }

    #[test]
    fn each_setting_is_explained_in_help_and_in_the_documentation() {
        let in_one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let whole = in_one_line(&helps("run")[1]);
        let page = include_str!("../../../../docs/configuration.md");
        let shown: Vec<&SettingRow> = SETTINGS.iter().filter(|row| !row.is_hidden).collect();
        for row in &shown {
            let (values, default) = (if row.is_switch() { "true|false" } else { row.values }, row.default);
            let told = format!("{}={values} [default: {default}] {}", row.name, row.help);
            assert!(whole.contains(&in_one_line(&told)), "--help-all lacks\n{told}");
            let values = values.replace('|', ", ");
            let by_store = if row.by_store { "yes" } else { "" };
            let line = format!("| `{}` | {values} | {default} | {by_store} | {} |", row.typed, row.help);
            assert!(page.contains(&line), "docs/configuration.md lacks\n{line}");
        }
        let table =
            page.split("|---|---|---|---|---|").nth(1).unwrap().lines().skip(1).take_while(|l| l.starts_with('|'));
        let of_this_build = |line: &&str| cfg!(feature = "edge") || !line.contains("edge");
        assert_eq!(table.filter(of_this_build).count(), shown.len(), "a row of a setting that does not exist");
    }

    #[test]
    fn what_cannot_be_set_is_said() {
        for (line, fault) in [
            (&["-o", "colour=red"][..], "there is no setting colour"),
            (&["-o", "scratch"], "scratch needs a value, as in -o scratch=VALUE"),
            (&["-o", "hot-set=off"], "hot-set cannot be set here"),
            (&["-o", "cache-mem=4G"], "cache-mem is now --cache 4G"),
            (&["-o", "cache-scope=global"], "cache-scope is now -o scope=global"),
            (&["--quality", "fast", "-o", "routing=original"], "quality and routing cannot be given together"),
            (&["--quality", "fast", "--routing", "original"], "cannot be used with"),
            (&["--threads", "0"], "must be at least 1"),
        ] {
            let said = settings_of_line(line).err().unwrap();
            assert!(said.contains(fault), "{said}");
        }
    }
}
