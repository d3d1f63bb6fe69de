//! Options as errors and notices name them.

use std::fmt;

use crate::settings::SettingRow;

/// An option as errors and notices name it: by what sets it on the `larder` command line. The documentation of each
/// says which field it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Setting {
    /// [`Options::context`](crate::Options::context).
    Context,
    /// [`ComputeOptions::kv`](crate::ComputeOptions::kv).
    Kv,
    /// [`CacheOptions::size`](crate::CacheOptions::size).
    Cache,
    /// [`CacheOptions::eviction`](crate::CacheOptions::eviction).
    Eviction,
    /// [`CacheOptions::evictor`](crate::CacheOptions::evictor).
    Evictor,
    /// [`CacheOptions::hot_set`](crate::CacheOptions::hot_set).
    HotSet,
    /// [`Options::routing`](crate::Options::routing).
    Routing,
    /// A budget of output loss as [`Options::routing`](crate::Options::routing).
    Quality,
    /// [`Options::speculation`](crate::Options::speculation), with [`Options::draft`](crate::Options::draft).
    Speculate,
    /// [`Options::trace`](crate::Options::trace).
    Trace,
    /// [`ComputeOptions::threads`](crate::ComputeOptions::threads).
    Threads,
    /// [`ComputeOptions::exact`](crate::ComputeOptions::exact).
    Exact,
    /// [`DeviceOptions::kind`](crate::DeviceOptions::kind).
    Device,
    /// [`DeviceOptions::vram_bytes`](crate::DeviceOptions::vram_bytes) or
    /// [`DeviceOptions::vram_experts`](crate::DeviceOptions::vram_experts).
    Vram,
    /// [`DeviceOptions::vram_kv_layers`](crate::DeviceOptions::vram_kv_layers).
    VramKv,
    /// [`DeviceOptions::flash_attention`](crate::DeviceOptions::flash_attention).
    FlashAttn,
    /// `Options::edge`.
    Edge,
    /// The contrary of [`ModelOptions::store_for_gguf`](crate::ModelOptions::store_for_gguf).
    NoStore,
    /// [`ModelOptions::ignored_keys`](crate::ModelOptions::ignored_keys).
    IgnoreConfig,
    /// [`ModelOptions::models_folder`](crate::ModelOptions::models_folder), which the command takes from the
    /// environment.
    ModelsFolder,
}

impl Setting {
    fn name(self) -> &'static str {
        match self {
            Setting::Context => "context",
            Setting::Kv => "kv",
            Setting::Cache => "cache",
            Setting::Eviction => "eviction",
            Setting::Evictor => "evictor",
            Setting::HotSet => "hot-set",
            Setting::Routing => "routing",
            Setting::Quality => "quality",
            Setting::Speculate => "speculate",
            Setting::Trace => "--trace",
            Setting::Threads => "threads",
            Setting::Exact => "exact",
            Setting::Device => "device",
            Setting::Vram => "vram",
            Setting::VramKv => "vram-kv",
            Setting::FlashAttn => "flash-attn",
            Setting::Edge => "--edge",
            Setting::NoStore => "no-store",
            Setting::IgnoreConfig => "--ignore-config",
            Setting::ModelsFolder => "LARDER_MODELS or HOME",
        }
    }

    /// The setting with a value as it is typed, as in `-o kv=f16`.
    pub fn with(self, value: impl fmt::Display) -> String {
        let value = value.to_string();
        SettingRow::named(self.name()).map_or_else(|| format!("{self} {value}"), |row| row.typed_with(&value))
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = self.name();
        f.write_str(&SettingRow::named(name).map_or_else(|| name.to_owned(), SettingRow::typed))
    }
}
