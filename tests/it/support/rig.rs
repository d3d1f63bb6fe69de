//! A golden model as a store, and its experts through any cache.

use std::sync::Arc;

use larder_cache::two_tiers::{FakeDevice, MeasuredCosts, TierShape, TieredCache};
use larder_cache::{Cache, SlotSupply, pass_through_slots};
use larder_core::{CacheScope, Gate, LayerIdx, NumberFormat};
use larder_engine::{FakeDeviceExperts, Recorder, Routing, Session, StreamingPath, TieredPath, TokenInput};
use larder_model::{
    AllResident, ComputeContext, Decoder, DeviceAttention, DeviceProducts, ExactPath, ExpertPath, FakeAttention,
    FakeOps, FakeProducts, HintSource, ModelError, MoeCall, Ops, Routed,
};
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};
use larder_store::reader::{Arena, MemoryReader, Reader, ReaderSpec, Slot};
use larder_store::{CheckReads, ConvertOptions, ExpertSource, MtpTensors, Source, Store, convert, open_source_with};

pub const TOKENS: [u32; 12] = [5, 17, 3, 3, 60, 41, 8, 101, 7, 12, 90, 33];

/// A model's store, and everything needed to run it.
pub struct Model {
    _dir: Option<tempfile::TempDir>,
    pub store: Arc<Store>,
    pub decoder: Decoder,
    pub compute: Arc<ComputeContext>,
}

/// The golden model in a folder.
pub fn model(folder: &std::path::Path) -> Model {
    model_with(folder, MtpTensors::LeftOut)
}

/// The golden model in a folder as a store with experts and smaller copies in these formats.
pub fn model_with_shelf(folder: &std::path::Path, experts: NumberFormat, small: NumberFormat) -> Model {
    let dir = tempfile::tempdir().unwrap();
    let source = open_source_with(folder, MtpTensors::LeftOut).unwrap();
    let blueprint = larder_runtime::blueprint_of(source.as_ref()).unwrap();
    let path = dir.path().join("store");
    let options = ConvertOptions { experts: Some(experts), small_experts: Some(small), ..ConvertOptions::default() };
    convert(source.as_ref(), &blueprint, &path, &options, &()).unwrap();
    Model { _dir: Some(dir), ..open(&path) }
}

/// The model in a checkpoint folder or GGUF file, with or without its layer for multi-token prediction.
pub fn model_with(path: &std::path::Path, mtp: MtpTensors) -> Model {
    let dir = tempfile::tempdir().unwrap();
    let source = open_source_with(path, mtp).unwrap();
    let blueprint = larder_runtime::blueprint_of(source.as_ref()).unwrap();
    let path = dir.path().join("store");
    convert(source.as_ref(), &blueprint, &path, &ConvertOptions::default(), &()).unwrap();
    Model { _dir: Some(dir), ..open(&path) }
}

/// The model in a store.
pub fn open(store: &std::path::Path) -> Model {
    let store = Arc::new(Store::open(store).unwrap());
    let compute = Arc::new(ComputeContext::new(2, false).unwrap());
    let decoder = Decoder::load(store.config(), store.as_ref(), compute.clone()).unwrap();
    Model { _dir: None, store, decoder, compute }
}

/// What a run over two tiers is made of, beside the model.
pub struct Tiers {
    pub shape: TierShape,
    pub measured: MeasuredCosts,
    pub prefetch: usize,
    pub memory: MemoryReader,
    pub device: FakeDevice,
    /// One call in so many fails on the device; 0 for none.
    pub failing: u64,
}

impl Model {
    /// The same model, computed by another context.
    pub fn on(self, compute: ComputeContext) -> Model {
        let compute = Arc::new(compute);
        let decoder = Decoder::load(self.store.config(), self.store.as_ref(), compute.clone()).unwrap();
        Model { decoder, compute, ..self }
    }

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
    pub fn streaming(&self, slots: usize, scope: CacheScope, prefetch: usize, memory: MemoryReader) -> StreamingPath {
        let shape = CacheShape::new(self.decoder.geometry(), slots, scope);
        self.evicting("lru", &shape, prefetch, memory)
    }

    /// The same with the reader of this name; `None` if it does not work here.
    pub fn streaming_with(
        &self,
        reader: &str,
        slots: usize,
        scope: CacheScope,
        prefetch: usize,
    ) -> Option<StreamingPath> {
        if reader == "memory" {
            return Some(self.streaming(slots, scope, prefetch, self.memory()));
        }
        let shape = CacheShape::new(self.decoder.geometry(), slots, scope);
        let (arena, pieces) = Arena::new(shape.total_slots() + pass_through_slots(&shape), self.slot_bytes()).unwrap();
        let files = Arc::new(self.store.shard_files().unwrap());
        let (reader, _) = reader.parse::<ReaderSpec>().unwrap().open(&files, &arena).ok()?;
        Some(self.streaming_over(self.own_store(), reader, "lru", &shape, prefetch, pieces))
    }

    /// The same through any reader.
    pub fn streaming_through(
        &self,
        reader: Box<dyn Reader>,
        slots: usize,
        scope: CacheScope,
        prefetch: usize,
    ) -> StreamingPath {
        let shape = CacheShape::new(self.decoder.geometry(), slots, scope);
        let (_arena, pieces) = Arena::new(shape.total_slots() + pass_through_slots(&shape), self.slot_bytes()).unwrap();
        self.streaming_over(self.own_store(), reader, "lru", &shape, prefetch, pieces)
    }

    /// The same with any policy.
    pub fn evicting(&self, policy: &str, shape: &CacheShape, prefetch: usize, memory: MemoryReader) -> StreamingPath {
        let (_arena, pieces) = Arena::new(shape.total_slots() + pass_through_slots(shape), self.slot_bytes()).unwrap();
        self.streaming_over(self.own_store(), Box::new(memory), policy, shape, prefetch, pieces)
    }

    /// One slot per layer, and only first reads are checked.
    pub fn hardly_checked(&self, memory: MemoryReader) -> StreamingPath {
        let shape = CacheShape::new(self.decoder.geometry(), 1, CacheScope::Layer);
        let (_arena, pieces) = Arena::new(shape.total_slots() + pass_through_slots(&shape), self.slot_bytes()).unwrap();
        let store = self.own_store();
        store.set_check_reads(CheckReads::First);
        self.streaming_over(store, Box::new(memory), "lru", &shape, 0, pieces)
    }

    /// A store of its own, which has not found any shard good yet.
    fn own_store(&self) -> Arc<Store> {
        Arc::new(Store::open(self.store.path()).unwrap())
    }

    fn supply(&self, store: Arc<Store>, reader: Box<dyn Reader>, memory: Vec<Slot>) -> SlotSupply {
        SlotSupply { memory, reader, shards: Box::new(store), threads: self.compute.clone() }
    }

    fn streaming_over(
        &self,
        store: Arc<Store>,
        reader: Box<dyn Reader>,
        policy: &str,
        shape: &CacheShape,
        prefetch: usize,
        slots: Vec<Slot>,
    ) -> StreamingPath {
        let policies = policy.parse::<EvictionSpec>().unwrap().make(shape, &PolicyInputs::default()).unwrap();
        let supply = self.supply(store, reader, slots);
        let cache = Cache::new(self.decoder.geometry(), shape, policies, supply);
        StreamingPath::new(Routing::default(), cache, self.compute.clone(), prefetch)
    }

    /// The same through the slots of a device, those in memory below them, and a bench on either side.
    pub fn tiered(&self, tiers: Tiers) -> TieredPath {
        let Tiers { shape, measured, prefetch, memory, device, failing } = tiers;
        let (slots, policies) = (device.slots(), shape.policy_shape());
        let policies = "lru".parse::<EvictionSpec>().unwrap().make(&policies, &PolicyInputs::default()).unwrap();
        let (_arena, pieces) = Arena::new(shape.host.total_slots(), self.slot_bytes()).unwrap();
        let supply = self.supply(self.own_store(), Box::new(memory), pieces);
        let geometry = self.decoder.geometry();
        let cache = TieredCache::new(geometry, &shape, policies, supply, Box::new(device), measured).unwrap();
        let bench = FakeDeviceExperts::new(slots, self.compute.clone(), 3).failing(failing);
        let mut tiered = TieredPath::new(Routing::default(), cache, self.compute.clone(), Box::new(bench), prefetch);
        tiered.prepare(&self.decoder, 8).unwrap();
        tiered
    }

    /// The decoder again, with the weights of its products on a device.
    pub fn decoder_on(&self, device: Arc<dyn DeviceProducts>) -> Result<Decoder, ModelError> {
        self.decoder_by(ComputeContext { device_products: Some(device), ..ComputeContext::new(2, false).unwrap() })
    }

    /// The decoder again, which remembers keys and values in this way, on a device if there is one.
    pub fn decoder_remembering(
        &self,
        memory: larder_model::KvFormat,
        attention: Option<Arc<FakeAttention>>,
    ) -> Decoder {
        let here = ComputeContext { kv_format: memory, ..ComputeContext::new(2, false).unwrap() };
        let there = |attention: Arc<FakeAttention>| {
            let products = Arc::new(FakeProducts::new(1 << 30));
            let device_ops: Arc<dyn Ops> = Arc::new(FakeOps::fake(products.clone(), attention.clone()));
            (products as Arc<dyn DeviceProducts>, attention as Arc<dyn DeviceAttention>, device_ops)
        };
        let compute = match attention.map(there) {
            Some((products, attention, ops)) => ComputeContext {
                device_products: Some(products),
                device_attention: Some(attention),
                device_ops: Some(ops),
                ..here
            },
            None => here,
        };
        self.decoder_by(compute).unwrap()
    }

    /// The decoder again, on a context of its own.
    pub fn decoder_by(&self, compute: ComputeContext) -> Result<Decoder, ModelError> {
        Decoder::load(self.store.config(), self.store.as_ref(), Arc::new(compute))
    }

    fn slot_bytes(&self) -> usize {
        self.decoder.geometry().moe_layers.iter().map(|l| self.store.layout(*l).bytes).max().unwrap()
    }

    pub fn memory(&self) -> MemoryReader {
        self.memory_of(1)
    }

    /// The shards in memory, on so many drives.
    pub fn memory_of(&self, drives: usize) -> MemoryReader {
        let small = self.store.small_shards().into_iter();
        let small = small.flat_map(|set| set.shards().map(|shard| set.path(&shard)).collect::<Vec<_>>());
        let paths = self.store.shard_paths().into_iter().chain(small);
        let shards: Vec<Vec<u8>> = paths.map(|p| std::fs::read(p).unwrap()).collect();
        MemoryReader::new(Arc::new(vec![shards; drives].concat()), 11)
    }
}

/// A path that is written down.
pub struct Recorded {
    pub path: StreamingPath,
    pub recorder: Recorder,
}

impl ExpertPath for Recorded {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.path.forward(call, out)?;
        self.recorder.record(call, &routed);
        Ok(routed)
    }

    fn exact(&mut self) -> Option<&mut dyn ExactPath> {
        self.path.exact()
    }

    fn wants_hint(&self, source: HintSource, tokens: usize) -> bool {
        self.path.wants_hint(source, tokens)
    }

    fn hint(&mut self, source: HintSource, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.path.hint(source, layer, gate, logits);
    }
}

/// Logits of a prompt in pieces, and of as many tokens after it one by one.
pub fn read_and_write<P: ExpertPath>(session: &mut Session<P>) -> Vec<f32> {
    let mut logits = session.forward(&TokenInput::prompt(&TOKENS).in_chunks(5).all_logits(), &mut ()).unwrap();
    for token in TOKENS {
        logits.extend(session.forward(&TokenInput::decode(&[token]), &mut ()).unwrap());
    }
    logits
}
