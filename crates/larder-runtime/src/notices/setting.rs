//! Options as errors and notices name them.

use std::fmt;

/// An option as errors and notices name it: by what sets it on the `larder` command line. The documentation of each
/// says which field it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Setting {
    /// `Options::context`.
    Context,
    /// `ComputeOptions::kv`.
    Kv,
    /// `CacheOptions::size`.
    Cache,
    /// `CacheOptions::eviction`.
    Eviction,
    /// `CacheOptions::evictor`.
    Evictor,
    /// `CacheOptions::hot_set`.
    HotSet,
    /// `Options::routing`.
    Routing,
    /// A budget of output loss as `Options::routing`.
    Quality,
    /// `Options::speculation`, with `Options::draft`.
    Speculate,
    /// `Options::trace`.
    Trace,
    /// `ComputeOptions::threads`.
    Threads,
    /// `ComputeOptions::kernels`.
    Kernels,
    /// `ComputeOptions::exact`.
    Exact,
    /// `DeviceOptions::kind`.
    Device,
    /// `DeviceOptions::vram_bytes` or `DeviceOptions::vram_experts`.
    Vram,
    /// `DeviceOptions::vram_kv_layers`.
    VramKv,
    /// `DeviceOptions::flash_attention`.
    FlashAttn,
    /// `Options::edge`.
    Edge,
    /// The contrary of `ModelOptions::store_for_gguf`.
    NoStore,
    /// `VisionOptions::tower`.
    Vision,
    /// `VisionOptions::image_tokens`.
    ImageTokens,
    /// `ModelOptions::mmproj`.
    Mmproj,
    /// `ModelOptions::ignored_keys`.
    IgnoreConfig,
    /// `ModelOptions::models_folder`, which the command takes from the environment.
    ModelsFolder,
}

impl Setting {
    /// The setting as it is typed, as in `--cache` or `-o kv`.
    pub const fn typed(self) -> &'static str {
        match self {
            Setting::Context => "--context",
            Setting::Kv => "-o kv",
            Setting::Cache => "--cache",
            Setting::Eviction => "-o eviction",
            Setting::Evictor => "-o evictor",
            Setting::HotSet => "-o hot-set",
            Setting::Routing => "--routing",
            Setting::Quality => "--quality",
            Setting::Speculate => "--speculate",
            Setting::Trace => "--trace",
            Setting::Threads => "--threads",
            Setting::Kernels => "-o kernels",
            Setting::Exact => "-o exact",
            Setting::Device => "--device",
            Setting::Vram => "--vram",
            Setting::VramKv => "-o vram-kv",
            Setting::FlashAttn => "-o flash-attn",
            Setting::Edge => "--edge",
            Setting::NoStore => "-o no-store",
            Setting::Vision => "--vision",
            Setting::ImageTokens => "-o image-tokens",
            Setting::Mmproj => "--mmproj",
            Setting::IgnoreConfig => "--ignore-config",
            Setting::ModelsFolder => "LARDER_MODELS or HOME",
        }
    }

    /// The setting with a value as it is typed, as in `-o kv=f16`.
    pub fn with(self, value: impl fmt::Display) -> String {
        let separator = if self.typed().starts_with("-o") { '=' } else { ' ' };
        format!("{self}{separator}{value}")
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.typed())
    }
}
