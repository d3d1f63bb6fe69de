//! A model with two MoE layers, workers that hold its experts, and a reference with all experts in memory.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use larder_cache::{Cache, CacheScope, Shards, SlotSupply, pass_through_slots};
use larder_core::{CallerThread, DEFINITION, ExpertId, ExpertLayout, Gate, Geometry, LayerIdx, NumberFormat};
use larder_engine::{Routing, StreamingPath};
use larder_model::{Activation, AllResident, ComputeContext, ExpertPath, MoeCall, TokenOrigin};
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};
use larder_store::StoreError;
use larder_store::reader::{Arena, MemoryReader};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

use crate::workers::wire::experts_server::{Experts, ExpertsServer};
use crate::workers::wire::{ComputeReply, ComputeRequest, DescribeRequest, Description, Format};
use crate::workers::{
    ClientOptions, ComputeJob, Edge, ExpertHost, ExpertSet, Handshake, PROTOCOL_VERSION, TlsCredentials,
    UNUSED_TIMEOUT, WorkerAddress, WorkerAddresses, WorkerOptions, WorkerPool, WorkerPreference, serve,
};

pub const HIDDEN: usize = 24;
const EXPERTS: usize = 8;
pub const LAYERS: [LayerIdx; 2] = [LayerIdx(0), LayerIdx(2)];

pub fn geometry() -> Geometry {
    Geometry {
        layers: 3,
        moe_layers: LAYERS.to_vec(),
        experts: EXPERTS,
        top_k: 3,
        hidden: HIDDEN,
        inter: 16,
        bias: false,
    }
}

pub fn handshake() -> Handshake {
    Handshake { model: "feed".into(), geometry: geometry(), exact: false }
}

struct PlainShards(ExpertLayout);

impl Shards for PlainShards {
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

fn layout() -> ExpertLayout {
    ExpertLayout::new(HIDDEN, 16, [NumberFormat::F32; 3], false).unwrap()
}

/// The bytes of every expert, layer by layer.
fn experts() -> Vec<Vec<u8>> {
    let value = |expert: usize, i: usize| ((i * 31 + expert * 17 + i * expert % 7) % 97) as f32 / 97.0 - 0.5;
    let floats = layout().bytes / 4;
    (0..2 * EXPERTS).map(|e| (0..floats).flat_map(|i| value(e, i).to_le_bytes()).collect()).collect()
}

fn cache(slots: usize) -> Cache {
    let shape = CacheShape::new(&geometry(), slots, CacheScope::Global);
    let policies = "lru".parse::<EvictionSpec>().unwrap().make(&shape, &PolicyInputs::default()).unwrap();
    let (_arena, memory) = Arena::new(shape.total_slots() + pass_through_slots(&shape), layout().bytes).unwrap();
    let (reader, shards) = (Box::new(MemoryReader::new(Arc::new(experts()), 3)), Box::new(PlainShards(layout())));
    let supply = SlotSupply { memory, reader, shards, threads: Arc::new(CallerThread) };
    Cache::new(&geometry(), &shape, policies, supply)
}

fn compute() -> Arc<ComputeContext> {
    Arc::new(ComputeContext::new(1, false).unwrap())
}

pub fn host() -> ExpertHost {
    ExpertHost::new(cache(2 * EXPERTS), compute())
}

/// The experts of both layers whose index satisfies `is_held`.
pub fn experts_where(is_held: impl Fn(u16) -> bool) -> ExpertSet {
    ExpertSet::from_fn(&geometry(), |_, expert| is_held(expert.0))
}

/// A server in a thread, shut down when it is dropped.
pub struct TestServer {
    pub address: String,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))) || std::thread::panicking(), "a worker panicked");
    }
}

impl TestServer {
    pub fn socket(&self) -> SocketAddr {
        self.address.split_once("://").unwrap().1.parse().unwrap()
    }
}

pub fn listen(scheme: &str, serve: impl FnOnce(TcpListener, oneshot::Receiver<()>) + Send + 'static) -> TestServer {
    listen_at(TcpListener::bind("127.0.0.1:0").unwrap(), scheme, serve)
}

fn listen_at(
    listener: TcpListener,
    scheme: &str,
    serve: impl FnOnce(TcpListener, oneshot::Receiver<()>) + Send + 'static,
) -> TestServer {
    let address = format!("{scheme}://{}", listener.local_addr().unwrap());
    let (end, ended) = oneshot::channel();
    let thread = std::thread::spawn(move || serve(listener, ended));
    TestServer { address, end: Some(end), thread: Some(thread) }
}

pub fn worker_options() -> WorkerOptions {
    WorkerOptions {
        name: "worker".into(),
        in_flight: 4,
        connections: 8,
        unused_timeout: UNUSED_TIMEOUT,
        request_timeout: Duration::from_secs(5),
        drain: Duration::ZERO,
        tls: None,
    }
}

/// A correct worker.
pub fn worker(held: ExpertSet) -> TestServer {
    worker_with(worker_options(), handshake(), held)
}

pub fn worker_with(options: WorkerOptions, handshake: Handshake, held: ExpertSet) -> TestServer {
    serving(TcpListener::bind("127.0.0.1:0").unwrap(), options, handshake, held)
}

/// A correct worker on this listener.
pub fn worker_at(listener: TcpListener, options: WorkerOptions, held: ExpertSet) -> TestServer {
    serving(listener, options, handshake(), held)
}

fn serving(listener: TcpListener, options: WorkerOptions, handshake: Handshake, held: ExpertSet) -> TestServer {
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    listen_at(listener, scheme, move |listener, ended| {
        let end = async {
            let _ = ended.await;
        };
        serve(listener, options, handshake, held, host(), end).unwrap();
    })
}

/// A fault that a faulty worker applies to its replies; returns a delay.
pub type ReplyFault = fn(&mut ComputeReply) -> Result<Duration, Status>;

struct FakeWorker {
    host: Mutex<ExpertHost>,
    corrupt: ReplyFault,
}

#[tonic::async_trait]
impl Experts for FakeWorker {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<Description>, Status> {
        let held = experts_where(|_| true).to_wire();
        Ok(Response::new(Description {
            version: PROTOCOL_VERSION,
            model: handshake().model,
            definition: DEFINITION,
            held,
            ..Default::default()
        }))
    }

    async fn compute(&self, request: Request<ComputeRequest>) -> Result<Response<ComputeReply>, Status> {
        let request = request.into_inner();
        let job = ComputeJob::read(&request, &handshake()).map_err(|e| Status::internal(e.to_string()))?;
        let computed = self.host.lock().compute(&job).map_err(Status::internal)?;
        let mut reply = ComputeReply {
            version: PROTOCOL_VERSION,
            id: request.id,
            model: request.model,
            layer: request.layer,
            format: request.format,
            rows: crate::workers::codec::encode(Format::F32, &computed.rows),
            ..Default::default()
        };
        let delay = (self.corrupt)(&mut reply)?;
        tokio::time::sleep(delay).await;
        Ok(Response::new(reply))
    }
}

/// A worker that holds all experts and computes them correctly, then corrupts its reply.
pub fn faulty_worker(corrupt: ReplyFault) -> TestServer {
    listen("http", move |listener, ended| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            listener.set_nonblocking(true).unwrap();
            let incoming =
                tokio_stream::wrappers::TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
            let service = ExpertsServer::new(FakeWorker { host: Mutex::new(host()), corrupt });
            let serving = tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming);
            tokio::select! {
                served = serving => served.unwrap(),
                _ = ended => {}
            }
        });
    })
}

/// The addresses of workers, with their names.
pub fn addresses(workers: &[(&str, &TestServer)], tls: TlsCredentials) -> WorkerAddresses {
    let machine = |(name, worker): &(&str, &TestServer)| WorkerAddress {
        name: (*name).into(),
        address: worker.address.clone(),
        preference: WorkerPreference::Ordinary,
    };
    WorkerAddresses { workers: workers.iter().map(machine).collect(), discover: None, tls }
}

pub fn client_options() -> ClientOptions {
    ClientOptions { format: Format::F32, deadline: Duration::from_millis(400) }
}

/// A client of these workers that can also read the experts `stored` itself, into two slots.
pub fn edge(workers: &[(&str, &TestServer)], stored: ExpertSet) -> Edge {
    edge_with(&addresses(workers, TlsCredentials::default()), client_options(), stored)
}

pub fn edge_with(addresses: &WorkerAddresses, options: ClientOptions, stored: ExpertSet) -> Edge {
    edge_of(WorkerPool::connect(addresses, handshake(), options).unwrap(), stored)
}

pub fn edge_of(pool: WorkerPool, stored: ExpertSet) -> Edge {
    // Without this set, free slots would be filled first.
    let always_local = Some(experts_where(|_| false));
    Edge::new(StreamingPath::new(Routing::default(), cache(2), compute(), 0), pool, always_local, stored)
}

/// The bits of the outputs of some calls, with one and with several tokens, in both layers.
pub fn outputs(path: &mut dyn ExpertPath, scales_input: bool) -> Result<Vec<Vec<u32>>, String> {
    let rounds = [1, 1, 7, 1, 300].into_iter().enumerate();
    let calls = rounds.flat_map(|(round, tokens)| LAYERS.map(|layer| (round, tokens, layer)));
    calls.map(|(round, tokens, layer)| output(path, scales_input, round, tokens, layer)).collect()
}

/// The first of these calls.
pub fn one_layer(path: &mut dyn ExpertPath) -> Result<Vec<u32>, String> {
    output(path, false, 0, 1, LAYERS[0])
}

fn output(
    path: &mut dyn ExpertPath,
    scales_input: bool,
    round: usize,
    tokens: usize,
    layer: LayerIdx,
) -> Result<Vec<u32>, String> {
    let gate = Gate { scales_input, ..Gate::softmax(EXPERTS, 3, true) };
    let number = |i: usize| ((i * 37 + round * 11 + layer.index() * 5) % 101) as f32 / 25.0 - 2.0;
    let x: Vec<f32> = (0..tokens * HIDDEN).map(number).collect();
    let logits: Vec<f32> = (0..tokens * EXPERTS).map(|i| number(i * 3 + 1)).collect();
    let act = Activation::ClampedSwiglu { alpha: 1.7, limit: 7.0 };
    let origins = vec![TokenOrigin::default(); tokens];
    let call = MoeCall { logits: &logits, origins: &origins, ..MoeCall::new(layer, &gate, act, &x, tokens) };
    let mut out = vec![f32::NAN; tokens * HIDDEN];
    path.forward(&call, &mut out).map_err(|e| e.to_string())?;
    Ok(out.iter().map(|v| v.to_bits()).collect())
}

/// The bits of the same outputs with all experts in memory.
pub fn expected(scales_input: bool) -> Vec<Vec<u32>> {
    let mut all = AllResident::new(3, compute());
    let mut experts = experts().into_iter();
    for layer in LAYERS {
        all.set(layer, layout(), experts.by_ref().take(EXPERTS).collect());
    }
    outputs(&mut all, scales_input).unwrap()
}
