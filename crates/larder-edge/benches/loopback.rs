//! Latency of remote experts beyond computing: one worker on this machine, in a process of its own, one token per
//! request. `cargo bench -p larder-edge [-- HIDDEN]`

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_cache::{Cache, CacheScope, Shards, SlotSupply};
use larder_core::{CallerThread, ExpertId, ExpertLayout, Gate, Geometry, LayerIdx, NumberFormat};
use larder_edge::wire::Format;
use larder_edge::{
    ClientOptions, Edge, ExpertHost, ExpertSet, Handshake, WorkerAddress, WorkerAddresses, WorkerOptions, WorkerPool,
    serve,
};
use larder_engine::{Routing, StreamingPath};
use larder_model::{Activation, ComputeContext, ExpertPath, MoeCall, TokenOrigin};
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};
use larder_store::StoreError;
use larder_store::reader::{Arena, MemoryReader};

const ROUNDS: usize = 4000;
const TOP_K: usize = 8;
const LAYER: LayerIdx = LayerIdx(0);

/// Minimal experts, so that the transport dominates.
struct Small(ExpertLayout);

impl Shards for Small {
    fn layout(&self, _: LayerIdx) -> &ExpertLayout {
        &self.0
    }

    fn data_start(&self) -> u64 {
        0
    }

    fn check(&self, _: LayerIdx, _: ExpertId, _: usize, _: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }
}

fn geometry(hidden: usize) -> Geometry {
    Geometry { layers: 1, moe_layers: vec![LAYER], experts: 16, top_k: TOP_K, hidden, inter: 32, bias: false }
}

fn cache(geometry: &Geometry) -> Cache {
    let layout =
        ExpertLayout::new(geometry.hidden, geometry.inter, [NumberFormat::F32; 3], false).expect("the layout is valid");
    let shape = CacheShape::new(geometry, geometry.experts, CacheScope::Global);
    let policies = "lru".parse::<EvictionSpec>().and_then(|spec| spec.make(&shape, &PolicyInputs::default()));
    let (_arena, slots) = Arena::new(shape.total_slots(), layout.bytes).expect("memory for the slots");
    let reader = MemoryReader::new(Arc::new(vec![vec![0; layout.bytes]; geometry.experts]), 1);
    let (reader, shards) = (Box::new(reader), Box::new(Small(layout)));
    let supply = SlotSupply { memory: slots, reader, shards, threads: Arc::new(CallerThread) };
    Cache::new(geometry, &shape, policies.expect("lru is a policy"), supply)
}

fn handshake(hidden: usize) -> Handshake {
    Handshake { model: "0".repeat(32), geometry: geometry(hidden), exact: false }
}

fn compute() -> Arc<ComputeContext> {
    Arc::new(ComputeContext::new(1, false).expect("a compute context without extra threads"))
}

fn work(hidden: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    println!("{}", listener.local_addr().expect("the worker's address"));
    let options = WorkerOptions {
        name: "worker".into(),
        in_flight: 8,
        connections: 4,
        request_timeout: Duration::from_secs(10),
        unused_timeout: larder_edge::UNUSED_TIMEOUT,
        drain: Duration::ZERO,
        tls: None,
    };
    let host = ExpertHost::new(cache(&geometry(hidden)), compute());
    serve(
        listener,
        options,
        handshake(hidden),
        ExpertSet::from_fn(&geometry(hidden), |_, _| true),
        host,
        std::future::pending(),
    )
    .expect("the worker runs until it is killed");
}

/// A worker process, killed when it is dropped.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(hidden: usize) -> (Worker, WorkerAddresses) {
    let program = std::env::current_exe().expect("the path of this benchmark");
    let child = Command::new(program).args(["worker", &hidden.to_string()]).stdout(Stdio::piped()).spawn();
    let mut worker = Worker(child.expect("the worker process starts"));
    let mut address = String::new();
    BufReader::new(worker.0.stdout.take().expect("the worker's output is a pipe"))
        .read_line(&mut address)
        .expect("the worker's address");
    let address = format!("http://{}", address.trim());
    let worker_address = WorkerAddress { name: "worker".into(), address, preference: Default::default() };
    (worker, WorkerAddresses { workers: vec![worker_address], ..Default::default() })
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

fn measure(hidden: usize, format: Format) {
    let (_worker, addresses) = start(hidden);
    let options = ClientOptions { format, deadline: Duration::from_secs(5) };
    let pool = WorkerPool::connect(&addresses, handshake(hidden), options).expect("the worker is reachable");
    let local = StreamingPath::new(Routing::default(), cache(&geometry(hidden)), compute(), 0);
    let mut edge = Edge::new(local, pool, None, ExpertSet::empty(&geometry(hidden)));
    let gate = Gate::softmax(16, TOP_K, true);
    let x: Vec<f32> = (0..hidden).map(|i| (i as f32).sin()).collect();
    let mut out = vec![0.0; hidden];
    let mut overheads = Vec::new();
    for round in 0..ROUNDS {
        let logits: Vec<f32> = (0..16).map(|e| ((e * 7 + round * 3) % 16) as f32).collect();
        let call = MoeCall {
            logits: &logits,
            origins: &[TokenOrigin::default()],
            ..MoeCall::new(LAYER, &gate, Activation::Silu, &x, 1)
        };
        let busy = edge.report().workers[0].seconds_busy;
        let start = Instant::now();
        edge.forward(&call, &mut out).expect("the worker replies");
        let took = start.elapsed().as_secs_f64();
        overheads.push(1e6 * (took - (edge.report().workers[0].seconds_busy - busy)));
    }
    let report = edge.report();
    let worker = &report.workers[0];
    overheads.drain(..ROUNDS / 10);
    overheads.sort_by(f64::total_cmp);
    println!(
        "hidden {hidden}, {TOP_K} experts, {format:?}: {:.0} µs besides computing at p50, {:.0} µs at p90, {:.0} µs at p99 \
         ({:.1} kB per request, {:.1} kB per reply, {:.0} µs computing)",
        quantile(&overheads, 0.5),
        quantile(&overheads, 0.9),
        quantile(&overheads, 0.99),
        worker.sent_bytes as f64 / worker.answers as f64 / 1e3,
        worker.received_bytes as f64 / worker.answers as f64 / 1e3,
        1e6 * worker.seconds_busy / worker.answers as f64,
    );
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let number = |at: usize| args.get(at).and_then(|arg| arg.parse().ok()).unwrap_or(2048);
    if args.first().is_some_and(|arg| arg == "worker") {
        return work(number(1));
    }
    [Format::F32, Format::Bf16].into_iter().for_each(|format| measure(number(0), format));
}
