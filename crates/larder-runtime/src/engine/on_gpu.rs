//! A model on a GPU: resident weights, KV cache and some experts in VRAM, other experts in memory, all on the SSD.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use larder_cache::SlotSupply;
use larder_cache::two_tiers::{MeasuredCosts, TierShape, TieredCache};
use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx, format_bytes};
use larder_engine::{Routing, TieredPath};
use larder_model::{Activation, ComputeContext, ExpertWorkspace, MoeCall, Routed};
use larder_policy::eviction::PolicyInputs;
use larder_store::ExpertSource as _;
use serde_json::json;

use super::parts::{EngineParts, OnGpu, new_compute, require_store};
use crate::experts::{GpuPath, Slots};
use crate::inputs::tier_inputs;
use crate::machine::budget::{MemoryUse, PlannedMemory};
use crate::machine::gpu::{GpuParts, GpuThroughput};
use crate::notices::{Notice, Setting};
use crate::open::OpenModel;
use crate::options::{CacheSize, Options};
use crate::plan::PlanInputs;
use crate::plan::tiers::{TierPlan, decide};

/// Bytes of experts that are computed to measure the CPU: more than its caches hold.
const PROBE_BYTES: u64 = 128 << 20;
/// The longest that takes. Small experts take longer per byte.
const PROBE_TIME: Duration = Duration::from_millis(50);

/// Assembles an engine with two tiers. The slots of both are allocated before the weights are read, so that a lack of
/// memory shows early.
pub(super) fn assemble(
    model: &OpenModel,
    options: &Options,
    inputs: PlanInputs,
    policy_inputs: &PolicyInputs,
    gpu: GpuParts,
) -> Result<EngineParts> {
    check(options)?;
    let store = require_store(model)?;
    store.require_all()?;
    let (inputs, vram) = tier_inputs(model, options, inputs, &gpu)?;
    let plan = decide(&inputs, &vram, options)?;
    model.notices().send(Notice::Plan(plan.describe(&inputs, &vram)));
    let mut report = plan.json(&inputs, &vram);
    let mut memory = PlannedMemory::new(plan.parts(&inputs))?;
    memory.take(MemoryUse::Experts)?;

    let TierPlan { device_slots, host_slots, pass_through, scope, embedding_bytes } = plan;
    let geometry = &store.manifest().geometry;
    let shape = TierShape::new(geometry, scope, device_slots, host_slots, pass_through);
    let policies = options.cache.eviction.make(&shape.policy_shape(), policy_inputs)?;
    let Slots { slots, reader, reader_note, arena } =
        Slots::for_any_expert(store, shape.host.total_slots(), &options.cache.reader)?;
    model.notices().send(Notice::Reader(reader_note.clone()));
    report["reader"] = reader_note.into();

    let GpuParts { link, compute: of_gpu, how, measure, .. } = gpu;
    let (compute, of_gpu) =
        (new_compute(options, &inputs)?, of_gpu(vram.resident_bytes + embedding_bytes.unwrap_or(0))?);
    let compute = Arc::new(ComputeContext {
        device_products: Some(of_gpu.products),
        device_attention: Some(of_gpu.attention),
        kv_device_layers: inputs.kv_layers_on_device(),
        device_ops: Some(of_gpu.ops),
        ..compute
    });
    let layout = store.layout(geometry.moe_layers[0]);
    let throughput = measure(layout, geometry.top_k)?;
    let host = host_seconds_per_byte(&compute, layout, &inputs);
    let measured = MeasuredCosts { copy: 1.0 / throughput.link_in, host, device: 1.0 / throughput.compute };
    model.notices().send(Notice::GpuThroughput(throughput_text(&throughput, &measured)));
    report["device"]["rates"] = json!({
        "bytes_per_second_in": throughput.link_in,
        "bytes_per_second_out": throughput.link_out,
        "bytes_per_second_vram": throughput.vram,
        "expert_bytes_per_second": throughput.compute,
        "expert_bytes_per_second_on_processor": 1.0 / host,
    });

    let supply = SlotSupply { memory: slots, reader, shards: Box::new(store.clone()), threads: compute.clone() };
    let cache = TieredCache::new(geometry, &shape, policies, supply, link, measured)?;
    let tiered = TieredPath::new(Routing::default(), cache, compute.clone(), of_gpu.experts, options.cache.prefetch);
    let gpu = Some(OnGpu { resident_bytes: vram.resident_bytes, throughput });
    Ok(EngineParts {
        elastic: None,
        context: inputs.context_limit(),
        path: Box::new(GpuPath { tiered, how }),
        slots: Some(arena),
        compute,
        report,
        memory,
        prefill_tokens: inputs.prefill_tokens,
        planned_slots: None,
        gpu,
        runs_ahead: embedding_bytes.is_some(),
    })
}

/// Refuses options that do not work with a GPU.
fn check(options: &Options) -> Result<()> {
    let excluded = [
        (options.compute.exact, Setting::Exact.to_string(), "a GPU multiplies with activations rounded to 8 bits"),
        (
            options.cache.size == CacheSize::All,
            Setting::Cache.with("all"),
            "experts are copied to a GPU when they are first used",
        ),
        (options.uses_edge(), Setting::Edge.to_string(), "experts are computed by either a GPU or edge workers"),
    ];
    match excluded.into_iter().find(|(set, ..)| *set) {
        Some((_, setting, why)) => {
            bail!("{setting} does not work with {}: {why}; leave out one of them", Setting::Device)
        }
        None => Ok(()),
    }
}

/// Seconds per byte of expert that the CPU takes for one token; experts are in its caches only if all of the model fit.
fn host_seconds_per_byte(compute: &Arc<ComputeContext>, layout: &ExpertLayout, inputs: &PlanInputs) -> f64 {
    let most = inputs.available_bytes.map_or(PROBE_BYTES, |bytes| PROBE_BYTES.min(bytes / 8));
    let most = most.min(inputs.all_expert_bytes()) as usize;
    // Valid numbers in any format, none of them extreme. Zeros would all map to one page.
    let experts = vec![0x3C; (most / layout.bytes).max(2) * layout.bytes];
    let x = vec![1.0; layout.up.cols];
    let gate = Gate::softmax(1, 1, false);
    let call = MoeCall::new(LayerIdx(0), &gate, Activation::Silu, &x, 1);
    let routed = Routed::new(vec![ExpertId(0)], vec![1.0]);
    let mut bench = ExpertWorkspace::new(compute.clone());
    let mut experts = experts.chunks_exact(layout.bytes);
    let mut compute_next = || {
        let data = experts.next()?;
        bench.begin(&call, &routed, layout);
        bench.compute(&call, &routed, layout, &[(ExpertId(0), data)]);
        Some(())
    };
    // The first call allocates memory.
    compute_next();
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < PROBE_TIME && compute_next().is_some() {
        count += 1;
    }
    start.elapsed().as_secs_f64() / (count.max(1) * layout.bytes) as f64
}

fn throughput_text(throughput: &GpuThroughput, measured: &MeasuredCosts) -> String {
    let per_second = |rate: f64| format_bytes(rate as u64);
    format!(
        "GPU: VRAM {}/s, copies to it {}/s and back {}/s; experts of one token at {}/s on the GPU, {}/s on the CPU",
        per_second(throughput.vram),
        per_second(throughput.link_in),
        per_second(throughput.link_out),
        per_second(throughput.compute),
        per_second(1.0 / measured.host),
    )
}
