//! The experts of an opened model, wherever the plan wants them.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_cache::{Cache, Scope, Traffic, slot_count};
use larder_engine::Streaming;
use larder_model::{AllResident, Call, ExpertPath, ModelError, Routed};
use larder_policy::eviction::{Policy, find};
use larder_store::Store;
use larder_store::reader::{Arena, Files, check_reader, open_reader};

use crate::cli::CacheFlags;
use crate::open::Model;
use crate::plan::{Facts, Plan, decide};
use crate::{memory, print};

/// Either way in which a model gets at its experts.
pub enum Experts {
    /// All in memory.
    AllResident(AllResident),
    /// Through slots.
    Streaming(Box<Streaming>),
}

/// Experts by the plan that the flags and the memory allow; the plan and the reader are said on standard error.
pub fn open(model: &Model, flags: &CacheFlags) -> Result<Experts> {
    // A misspelt name is an error even where nothing streams and the flag would have no effect.
    let policy = find(&flags.eviction)?;
    check_reader(&flags.reader)?;
    let geometry = &model.blueprint.geometry;
    let (resident, _) = model.bytes()?;
    let slot = slot_bytes(model)?;
    let facts = Facts { geometry, resident, slot, available: memory::available() };
    let plan = decide(&facts, flags)?;
    match plan {
        Plan::AllResident => Ok(Experts::AllResident(model.all_resident()?)),
        Plan::Slots { slots, scope } => {
            let Some(store) = model.store() else {
                let path = model.source().path().display();
                bail!(
                    "{path}: experts can be read one by one from a store only; make one with `larder convert {path} STORE`"
                );
            };
            eprintln!("{}", plan.sentence(&facts));
            stream(store, slots, scope, slot as usize, policy, &flags.reader)
        }
    }
}

/// Bytes of the largest expert.
pub fn slot_bytes(model: &Model) -> Result<u64> {
    let experts = model.experts()?;
    let layouts = model.blueprint.geometry.moe_layers.iter().map(|l| experts.as_dyn().layout(*l));
    Ok(layouts.map(|l| l.bytes).max().unwrap_or_default() as u64)
}

fn stream(
    store: &Arc<Store>,
    slots: usize,
    scope: Scope,
    slot_bytes: usize,
    policy: &Policy,
    reader: &str,
) -> Result<Experts> {
    let geometry = &store.manifest().geometry;
    let total = slot_count(geometry, slots, scope);
    let (arena, memory) = Arena::new(total, slot_bytes)
        .with_context(|| format!("{total} slots of {} cannot be had", print::bytes(slot_bytes as u64)))?;
    let (paths, bytes) = store.shard_files();
    let files = Arc::new(Files::new(paths.len(), bytes, move |shard| paths[shard].clone())?);
    let (reader, how) = open_reader(reader, &files, &arena)?;
    eprintln!("{how}");
    let cache = Cache::new(geometry, slots, scope, policy, memory, reader, Box::new(store.clone()));
    Ok(Experts::Streaming(Box::new(Streaming::new(cache))))
}

impl Experts {
    /// What passed through the cache, if there is one.
    pub fn traffic(&self) -> Option<Traffic> {
        match self {
            Experts::AllResident(_) => None,
            Experts::Streaming(streaming) => Some(streaming.traffic()),
        }
    }
}

impl ExpertPath for Experts {
    fn forward(&mut self, call: &Call, out: &mut [f32]) -> Result<Routed, ModelError> {
        match self {
            Experts::AllResident(all) => all.forward(call, out),
            Experts::Streaming(streaming) => streaming.forward(call, out),
        }
    }
}
