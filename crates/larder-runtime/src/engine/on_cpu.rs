//! A model on the CPU: all experts in memory, or a cache of them in slots, perhaps with edge workers.

use std::sync::Arc;

use anyhow::Result;
use larder_cache::{Cache, CacheScope, SlotSupply, pass_through_slots};
use larder_engine::{Routing, StreamingPath};
use larder_model::ComputeContext;
use larder_policy::eviction::{CacheShape, PolicyInputs};
use larder_store::Store;
use larder_store::reader::Arena;

use super::parts::{EngineParts, new_compute, require_store};
#[cfg(feature = "edge")]
use crate::experts::edge;
use crate::experts::{ElasticSlots, EnginePath, Slots};
use crate::machine::budget::{MemoryUse, PlannedMemory};
use crate::notices::Notice;
use crate::open::OpenModel;
use crate::options::{CacheSize, Options};
use crate::plan::{MemoryPlan, PlanInputs, decide};

/// Assembles an engine on the CPU. Slots are allocated before the weights are read, so that a lack of memory shows
/// early.
pub(super) fn assemble(
    model: &OpenModel,
    options: &Options,
    inputs: &PlanInputs,
    policy_inputs: &PolicyInputs,
) -> Result<EngineParts> {
    let plan = decide(inputs, options)?;
    if plan.slots().is_some() {
        require_store(model)?;
    }
    if let Some(store) = model.store().filter(|_| !options.uses_edge()) {
        store.require_all()?;
    }
    model.notices().send(Notice::Plan(plan.describe(inputs)));
    let compute = Arc::new(new_compute(options, inputs)?);
    let mut report = plan.json(inputs);
    let mut memory = PlannedMemory::new(plan.parts(inputs))?;
    let mut elastic = None;
    if !matches!(plan, MemoryPlan::Elastic(_)) {
        memory.take(MemoryUse::Experts)?;
    }
    let (path, slots): (Box<dyn EnginePath>, _) = match (plan, model.store()) {
        (MemoryPlan::Slots { slots, scope }, Some(store)) => {
            let StreamingParts { experts, reader_note, slots } =
                streaming_parts(store, slots, scope, &compute, options, policy_inputs)?;
            model.notices().send(Notice::Reader(reader_note.clone()));
            report["reader"] = reader_note.into();
            (with_edge(experts, store, model, options)?, Some(slots))
        }
        (MemoryPlan::Elastic(plan), Some(store)) => {
            let shape = cache_shape(store, plan.most, plan.scope, options);
            let StreamingParts { mut experts, reader_note, slots } =
                parts_of_shape(store, &shape, plan.pass_through, &compute, options, policy_inputs)?;
            let first = store.manifest().geometry.moe_layers[0];
            elastic = Some(ElasticSlots::new(plan, &mut experts, slots.clone(), first, memory.budget())?);
            model.notices().send(Notice::Reader(reader_note.clone()));
            report["reader"] = reader_note.into();
            (Box::new(experts), Some(slots))
        }
        // With a slot for every expert, the first token need not wait until all are loaded.
        (MemoryPlan::AllResident, Some(store)) if options.cache.size != CacheSize::All => {
            let all = inputs.blueprint.geometry.experts;
            let StreamingParts { experts, reader_note, slots } =
                streaming_parts(store, all, CacheScope::Layer, &compute, options, policy_inputs)?;
            report["reader"] = reader_note.into();
            (with_edge(experts, store, model, options)?, Some(slots))
        }
        #[cfg(feature = "edge")]
        (_, None) if options.uses_edge() => edge::refuse_no_store(model)?,
        _ => (Box::new(model.all_resident(&compute)?), None),
    };
    let all = (inputs.blueprint.geometry.experts, CacheScope::Layer);
    let planned_slots = path.streaming().map(|_| plan.slots().unwrap_or(all));
    let prefill_tokens = inputs.prefill_tokens;
    Ok(EngineParts {
        path,
        slots,
        elastic,
        compute,
        report,
        memory,
        context: inputs.context_limit(),
        prefill_tokens,
        planned_slots,
        gpu: None,
        runs_ahead: false,
    })
}

/// The shape of a cache with this number of slots.
pub(super) fn cache_shape(store: &Store, slots: usize, scope: CacheScope, options: &Options) -> CacheShape {
    CacheShape { scratch: options.cache.scratch, ..CacheShape::new(&store.manifest().geometry, slots, scope) }
}

/// A path through slots in main memory.
pub(super) struct StreamingParts {
    pub experts: StreamingPath,
    /// The reader and how it reads, as text.
    pub reader_note: String,
    /// The memory of the slots.
    pub slots: Arena,
}

/// A path with an empty cache of this number of slots.
pub(super) fn streaming_parts(
    store: &Arc<Store>,
    slots: usize,
    scope: CacheScope,
    compute: &Arc<ComputeContext>,
    options: &Options,
    policy_inputs: &PolicyInputs,
) -> Result<StreamingParts> {
    let shape = cache_shape(store, slots, scope, options);
    parts_of_shape(store, &shape, pass_through_slots(&shape), compute, options, policy_inputs)
}

/// As [`streaming_parts`], with a cache of this shape and this number of pass-through slots.
fn parts_of_shape(
    store: &Arc<Store>,
    shape: &CacheShape,
    pass_through: usize,
    compute: &Arc<ComputeContext>,
    options: &Options,
    policy_inputs: &PolicyInputs,
) -> Result<StreamingParts> {
    let policies = options.cache.eviction.make(shape, policy_inputs)?;
    let Slots { slots: memory, reader, reader_note, arena } =
        Slots::new(store, shape, pass_through, &options.cache.reader)?;
    let geometry = &store.manifest().geometry;
    let supply = SlotSupply { memory, reader, shards: Box::new(store.clone()), threads: compute.clone() };
    let cache = Cache::new(geometry, shape, policies, supply);
    let experts = StreamingPath::new(Routing::default(), cache, compute.clone(), options.cache.prefetch);
    Ok(StreamingParts { experts, reader_note, slots: arena })
}

/// The path through slots, with edge workers if the options name a topology.
fn with_edge(
    local: StreamingPath,
    store: &Arc<Store>,
    model: &OpenModel,
    options: &Options,
) -> Result<Box<dyn EnginePath>> {
    #[cfg(feature = "edge")]
    if let Some(edge) = &options.edge {
        let edge = edge::connect(local, store, edge, options.compute.exact, model.notices())?;
        return Ok(Box::new(edge));
    }
    let _ = (store, model, options);
    Ok(Box::new(local))
}
