//! Settings of an engine as text: one [table](SETTINGS) by which the command line, larder.toml, the environment and the
//! options of other languages are read, checked and explained.

mod renamed;
mod table;
mod values;

use std::path::PathBuf;

use larder_engine::Speculation;
use larder_os::power::POWER_SUPPLIES;
use larder_policy::eviction::PolicyNeeds;

use crate::open::MtpUse;
use crate::options::{BatteryOptions, CacheOptions, ComputeOptions, ContextSize, Options, VisionOptions, VisionUse};

pub use renamed::{RENAMED, RenamedSetting, renamed};
pub use table::SETTINGS;
pub use values::SettingError;

use values::Result;

/// The part of an engine that a setting belongs to. A command takes the settings of some parts, as a sum of
/// [`Self::bit`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SettingPart {
    /// Length of the context.
    Context,
    /// How many experts stay in main memory.
    CacheSize,
    /// How the cache of experts works.
    Cache,
    /// Hot experts that earlier runs have left.
    HotSet,
    /// How experts are chosen.
    Routing,
    /// How losses are measured.
    Measurement,
    /// Draft tokens.
    Speculation,
    /// How files are read.
    Reading,
    /// Threads, precision and memory of the CPU.
    Compute,
    /// Instruction sets of the CPU.
    Kernels,
    /// Computing on battery.
    Battery,
    /// A GPU.
    Device,
    /// Other machines.
    Edge,
    /// Images.
    Vision,
}

impl SettingPart {
    /// All parts in the order of the documentation, each with its title.
    pub const ALL: [(SettingPart, &'static str); 14] = [
        (SettingPart::Context, "Context"),
        (SettingPart::CacheSize, "Cache size"),
        (SettingPart::Cache, "Expert cache"),
        (SettingPart::HotSet, "Hot set"),
        (SettingPart::Routing, "Routing"),
        (SettingPart::Measurement, "Output loss"),
        (SettingPart::Speculation, "Speculation"),
        (SettingPart::Reading, "Reading"),
        (SettingPart::Compute, "Compute"),
        (SettingPart::Kernels, "Kernels"),
        (SettingPart::Battery, "Battery"),
        (SettingPart::Device, "Device"),
        (SettingPart::Edge, "Edge"),
        (SettingPart::Vision, "Images"),
    ];

    /// The part in a set of parts.
    pub const fn bit(self) -> u16 {
        1 << self as u16
    }
}

/// Gives a setting a value.
type Setter = fn(&mut EngineSettings, &str) -> Result<()>;

/// One setting.
pub struct SettingRow {
    /// The name as it is typed, as in `--cache` or `-o scratch`.
    pub typed: &'static str,
    /// Name in larder.toml, of `-o`, and in the options of other languages.
    pub name: &'static str,
    /// Its values, as in `off|N`; empty for a switch.
    pub values: &'static str,
    /// What counts without it, as text.
    pub default: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// A value that it can have.
    pub example: &'static str,
    /// The part of the engine.
    pub part: SettingPart,
    /// Whether the command line has a flag of this name.
    pub has_flag: bool,
    /// Whether the larder.toml of a store may set it. Stores are downloaded and not trusted, so they may set nothing
    /// that names a file, locks memory or changes the machine.
    pub by_store: bool,
    /// Whether help leaves it out, because it is for tests.
    pub is_hidden: bool,
    set: Setter,
}

impl SettingRow {
    /// The setting of this name.
    pub fn named(name: &str) -> Option<&'static SettingRow> {
        SETTINGS.iter().find(|row| row.name == name)
    }

    /// Whether it is true or false.
    pub fn is_switch(&self) -> bool {
        self.values.is_empty()
    }

    /// Whether a command that takes these parts takes it.
    pub fn is_in(&self, parts: u16) -> bool {
        self.part.bit() & parts != 0
    }

    /// The name with a value as it is typed, as in `--cache 4G` or `-o scratch=3`.
    pub fn typed_with(&self, value: &str) -> String {
        let separator = if self.has_flag { ' ' } else { '=' };
        if self.is_switch() { self.typed.into() } else { format!("{}{separator}{value}", self.typed) }
    }

    /// Fails in one sentence if the setting cannot have this value.
    pub fn check(&self, value: &str) -> Result<()> {
        (self.set)(&mut EngineSettings::taking(u16::MAX), value)
    }

    /// Whether this and another setting are two ways to say the same.
    pub fn excludes(&self, other: &str) -> bool {
        [("quality", "routing"), ("routing", "quality")].contains(&(self.name, other))
    }
}

/// Values of settings, of which others have their defaults.
#[derive(Clone)]
pub struct EngineSettings {
    /// The options of an engine, but for the draft model, which is opened separately.
    pub options: Options,
    /// The draft model.
    pub draft: Option<PathBuf>,
    /// Whether a store is made beside a GGUF file.
    pub store_for_gguf: bool,
    /// The file with the image tower.
    pub mmproj: Option<PathBuf>,
    battery_threads: Option<usize>,
    power_supplies: PathBuf,
    #[cfg(feature = "edge")]
    edge: EdgeSettings,
    takes: u16,
    given: Vec<&'static str>,
}

/// Settings of edge workers, which are used only with a topology.
#[cfg(feature = "edge")]
#[derive(Clone)]
struct EdgeSettings {
    topology: Option<PathBuf>,
    placement: Option<PathBuf>,
    format: larder_edge::wire::Format,
    deadline_ms: u64,
}

impl EngineSettings {
    /// The defaults where the settings of these parts can be given.
    pub fn taking(parts: u16) -> Self {
        let takes = |part: SettingPart| part.bit() & parts != 0;
        let speculation = if takes(SettingPart::Speculation) { Speculation::Auto } else { Speculation::Off };
        let cache = CacheOptions { hot_set: takes(SettingPart::HotSet), ..CacheOptions::default() };
        let tower = if takes(SettingPart::Vision) { VisionUse::OnDemand } else { VisionUse::Off };
        let vision = VisionOptions { tower, ..VisionOptions::default() };
        EngineSettings {
            options: Options { speculation, cache, vision, ..Options::default() },
            draft: None,
            store_for_gguf: true,
            mmproj: None,
            battery_threads: None,
            power_supplies: POWER_SUPPLIES.into(),
            #[cfg(feature = "edge")]
            edge: EdgeSettings {
                topology: None,
                placement: None,
                format: larder_edge::wire::Format::F32,
                deadline_ms: table::EDGE_DEADLINE_MS,
            },
            takes: parts,
            given: Vec::new(),
        }
    }

    /// Gives a setting a value. Fails in one sentence, which names the setting.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let row = SettingRow::named(name).filter(|row| row.is_in(self.takes)).ok_or_else(|| self.unknown(name))?;
        (row.set)(self, value).map_err(|why| SettingError::from(format!("{name}: {why}")))?;
        if let Some(other) = self.given.iter().find(|other| row.excludes(other)) {
            return Err(format!("{name} and {other} cannot be given together; leave out one of them").into());
        }
        self.given.push(row.name);
        Ok(())
    }

    fn unknown(&self, name: &str) -> String {
        let known: Vec<&str> = SETTINGS.iter().filter(|row| row.is_in(self.takes)).map(|row| row.name).collect();
        match SettingRow::named(name) {
            Some(_) => format!("{name} cannot be set here; settings are {}", known.join(", ")),
            None => format!("there is no setting {name}; settings are {}", known.join(", ")),
        }
    }

    /// Whether the setting was given a value.
    pub fn is_given(&self, name: &str) -> bool {
        self.given.contains(&name)
    }

    /// The options of an engine with this context.
    pub fn options(&self, context: impl Into<ContextSize>) -> Options {
        let on_battery =
            self.battery_threads.map(|threads| BatteryOptions { threads, supplies: self.power_supplies.clone() });
        Options {
            context: context.into(),
            compute: ComputeOptions { on_battery, ..self.options.compute.clone() },
            #[cfg(feature = "edge")]
            edge: self.edge.options(),
            ..self.options.clone()
        }
    }

    /// Whether the model is used with its layer for multi-token prediction: not where its tokens would not be drafted.
    pub fn mtp(&self) -> MtpUse {
        let Options { routing, trace, cache, speculation, .. } = &self.options;
        let drafts = routing.is_lossless() && trace.is_none() && cache.eviction.needs() != PolicyNeeds::Evictor;
        match speculation {
            Speculation::Mtp => MtpUse::Always,
            Speculation::Auto if drafts => MtpUse::IfStored,
            _ => MtpUse::Never,
        }
    }
}

#[cfg(feature = "edge")]
impl EdgeSettings {
    fn options(&self) -> Option<crate::options::EdgeOptions> {
        Some(crate::options::EdgeOptions {
            topology: self.topology.clone()?,
            placement: self.placement.clone(),
            format: self.format,
            deadline: std::time::Duration::from_millis(self.deadline_ms),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{CacheSize, DeviceKind};

    fn with(pairs: &[(&str, &str)]) -> Result<EngineSettings> {
        let mut all = EngineSettings::taking(u16::MAX);
        pairs.iter().try_for_each(|(name, value)| all.set(name, value)).map(|()| all)
    }

    #[test]
    fn each_row_has_a_name_of_its_own_and_an_example_that_it_takes() {
        for (at, row) in SETTINGS.iter().enumerate() {
            assert!(SETTINGS[..at].iter().all(|earlier| earlier.name != row.name), "{}", row.name);
            assert_eq!(row.check(row.example), Ok(()), "{}", row.name);
            assert!(row.is_switch() || row.check("\u{1}").is_err() || row.values.contains("FILE"), "{}", row.name);
            assert!(!row.help.ends_with('.') && row.help.len() <= 110, "{}: {}", row.name, row.help.len());
            assert!(!(row.by_store && row.values.contains("FILE")), "a store sets no file: {}", row.name);
        }
    }

    #[test]
    fn values_become_options() {
        let cache = |value: &str| with(&[("cache", value)]).map(|all| all.options.cache.size);
        assert_eq!(cache("3x"), Ok(CacheSize::ExpertsPerLayer(3)));
        assert_eq!(cache("1.5M"), Ok(CacheSize::Bytes(1_500_000)));
        assert_eq!(
            [cache("auto"), cache("all"), cache("fit")],
            [Ok(CacheSize::Auto), Ok(CacheSize::All), Ok(CacheSize::Available)]
        );
        assert!(cache("0x").is_err() && cache("x").is_err() && cache("much").is_err());
        let device = with(&[("device", "cuda"), ("vram", "2k"), ("flash-attn", "on")]).unwrap().options.device;
        assert_eq!((device.kind, device.vram_bytes, device.vram_experts), (DeviceKind::Cuda, Some(2000), None));
        let vram = with(&[("vram", "2x"), ("vram-kv", "3")]).unwrap().options.device;
        assert_eq!((vram.vram_bytes, vram.vram_experts, vram.vram_kv_layers), (None, Some(2), Some(3)));
        let battery = with(&[("power-supplies", "/x"), ("threads-on-battery", "2")]).unwrap().options(8);
        assert_eq!(battery.compute.on_battery.unwrap().supplies, PathBuf::from("/x"));
    }

    #[test]
    fn speculation_names_its_draft_model() {
        let of = |value: &str| with(&[("speculate", value)]).map(|all| (all.options.speculation, all.draft));
        assert_eq!(of("draft=a/b"), Ok((Speculation::Draft, Some("a/b".into()))));
        assert_eq!(of("auto+draft=a"), Ok((Speculation::Auto, Some("a".into()))));
        assert_eq!(of("lookup"), Ok((Speculation::Lookup, None)));
        assert!(["draft", "draft=", "mtp+draft=a"].iter().all(|wrong| of(wrong).is_err()));
    }

    #[test]
    fn what_is_wrong_is_said_in_a_sentence() {
        for (pairs, fault) in [
            (&[("colour", "red")][..], "there is no setting colour; settings are context, cache"),
            (&[("quality", "fast"), ("routing", "original")], "routing and quality cannot be given together"),
            (&[("quality", "much")], "quality: must be off"),
            (&[("threads", "0")], "threads: must be at least 1"),
            (&[("pin", "perhaps")], "pin: must be true or false"),
            (&[("scope", "town")], "scope: must be layer or global"),
            (&[("reader", "tape")], "reader: unknown reader"),
            (&[("kernels", "mmx")], "kernels: must be auto, or an instruction set that this processor has: "),
        ] {
            let found = with(pairs).err().unwrap().to_string();
            assert!(found.starts_with(fault), "{found}");
        }
        let refused =
            EngineSettings::taking(SettingPart::Cache.bit()).set("routing", "original").unwrap_err().to_string();
        assert!(refused.starts_with("routing cannot be set here; settings are scope, "), "{refused}");
    }

    /// All options but those that are no settings.
    fn text(options: &Options) -> String {
        let Options { context, cache, routing, measure_every, speculation, compute, device, prefill_tokens, .. } =
            options;
        let CacheOptions { size, scope, evictor, scratch, prefetch, hot_set, .. } = cache;
        let named = (cache.eviction.to_string(), cache.reader.name, cache.check_reads, routing.to_string());
        format!(
            "{context:?} {prefill_tokens:?} {named:?} {measure_every} {speculation} {compute:?} {device:?} {:?}",
            (size, scope, evictor, scratch, prefetch, hot_set)
        )
    }

    #[test]
    fn without_settings_the_options_are_the_defaults() {
        let (found, default) = (EngineSettings::taking(0).options(ContextSize::Auto), Options::default());
        assert_eq!(text(&found), text(&default));
        assert!(found.trace.is_none() && !found.uses_edge());
    }

    #[test]
    fn the_defaults_that_are_told_are_those_that_count() {
        let all = EngineSettings::taking(u16::MAX);
        for row in SETTINGS.iter().filter(|row| row.check(row.default).is_ok() && row.values != "FILE") {
            let mut told = all.clone();
            told.set(row.name, row.default).unwrap();
            let context = told.options.context;
            assert_eq!(text(&told.options(context)), text(&all.options(ContextSize::Auto)), "{}", row.name);
        }
    }
}
