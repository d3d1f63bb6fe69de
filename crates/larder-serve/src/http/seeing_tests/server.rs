//! A server with a tiny model, and a sight that draws what a tower would make of pictures from their pixels.

use std::hash::Hasher;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use larder_core::{EncodedImage, ImageGrid, Rng};
use larder_engine::{
    ContextLimit, Drafting, ImageMarks, Images, LossMeter, Picture, SequenceOrigin, Sight, SightError,
};
use larder_model::{AllResident, Decoder, ExpertPath};
use larder_text::{ChatFormat, ChatTemplate, ContextFull, GenerationConfig, Tokenizer, TokenizerConfig};
use larder_vision::{DecodeLimits, decode};
use serde_json::{Map, Value, json};
use twox_hash::XxHash3_64;

use crate::decode::{self, PictureEncoder};
use crate::engine::{Engine, EngineStatus, LayerVisit, RoutingChange, RoutingRefused};
use crate::http::of_model;
use crate::model::{ModelFacts, ServedModel, ServedVision};
use crate::options::ServerOptions;
use crate::queue::RequestQueue;
use crate::state::{App, ServerState, SharedState};
use crate::telemetry::metrics::Metrics;
use crate::testing::tiny;

pub const CONTEXT: usize = 400;
const HIDDEN: usize = 32;
pub const ROWS: usize = 3;
pub const COLUMNS: usize = 5;
/// Largest file of a picture.
pub const FILE_BYTES: usize = 1 << 20;

pub fn fixture(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/vision/qwen3_vl_moe");
    larder_os::read_regular(&folder.join(name), 1 << 20).unwrap()
}

/// The file of a picture.
pub fn picture_file(name: &str) -> Vec<u8> {
    fixture(&format!("../images/{name}.png"))
}

/// Draws what it makes of pictures from their pixels.
pub struct DrawnSight {
    images: Images,
    marks: ImageMarks,
    encoded: AtomicUsize,
    /// Whether encoding fails from now on.
    pub fails: Mutex<bool>,
}

impl Sight for DrawnSight {
    fn look(&self, file: &[u8]) -> Result<Picture, SightError> {
        let limits = DecodeLimits { bytes: FILE_BYTES, ..DecodeLimits::default() };
        let image = decode(file, &limits).map_err(|error| SightError::Refused(error.to_string()))?;
        let mut hash = [0; 32];
        for (seed, part) in hash.chunks_exact_mut(8).enumerate() {
            let mut hasher = XxHash3_64::with_seed(seed as u64);
            hasher.write(image.pixels());
            part.copy_from_slice(&hasher.finish().to_le_bytes());
        }
        let picture = self.images.picture(hash, ImageGrid { rows: ROWS, columns: COLUMNS });
        picture.map_err(|error| SightError::Failed(error.to_string()))
    }

    fn encode(&self, file: &[u8]) -> Result<Picture, SightError> {
        if *self.fails.lock().unwrap() {
            return Err(SightError::Failed("the tower is gone".into()));
        }
        let picture = self.look(file)?;
        if picture.encoded.is_some() {
            return Ok(picture);
        }
        self.encoded.fetch_add(1, Ordering::Relaxed);
        let Picture { hash, grid, .. } = picture;
        let mut rng = Rng::new(u64::from_le_bytes(hash[..8].try_into().unwrap()));
        let mut rows = || (0..grid.tokens() * HIDDEN).map(|_| rng.unit() as f32 - 0.5).collect::<Vec<f32>>();
        let encoded = EncodedImage { grid, width: HIDDEN, rows: rows(), deepstack: vec![rows(), rows()] };
        self.images.encoded(hash, encoded).map_err(|error| SightError::Failed(error.to_string()))
    }

    fn marks(&self) -> &ImageMarks {
        &self.marks
    }

    fn most_bytes(&self) -> usize {
        FILE_BYTES
    }
}

struct TinyEngine(Decoder, AllResident);

impl Engine for TinyEngine {
    fn decoder_and_experts(&mut self) -> (&Decoder, &mut dyn ExpertPath) {
        (&self.0, &mut self.1)
    }

    fn step_tokens(&self) -> usize {
        16
    }

    fn sequence_bytes(&self, _: usize) -> u64 {
        0
    }

    fn growth_bytes(&self, _: usize, _: usize, _: usize) -> u64 {
        0
    }

    fn new_sequence(&mut self) {}

    fn idle(&mut self) -> bool {
        false
    }

    fn end(&mut self) {}

    fn status(&self) -> EngineStatus {
        EngineStatus::default()
    }

    fn set_routing(&mut self, _: &RoutingChange) -> Result<(), RoutingRefused> {
        Ok(())
    }

    fn lambda_costs(&self) -> Map<String, Value> {
        Map::new()
    }

    fn loss_meter(&self) -> LossMeter {
        LossMeter::new(0, 0)
    }

    fn drafting(&self) -> Drafting {
        Drafting::default()
    }

    fn sequence_origin(&self) -> SequenceOrigin {
        SequenceOrigin::new("tiny", "")
    }

    fn record_visits(&mut self, _: bool) {}

    fn take_visits(&mut self) -> Vec<LayerVisit> {
        vec![]
    }

    fn resident_experts(&self) -> Vec<Vec<usize>> {
        vec![]
    }
}

/// A server, and what it sees with.
pub struct SeeingServer {
    app: App,
    router: Router,
    pub sight: Option<Arc<DrawnSight>>,
    decoding: Option<JoinHandle<()>>,
    pub runtime: tokio::runtime::Runtime,
}

impl SeeingServer {
    /// Encoded pictures are kept within `kept_bytes`.
    pub fn start(sees: bool, template: Option<&str>, kept_bytes: usize) -> Self {
        SeeingServer::start_with(options(), sees, template, kept_bytes)
    }

    /// Fetches pictures of these hosts.
    pub fn fetching(hosts: &[&str]) -> Self {
        let image_urls = hosts.iter().map(|host| host.parse().unwrap()).collect();
        SeeingServer::start_with(ServerOptions { image_urls, ..options() }, true, None, 1 << 20)
    }

    fn start_with(options: ServerOptions, sees: bool, template: Option<&str>, kept_bytes: usize) -> Self {
        let config: Value = serde_json::from_slice(&fixture("config.json")).unwrap();
        let (decoder, experts) = tiny(&config);
        let tokenizer_config = TokenizerConfig::from_bytes(&fixture("tokenizer_config.json")).unwrap();
        let tokenizer = Tokenizer::from_bytes(&fixture("tokenizer.json"), &tokenizer_config).unwrap();
        let template = ChatTemplate::new(template.map(str::as_bytes), &tokenizer_config).unwrap();
        let images = Images::new(kept_bytes);
        let text = "<|vision_start|><|image_pad|><|vision_end|>".to_owned();
        let marks = ImageMarks { image: tokenizer.id("<|image_pad|>").unwrap(), text };
        let sight =
            DrawnSight { images: images.clone(), marks, encoded: AtomicUsize::new(0), fails: Mutex::new(false) };
        let sight = sees.then(|| Arc::new(sight));
        let seen_with = sight.clone().map(|sight| sight as Arc<dyn Sight>);
        let vision = ServedVision {
            sight: seen_with,
            images,
            blindness: "this model takes no images; a_vl_moe does".into(),
            ..ServedVision::default()
        };
        let chat_format =
            template.as_ref().map_or_else(ChatFormat::plain, |own| ChatFormat::of_template(own, &tokenizer));
        let model = ServedModel {
            name: "tiny".into(),
            aliases: vec![],
            tokenizer,
            template,
            chat_format,
            generation: GenerationConfig::default(),
            max_tokens: Some(6),
            welcome: None,
            context: ContextLimit { tokens: CONTEXT, larger: vec![] },
            vocab: 330,
            facts: ModelFacts::default(),
            has_embeddings: false,
            layers: vec![0, 1],
            experts: 8,
            top_k: 3,
            memory_plan: Value::Null,
            vision,
            files: Box::new(|| Ok(())),
        };
        let app = Arc::new(ServerState {
            queue: RequestQueue::new(16, 2),
            server: Arc::new(SharedState::new(options)),
            model,
            metrics: Arc::new(Metrics::default()),
            grammars: OnceLock::new(),
        });
        let encoder = app.model.vision.sight.clone().map(|sight| PictureEncoder::start(sight).unwrap());
        let own = app.clone();
        let decoding = thread::spawn(move || decode::run(&own, Box::new(TinyEngine(decoder, experts)), None, encoder));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        SeeingServer { router: of_model(app.clone()), app, sight, decoding: Some(decoding), runtime }
    }

    pub fn seeing() -> Self {
        SeeingServer::start(true, None, 1 << 20)
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.runtime.block_on(self.posted(path, body))
    }

    pub async fn posted(&self, path: &str, body: &Value) -> (u16, Value) {
        let request = Request::post(path).body(Body::from(body.to_string())).unwrap();
        let response = TowerToHyperService::new(self.router.clone()).call(request).await.unwrap();
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    pub fn get(&self, path: &str) -> Value {
        let request = Request::get(path).body(Body::empty()).unwrap();
        self.runtime.block_on(async {
            let response = TowerToHyperService::new(self.router.clone()).call(request).await.unwrap();
            serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
        })
    }

    /// The answer to a chat with these messages, with log-probabilities: text, their numbers, tokens of the prompt and
    /// those that were cached.
    pub fn answer(&self, messages: &Value) -> SeenAnswer {
        let (status, body) = self.post("/v1/chat/completions", &chat(messages));
        assert_eq!(status, 200, "{body}");
        answer_of(&body)
    }

    pub fn encoded(&self) -> usize {
        self.sight.as_ref().map_or(0, |sight| sight.encoded.load(Ordering::Relaxed))
    }
}

impl Drop for SeeingServer {
    fn drop(&mut self) {
        self.app.queue.close();
        let _ = self.decoding.take().map(JoinHandle::join);
    }
}

#[derive(PartialEq, Debug, Clone)]
pub struct SeenAnswer {
    pub text: String,
    pub logprobs: Value,
    pub prompt: u64,
    pub cached: u64,
}

pub fn answer_of(body: &Value) -> SeenAnswer {
    let (choice, usage) = (&body["choices"][0], &body["usage"]);
    SeenAnswer {
        text: choice["message"]["content"].as_str().unwrap().to_owned(),
        logprobs: choice["logprobs"].clone(),
        prompt: usage["prompt_tokens"].as_u64().unwrap(),
        cached: usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
    }
}

pub fn chat(messages: &Value) -> Value {
    json!({"messages": messages, "temperature": 0, "logprobs": true, "top_logprobs": 3, "ignore_eos": true})
}

fn options() -> ServerOptions {
    ServerOptions {
        parallel: 2,
        sessions: 2,
        slots: 4,
        step_time: Duration::from_millis(250),
        session_disk: None,
        context_full: ContextFull::Stop,
        queue: 16,
        timeout: Duration::from_secs(60),
        client_timeout: Duration::from_secs(10),
        body_bytes: 8 << 20,
        api_keys: vec![],
        process_bytes: || None,
        cors: None,
        strict_model: false,
        lock_routing: false,
        keep_client_lines: false,
        is_local: true,
        with_tls: false,
        upstream: None,
        image_urls: vec![],
    }
}
