//! Disks that fail under a running model.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_cache::{Cache, Scope, slot_count};
use larder_engine::{Session, Streaming};
use larder_model::{AllResident, Compute, Decoder, ExpertPath, Rows};
use larder_policy::eviction::find;
use larder_store::reader::{Arena, Memory, Mishap, When};
use larder_store::{ConvertOptions, Experts, Source, Store, convert, open_source};

use crate::support::{fixture, golden_models};

const TOKENS: [u32; 12] = [5, 17, 3, 3, 60, 41, 8, 101, 7, 12, 90, 33];

/// A golden model's store, and everything needed to run it.
struct Model {
    _dir: tempfile::TempDir,
    store: Arc<Store>,
    decoder: Decoder,
    compute: Arc<Compute>,
}

fn model(folder: &std::path::Path) -> Model {
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
    fn resident(&self) -> AllResident {
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

    /// The store's shards read from memory, with whatever `prepare` does to the reads.
    fn streaming(&self, slots: usize, scope: Scope, prefetch: usize, memory: Memory) -> Streaming {
        let geometry = self.decoder.geometry();
        let bytes = geometry.moe_layers.iter().map(|l| self.store.layout(*l).bytes).max().unwrap();
        let (_arena, pieces) = Arena::new(slot_count(geometry, slots, scope), bytes).unwrap();
        let lru = find("lru").unwrap();
        // A store of its own, which has not found any shard good yet.
        let shards = Box::new(Arc::new(Store::open(self.store.path()).unwrap()));
        let cache = Cache::new(geometry, slots, scope, lru, pieces, Box::new(memory), shards);
        Streaming::new(cache, self.compute.clone(), prefetch)
    }

    fn memory(&self) -> Memory {
        let (paths, _) = self.store.shard_files();
        Memory::new(Arc::new(paths.iter().map(|p| std::fs::read(p).unwrap()).collect()), 11)
    }
}

/// Logits of a prompt in pieces, and of as many tokens after it one by one.
fn read_and_write<P: ExpertPath>(session: &mut Session<P>) -> Vec<f32> {
    let mut logits = session.read(&TOKENS, 5, Rows::All, &mut ()).unwrap();
    for token in TOKENS {
        logits.extend(session.read(&[token], 1, Rows::Last, &mut ()).unwrap());
    }
    logits
}

#[test]
fn g1_latency_and_a_full_queue_change_no_bit() {
    for folder in golden_models() {
        let model = model(&folder);
        let mut resident = model.resident();
        let want = read_and_write(&mut Session::new(&model.decoder, &mut resident, 100));
        for (queue, overtaken) in [(1, 0), (2, 3), (8, 7)] {
            for (slots, scope) in [(1, Scope::Layer), (2, Scope::Layer), (1, Scope::Global), (5, Scope::Global)] {
                for prefetch in [0, 2] {
                    let memory = model.memory().capacity(queue).overtaken(overtaken);
                    let mut streaming = model.streaming(slots, scope, prefetch, memory);
                    let got = read_and_write(&mut Session::new(&model.decoder, &mut streaming, 100));
                    let folder = folder.display();
                    assert!(got == want, "{folder}: {slots} slots, {scope:?}, queue of {queue}, {prefetch} ahead");
                }
            }
        }
    }
}

#[test]
fn g3_a_failure_ends_the_reading_and_the_session_goes_on() {
    let model = model(&fixture("golden/olmoe"));
    let mut resident = model.resident();
    let want = Session::new(&model.decoder, &mut resident, 100).read(&TOKENS, 4, Rows::Last, &mut ()).unwrap();
    let mut happened = 0;
    let often = When::OneIn(3);
    // A flipped bit is looked for when a shard is first read in a run, so it has to come then.
    let first = (0..12).map(|shard| (Mishap::Flipped(4321), When::Shard(shard), 1));
    let upsets = [(Mishap::Gone, often, 4), (Mishap::Short(5000), often, 4)].into_iter().chain(first);
    for (i, (mishap, when, times)) in upsets.enumerate() {
        let memory = model.memory().overtaken(2).upset(when, mishap, times);
        let upsets = memory.upsets();
        let mut streaming = model.streaming(2, Scope::Layer, i % 3, memory);
        let mut session = Session::new(&model.decoder, &mut streaming, 100);
        let mut failures = 0;
        let got = loop {
            match session.read(&TOKENS, 4, Rows::Last, &mut ()) {
                Ok(logits) => break logits,
                Err(error) => {
                    let said = error.to_string();
                    assert!(said.contains("layer ") && said.contains("expert "), "{said}");
                    assert!(session.tokens().is_empty(), "a failed read leaves no tokens");
                    failures += 1;
                    assert!(failures < 10, "{mishap:?} never passes");
                }
            }
        };
        assert_eq!(failures > 0, upsets.load(Ordering::Relaxed) > 0, "{mishap:?}");
        happened += failures;
        assert!(got == want, "{mishap:?}: the text is wrong after a failure");
    }
    assert!(happened >= 10, "only {happened} failures happened");
}
