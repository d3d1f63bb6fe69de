//! The table of settings.

use larder_core::CacheScope;
use larder_model::KvFormat;
use larder_policy::routing::parse_quality;

use super::values::{
    Result, at_least_one, cache, file, image_tokens, number, off_or_number, one_of, parsed, speculation, threads,
    truth, vram,
};
use super::{Setter, SettingError, SettingPart, SettingRow};
use crate::notices::Setting;
use crate::options::{DeviceKind, VisionUse};

/// Milliseconds to wait for a worker.
#[cfg(feature = "edge")]
pub const EDGE_DEADLINE_MS: u64 = 1000;

/// Devices by name.
const DEVICES: &[(&str, DeviceKind)] = &[
    ("cpu", DeviceKind::Cpu),
    ("cuda", DeviceKind::Cuda),
    #[cfg(feature = "emulator")]
    ("emulated", DeviceKind::Emulated),
];

const SCOPES: [(&str, CacheScope); 2] = [("layer", CacheScope::Layer), ("global", CacheScope::Global)];

const KV_FORMATS: [(&str, KvFormat); 3] = [("f32", KvFormat::F32), ("f16", KvFormat::F16), ("q8_0", KvFormat::Q8_0)];

const TOWER_USES: [(&str, VisionUse); 3] =
    [("auto", VisionUse::OnDemand), ("preload", VisionUse::Preload), ("off", VisionUse::Off)];

/// A setting as it is typed, with values, default, an example, and help.
const fn setting(
    part: SettingPart,
    typed: &'static str,
    [values, default, example]: [&'static str; 3],
    help: &'static str,
    set: Setter,
) -> SettingRow {
    let has_flag = typed.as_bytes()[1] == b'-';
    let (_, name) = typed.split_at(if has_flag { "--" } else { "-o " }.len());
    SettingRow { typed, name, values, default, help, example, part, has_flag, by_store: false, is_hidden: false, set }
}

/// A setting that is true or false.
const fn switch(part: SettingPart, typed: &'static str, help: &'static str, set: Setter) -> SettingRow {
    setting(part, typed, ["", "false", "true"], help, set)
}

fn put<T>(place: &mut T, value: Result<T>) -> Result<()> {
    *place = value?;
    Ok(())
}

impl SettingRow {
    const fn by_store(self) -> Self {
        SettingRow { by_store: true, ..self }
    }

    const fn hidden(self) -> Self {
        SettingRow { is_hidden: true, ..self }
    }
}

/// All settings of an engine.
pub static SETTINGS: &[SettingRow] = &[
    setting(
        SettingPart::Context,
        Setting::Context.typed(),
        ["N", "auto", "64K"],
        "Context in tokens, as in 64K; max: the model's own; auto: by memory",
        |s, v| put(&mut s.options.context, parsed(v)),
    )
    .by_store(),
    setting(
        SettingPart::CacheSize,
        Setting::Cache.typed(),
        ["SIZE", "fit", "4G"],
        "Experts in memory: 4G, 16x (per layer), all, fit, or auto: follow free memory while running",
        |s, v| put(&mut s.options.cache.size, cache(v)),
    )
    .by_store(),
    setting(
        SettingPart::Cache,
        "-o scope",
        ["layer|global", "layer", "global"],
        "Experts that share cache slots: those of one layer, or of all layers",
        |s, v| put(&mut s.options.cache.scope, one_of(v, &SCOPES)),
    )
    .by_store(),
    setting(
        SettingPart::Cache,
        Setting::Eviction.typed(),
        ["POLICY", "lru", "lfu"],
        "lru, lfu, lfru, llru, fifo, random, arc, s3fifo, lecar, marking or learned; options as in random:seed=7",
        |s, v| put(&mut s.options.cache.eviction, parsed(v)),
    )
    .by_store(),
    setting(
        SettingPart::Cache,
        Setting::Evictor.typed(),
        ["FILE", "evictor.safetensors in the store", "evictor.safetensors"],
        "Trained weights for the eviction policy learned",
        |s, v| put(&mut s.options.cache.evictor, file(v).map(Some)),
    ),
    setting(
        SettingPart::Cache,
        "-o scratch",
        ["N", "0", "2"],
        "Extra slots for experts that pass through without displacing others",
        |s, v| put(&mut s.options.cache.scratch, number(v)),
    )
    .by_store(),
    setting(
        SettingPart::Cache,
        "-o prefetch",
        ["off|N", "off", "2"],
        "Prefetch the N experts that the next layer will most likely use",
        |s, v| put(&mut s.options.cache.prefetch, off_or_number(v)),
    )
    .by_store(),
    setting(
        SettingPart::HotSet,
        Setting::HotSet.typed(),
        ["auto|off", "auto", "off"],
        "Remember hot experts and preload them when idle",
        |s, v| put(&mut s.options.cache.hot_set, one_of(v, &[("auto", true), ("off", false)])),
    ),
    setting(
        SettingPart::Routing,
        Setting::Quality.typed(),
        ["LOSS", "off", "balanced"],
        "Accept this output loss (KL, nats/token) for fewer reads: light, balanced, fast, or a number",
        |s, v| put(&mut s.options.routing, parse_quality(v).map_err(SettingError::from)),
    )
    .by_store(),
    setting(
        SettingPart::Routing,
        Setting::Routing.typed(),
        ["STRATEGY", "original", "prior:lambda=0.2"],
        "Strategy that may change the text: prior:…, max-rank:…, cumsum:…, prune:…, +light:…, +shelf:…",
        |s, v| put(&mut s.options.routing, parsed(v)),
    )
    .by_store(),
    setting(
        SettingPart::Measurement,
        "-o measure-every",
        ["N", "128", "32"],
        "With a strategy that may change the text: decode one token in N twice, to measure the output loss",
        |s, v| put(&mut s.options.measure_every, u32::try_from(at_least_one(v)?).map_err(|_| "is too large".into())),
    ),
    setting(
        SettingPart::Speculation,
        Setting::Speculate.typed(),
        ["HOW", "auto", "lookup"],
        "Speculative decoding, same text: off, auto, lookup, mtp, draft=STORE or auto+draft=STORE",
        |s, v| {
            (s.options.speculation, s.draft) = speculation(v)?;
            Ok(())
        },
    ),
    setting(SettingPart::Reading, "-o reader", ["auto|uring|pread", "auto", "pread"], "How shards are read", |s, v| {
        put(&mut s.options.cache.reader, parsed(v))
    }),
    setting(
        SettingPart::Reading,
        "-o check-reads",
        ["all|first", "all", "first"],
        "Reads that are compared with checksums; first overlooks bytes that the disk returns wrong later",
        |s, v| put(&mut s.options.cache.check_reads, parsed(v)),
    ),
    switch(
        SettingPart::Reading,
        Setting::NoStore.typed(),
        "Run a GGUF file directly, without making a store beside it",
        |s, v| put(&mut s.store_for_gguf, truth(v).map(|no| !no)),
    ),
    setting(
        SettingPart::Compute,
        Setting::Threads.typed(),
        ["N", "all performance cores", "8"],
        "Compute threads",
        |s, v| put(&mut s.options.compute.threads, threads(v)),
    ),
    setting(
        SettingPart::Kernels,
        Setting::Kernels.typed(),
        ["auto|NAME", "auto", "portable"],
        "Instruction set of the kernels, one of those that larder doctor names; the text stays the same",
        |s, v| put(&mut s.options.compute.kernels, parsed(v)),
    ),
    setting(
        SettingPart::Compute,
        "-o prefill-tokens",
        ["N", "by the memory plan", "512"],
        "Size of a prefill chunk in tokens: more read less and take more memory",
        |s, v| put(&mut s.options.prefill_tokens, at_least_one(v).map(Some)),
    ),
    setting(
        SettingPart::Compute,
        Setting::Kv.typed(),
        ["f32|f16|q8_0", "f16 with quantised experts, else f32", "q8_0"],
        "Number format of the KV cache; q8_0 changes the text",
        |s, v| put(&mut s.options.compute.kv, one_of(v, &KV_FORMATS).map(Some)),
    )
    .by_store(),
    switch(
        SettingPart::Compute,
        Setting::Exact.typed(),
        "Multiply quantised weights with f32 activations, not with activations in 8 bits: slower",
        |s, v| put(&mut s.options.compute.exact, truth(v)),
    ),
    switch(SettingPart::Compute, "-o pin", "Pin each compute thread to a core of its own", |s, v| {
        put(&mut s.options.compute.pin, truth(v))
    }),
    switch(
        SettingPart::Compute,
        "-o mlock",
        "Lock the model's memory, so that the system does not swap it out",
        |s, v| put(&mut s.options.compute.mlock, truth(v)),
    ),
    setting(
        SettingPart::Battery,
        "-o threads-on-battery",
        ["N", "as threads", "2"],
        "Compute threads while the machine runs on its battery; the text stays the same",
        |s, v| put(&mut s.battery_threads, threads(v).map(Some)),
    ),
    setting(
        SettingPart::Battery,
        "-o power-supplies",
        ["FILE", "/sys/class/power_supply", "/sys/class/power_supply"],
        "Folder in which the system lists power supplies",
        |s, v| put(&mut s.power_supplies, file(v)),
    )
    .hidden(),
    setting(
        SettingPart::Device,
        Setting::Device.typed(),
        ["cpu|cuda", "cpu", "cuda"],
        "Compute device; cuda fills VRAM first, then main memory",
        |s, v| put(&mut s.options.device.kind, one_of(v, DEVICES)),
    ),
    setting(
        SettingPart::Device,
        Setting::Vram.typed(),
        ["SIZE", "fit", "8G"],
        "VRAM to use at most: 8G, 16x (experts per layer), or fit: all that is free",
        |s, v| {
            (s.options.device.vram_bytes, s.options.device.vram_experts) = vram(v)?;
            Ok(())
        },
    ),
    setting(
        SettingPart::Device,
        Setting::VramKv.typed(),
        ["LAYERS", "as many as leave room for experts", "12"],
        "Layers whose KV cache is in VRAM, those with a sliding window first; others in main memory",
        |s, v| put(&mut s.options.device.vram_kv_layers, number(v).map(Some)),
    ),
    switch(
        SettingPart::Device,
        Setting::FlashAttn.typed(),
        "FlashAttention on tensor cores for prompts, in half precision; logits change a little",
        |s, v| put(&mut s.options.device.flash_attention, truth(v)),
    ),
    #[cfg(feature = "edge")]
    setting(
        SettingPart::Edge,
        Setting::Edge.typed(),
        ["FILE", "none", "topology.toml"],
        "Topology file of workers, which compute experts where that is faster than reading them",
        |s, v| put(&mut s.edge.topology, file(v).map(Some)),
    ),
    #[cfg(feature = "edge")]
    setting(
        SettingPart::Edge,
        "-o edge-placement",
        ["FILE", "none", "placement.json"],
        "Placement file that names the experts which are always computed on this machine",
        |s, v| put(&mut s.edge.placement, file(v).map(Some)),
    ),
    #[cfg(feature = "edge")]
    setting(
        SettingPart::Edge,
        "-o edge-format",
        ["f32|bf16", "f32", "bf16"],
        "Number format on the network; bf16 halves the traffic and may change the text",
        |s, v| {
            use larder_edge::wire::Format;
            put(&mut s.edge.format, one_of(v, &[("f32", Format::F32), ("bf16", Format::Bf16)]))
        },
    ),
    #[cfg(feature = "edge")]
    setting(
        SettingPart::Edge,
        "-o edge-deadline",
        ["MS", "1000", "500"],
        "Milliseconds for a worker's answer for one token, before another worker is asked",
        |s, v| put(&mut s.edge.deadline_ms, number(v).map(|ms| ms as u64)),
    ),
    setting(
        SettingPart::Vision,
        Setting::Vision.typed(),
        ["auto|preload|off", "auto", "off"],
        "Load the image tower with the first image (auto) or at the start (preload); off refuses images",
        |s, v| put(&mut s.options.vision.tower, one_of(v, &TOWER_USES)),
    )
    .by_store(),
    setting(
        SettingPart::Vision,
        Setting::Mmproj.typed(),
        ["FILE", "the model's own, or the mmproj file beside a GGUF file", "mmproj-F16.gguf"],
        "File with the image tower",
        |s, v| put(&mut s.mmproj, file(v).map(Some)),
    ),
    setting(
        SettingPart::Vision,
        Setting::ImageTokens.typed(),
        ["N", "4096", "1024"],
        "The most tokens of an image, which the memory plan counts: larger pictures are made smaller",
        |s, v| put(&mut s.options.vision.image_tokens, image_tokens(v)),
    )
    .by_store(),
];
