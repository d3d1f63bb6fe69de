//! A model on a GPU: resident weights, keys and values and some experts in its memory, others in that of the machine, all on the SSD.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use larder_cache::tiers::{Measured, Supply, TierSetting, TieredCache};
use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx};
use larder_engine::{Routing, Tiered};
use larder_model::{Activation, Call, Compute, Routed, Workbench};
use larder_policy::eviction::Help;
use larder_store::Experts as _;
use serde_json::json;

use crate::cli::EngineFlags;
use crate::engine::{Ready, compute, needs_store};
use crate::experts::Path;
use crate::gpu::{Gpu, Rates};
use crate::open::Model;
use crate::plan::Facts;
use crate::plan::tiers::{Tiers, Vram, decide, passing};
use crate::print;
use crate::slots::Slots;

/// Each resident matrix begins at a multiple of this in a GPU's memory.
const PLACE: u64 = 256;
/// Experts that the processor computes to see how long that takes: more than caches hold.
const PROBED_BYTES: usize = 128 << 20;

/// What a GPU has of a model, and what it gives.
#[derive(Clone, Copy, Debug)]
pub struct OnGpu {
    /// Bytes of resident weights.
    pub resident: u64,
    /// Measured before anything runs.
    pub rates: Rates,
}

/// A way to experts over both tiers. The slots of both come before weights: if there is no room for them, that is known
/// before those are read.
pub fn ready(model: &Model, flags: &EngineFlags, facts: Facts, help: &Help, gpu: Gpu) -> Result<Ready> {
    check(flags)?;
    let store = needs_store(model)?;
    store.require_all()?;
    let (facts, vram) = both(model, flags, facts, &gpu)?;
    let plan = decide(&facts, &vram, flags)?;
    eprintln!("{}", plan.sentences(&facts, &vram));
    let mut said = plan.json(&facts, &vram);

    let Tiers { device, host, passing, scope } = plan;
    let geometry = &store.manifest().geometry;
    let setting = TierSetting::new(geometry, scope, device, host, passing);
    let policies = flags.eviction.make(&setting.policies(), help)?;
    let Slots { memory, reader, how: reading, addresses } = Slots::new(store, setting.host.all_slots(), &flags.reader)?;
    eprintln!("{reading}");
    said["reader"] = reading.into();

    let Gpu { link, bench, products, attention, how, measure, .. } = gpu;
    let compute = compute(flags, &facts)?;
    let compute = Arc::new(Compute { device: Some(products(vram.resident)?), attention: Some(attention), ..compute });
    let layout = store.layout(geometry.moe_layers[0]);
    let rates = measure(layout, geometry.top_k)?;
    let host = on_processor(&compute, layout, facts.available);
    let measured = Measured { copy: 1.0 / rates.link_in, host, device: 1.0 / rates.compute };
    eprintln!("{}", sentence(&rates, &measured));
    said["device"]["rates"] = json!({
        "bytes_per_second_in": rates.link_in,
        "bytes_per_second_out": rates.link_out,
        "bytes_per_second_vram": rates.vram,
        "expert_bytes_per_second": rates.compute,
        "expert_bytes_per_second_on_processor": 1.0 / host,
    });

    let supply = Supply { memory, reader, shards: Box::new(store.clone()) };
    let cache = TieredCache::new(geometry, &setting, policies, supply, link, measured)?;
    let tiered = Tiered::new(Routing::default(), cache, compute.clone(), bench, flags.prefetch);
    let gpu = Some(OnGpu { resident: vram.resident, rates });
    Ok(Ready { path: Path::Tiered { tiered: Box::new(tiered), how }, slots: addresses, compute, said, gpu })
}

/// What there is to plan with on a GPU.
pub fn both<'a>(model: &Model, flags: &EngineFlags, facts: Facts<'a>, gpu: &Gpu) -> Result<(Facts<'a>, Vram)> {
    let (there, here) = model.resident_on_device()?;
    let vram = Vram {
        name: gpu.name.clone(),
        free: gpu.free,
        resident: there.iter().map(|bytes| bytes.next_multiple_of(PLACE)).sum(),
    };
    let scratch_slots = passing(&facts, flags.prefetch).max(flags.cache_scratch);
    Ok((Facts { resident: here, scratch_slots, on_gpu: true, ..facts }, vram))
}

/// Refuses what a GPU has no part in.
fn check(flags: &EngineFlags) -> Result<()> {
    let wrong = [
        (flags.exact, "--exact", "a GPU multiplies with activations of eight bits"),
        (flags.preload, "--preload", "experts come to a GPU when they are wanted"),
        (flags.has_help(), "--edge", "either a GPU or other machines compute experts"),
    ];
    match wrong.into_iter().find(|(set, ..)| *set) {
        Some((_, flag, why)) => bail!("{flag} does not go with --device: {why}"),
        None => Ok(()),
    }
}

/// Seconds for each byte of an expert that the processor computes for one token, out of memory: over more experts than
/// its caches hold.
fn on_processor(compute: &Arc<Compute>, layout: &ExpertLayout, available: Option<u64>) -> f64 {
    let most = available.map_or(PROBED_BYTES, |bytes| PROBED_BYTES.min(bytes as usize / 8));
    // Numbers of any format, none of them extreme. Zeros would be one page of the system's, over and over.
    let experts = vec![0x3C; (most / layout.bytes).max(2) * layout.bytes];
    let x = vec![1.0; layout.gate.cols];
    let gate = Gate::softmax(1, 1, false);
    let call = Call { layer: LayerIdx(0), gate: &gate, act: Activation::Silu, logits: &[], x: &x, tokens: 1 };
    let routed = Routed { ids: vec![ExpertId(0)], weights: vec![1.0] };
    let mut bench = Workbench::new(compute.clone());
    let mut experts = experts.chunks_exact(layout.bytes);
    let mut compute_next = || {
        let data = experts.next()?;
        bench.begin(&call, &routed, layout);
        bench.compute(&call, &routed, layout, &[(ExpertId(0), data)]);
        Some(())
    };
    // The first takes memory for itself.
    compute_next();
    let (start, mut count) = (Instant::now(), 0);
    while compute_next().is_some() {
        count += 1;
    }
    start.elapsed().as_secs_f64() / (count * layout.bytes) as f64
}

fn sentence(rates: &Rates, measured: &Measured) -> String {
    let per_second = |rate: f64| print::bytes(rate as u64);
    format!(
        "GPU: {}/s of its memory, {}/s to it and {}/s back; experts of one token at {}/s there, {}/s on the processor",
        per_second(rates.vram),
        per_second(rates.link_in),
        per_second(rates.link_out),
        per_second(rates.compute),
        per_second(1.0 / measured.host),
    )
}
