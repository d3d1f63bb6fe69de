//! A golden model as a store, and its experts through any cache.

use std::sync::Arc;

use larder_cache::Cache;
use larder_core::Scope;
use larder_engine::{Routing, Session, Streaming};
use larder_model::{AllResident, Compute, Decoder, ExpertPath, Rows};
use larder_policy::eviction::{EvictionSpec, Help, Setting};
use larder_store::reader::{Arena, Memory};
use larder_store::{ConvertOptions, Experts, Source, Store, convert, open_source};

pub const TOKENS: [u32; 12] = [5, 17, 3, 3, 60, 41, 8, 101, 7, 12, 90, 33];

/// A golden model's store, and everything needed to run it.
pub struct Model {
    _dir: tempfile::TempDir,
    pub store: Arc<Store>,
    pub decoder: Decoder,
    pub compute: Arc<Compute>,
}

/// The golden model in a folder.
pub fn model(folder: &std::path::Path) -> Model {
    let dir = tempfile::tempdir().unwrap();
    let source = open_source(folder).unwrap();
    let blueprint = larder_model::blueprint(source.config()).unwrap();
    let path = dir.path().join("store");
    convert(source.as_ref(), &blueprint, &path, &ConvertOptions::default(), &()).unwrap();
    let store = Arc::new(Store::open(&path).unwrap());
    let compute = Arc::new(Compute::new(2, false).unwrap());
    let decoder = Decoder::load(store.config(), store.as_ref(), compute.clone()).unwrap();
    Model { _dir: dir, store, decoder, compute }
}

impl Model {
    pub fn resident(&self) -> AllResident {
        let geometry = self.decoder.geometry();
        let mut all = AllResident::new(geometry.layers, self.compute.clone());
        for layer in &geometry.moe_layers {
            let layout = self.store.layout(*layer).clone();
            let experts = (0..geometry.experts).map(|e| {
                let mut data = vec![0; layout.bytes];
                self.store.read_expert(*layer, larder_core::ExpertId(e as u16), &mut data).unwrap();
                data
            });
            let experts = experts.collect();
            all.set(*layer, layout, experts);
        }
        all
    }

    /// The store's shards read from memory through slots that the least recently used leave.
    pub fn streaming(&self, slots: usize, scope: Scope, prefetch: usize, memory: Memory) -> Streaming {
        let setting = Setting::new(self.decoder.geometry(), slots, scope);
        self.evicting("lru", &setting, prefetch, memory)
    }

    /// The same with any policy.
    pub fn evicting(&self, policy: &str, setting: &Setting, prefetch: usize, memory: Memory) -> Streaming {
        let geometry = self.decoder.geometry();
        let bytes = geometry.moe_layers.iter().map(|l| self.store.layout(*l).bytes).max().unwrap();
        let (_arena, pieces) = Arena::new(setting.all_slots(), bytes).unwrap();
        let policies = policy.parse::<EvictionSpec>().unwrap().make(setting, &Help::default()).unwrap();
        // A store of its own, which has not found any shard good yet.
        let shards = Box::new(Arc::new(Store::open(self.store.path()).unwrap()));
        let cache = Cache::new(geometry, setting, policies, pieces, Box::new(memory), shards);
        Streaming::new(Routing::default(), cache, self.compute.clone(), prefetch)
    }

    pub fn memory(&self) -> Memory {
        let (paths, _) = self.store.shard_files();
        Memory::new(Arc::new(paths.iter().map(|p| std::fs::read(p).unwrap()).collect()), 11)
    }
}

/// Logits of a prompt in pieces, and of as many tokens after it one by one.
pub fn read_and_write<P: ExpertPath>(session: &mut Session<P>) -> Vec<f32> {
    let mut logits = session.read(&TOKENS, 5, Rows::All, &mut ()).unwrap();
    for token in TOKENS {
        logits.extend(session.read(&[token], 1, Rows::Last, &mut ()).unwrap());
    }
    logits
}
