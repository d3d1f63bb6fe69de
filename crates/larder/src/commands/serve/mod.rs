//! `larder serve`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_core::{LayerIdx, MoeRow, Presence, format_bytes};
use larder_engine::{ChatFormat, ChatTemplate, Drafting, Routing, SequenceOrigin};
use larder_model::{Decoder, ExpertPath};
use larder_policy::routing::RoutingSpec;
use larder_runtime::machine::memory;
use larder_runtime::plan::PlanInputs;
use larder_runtime::{InferenceEngine, OpenModel, Options, TextCodec, model_name, plan_inputs};
use larder_serve::{ApiKey, EngineStatus, LayerVisit, RoutingQuality, ServerOptions, SessionDisk, TOKENIZER_THREADS};
use larder_store::read_small;
use std::time::{Duration, Instant};
use tracing_subscriber::filter::LevelFilter;

use super::signal;
use crate::cli::serve::{LogLevel, ServeArgs};
use crate::models;
use crate::origin::SequenceOrigins;

mod address;

/// Largest file of keys, certificates, and largest chat template.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Time between two writes of the hot set.
const HOT_SET_PAUSE: Duration = Duration::from_secs(300);

/// Serves HTTP until a signal ends it.
pub fn run(args: ServeArgs) -> Result<()> {
    if args.api_key.as_deref().is_some_and(str::is_empty) {
        bail!("the API key is empty; set --api-key (or LARDER_API_KEY) to some text, or leave it out");
    }
    let api_keys = api_keys(&args)?;
    start_log(args.log_level);
    // The port is bound before the model is loaded, so that a port in use is reported at once.
    let (listener, address) = args.address.listen()?;
    let (is_local, with_tls) = (address.is_local_port(), address.with_tls());
    let options = ServerOptions { api_keys, is_local, with_tls, ..options(&args) };
    let flags = args.engine.full();
    let model = models::open_to_run(&args.model, &flags, &args.speculate)?;
    let mut text = model.text_codec()?;
    if let Some(path) = &args.chat_template_file {
        text.template = Some(other_template(&model, path)?);
    }
    let context = args.context.min(model.blueprint.context);
    let prompt_bytes = text.tokenizer.longest_text(context).saturating_mul(TOKENIZER_THREADS);
    // While a sequence is written to disk, its memory is still in use.
    let sequences = options.sessions + usize::from(options.session_disk.is_some());
    let engine_options = Options {
        sequences,
        prompt_bytes,
        program_bytes: options.bytes(context),
        kv_limit_bytes: args.kv_mem.map(|size| size.0),
        ..args.speculate.set(args.hot_set.set(flags.options(args.context)))?
    };
    check_kv_limit(&plan_inputs(&model, &engine_options)?, options.session_disk.is_some())?;
    let mut engine = InferenceEngine::start(&model, &engine_options)?;
    let origins = SequenceOrigins::new(&model, &engine_options, &engine, options.session_disk.is_some())
        .context("--session-dir cannot be used")?;
    let served = served_model(&args, &model, text, &mut engine)?;
    if address.is_public() && options.api_keys.is_empty() {
        eprintln!("warning: {address} is reachable from other machines without a key; set --api-key to require one");
    }
    let serving = format!("serving {} on {address}", served.name);
    let routing = flags.routing.strategy;
    let engine = Box::new(Served { engine, model, routing, origins, hot_set_kept: Instant::now() });
    Ok(larder_serve::serve(listener, options, served, engine, signal, || eprintln!("{serving}"))?)
}

fn options(args: &ServeArgs) -> ServerOptions {
    ServerOptions {
        parallel: args.parallel,
        sessions: args.sessions.unwrap_or(args.parallel).max(args.parallel),
        step_time: Duration::from_secs_f64(args.step_time),
        session_disk: args.session_dir.clone().map(|folder| SessionDisk { folder, limit_bytes: args.session_disk.0 }),
        context_full: args.context_full,
        queue: args.queue,
        timeout: Duration::from_secs(args.timeout),
        client_timeout: Duration::from_secs(args.client_timeout),
        body_bytes: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        api_keys: vec![],
        process_bytes: memory::current,
        cors: args.cors.clone(),
        is_local: false,
        with_tls: false,
    }
}

/// Refuses memory for KV caches in which not even one request of a whole context fits, beside a sequence that is written to disk.
fn check_kv_limit(inputs: &PlanInputs, saves: bool) -> Result<()> {
    let Some(limit) = inputs.kv_limit_bytes else { return Ok(()) };
    let sequences = 1 + usize::from(saves);
    let least = PlanInputs { sequences, kv_limit_bytes: None, ..inputs.clone() }.kv_bytes();
    if limit < least {
        bail!(
            "--kv-mem {} is less than the {} of {}{}; raise it, or lower --context",
            format_bytes(limit),
            format_bytes(least),
            if saves { "two contexts of " } else { "a context of " },
            format_args!("{} tokens", inputs.context),
        );
    }
    Ok(())
}

fn start_log(level: LogLevel) {
    let level = match level {
        LogLevel::Off => return,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Info => LevelFilter::INFO,
    };
    let log = tracing_subscriber::fmt().with_max_level(level).with_ansi(false).with_target(false);
    log.with_writer(std::io::stderr).init();
}

fn other_template(model: &OpenModel, path: &Path) -> Result<ChatTemplate> {
    let Some(jinja) = read_small(path, FILE_BYTES_MAX)? else { bail!("{}: not found", path.display()) };
    model.other_template(&jinja).with_context(|| path.display().to_string())
}

/// The key of `--api-key`, which is an administrator's, and those of `--api-key-file`.
fn api_keys(args: &ServeArgs) -> Result<Vec<ApiKey>> {
    let mut keys: Vec<ApiKey> = args.api_key.iter().map(|key| ApiKey { key: key.clone(), is_admin: true }).collect();
    let Some(path) = &args.api_key_file else { return Ok(keys) };
    let Some(bytes) = read_small(path, FILE_BYTES_MAX)? else { bail!("{}: not found", path.display()) };
    let text = std::str::from_utf8(&bytes).with_context(|| format!("{}: is not UTF-8", path.display()))?;
    for (i, line) in text.lines().enumerate() {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(key) = words.next() else { continue };
        let is_admin = match (words.next(), words.next()) {
            (None | Some("user"), None) => false,
            (Some("admin"), None) => true,
            _ => bail!("{}:{}: expected a key, and admin or user or nothing behind it", path.display(), i + 1),
        };
        keys.push(ApiKey { key: key.to_owned(), is_admin });
    }
    if keys.is_empty() {
        bail!("{}: has no key; write one per line, or leave out --api-key-file", path.display());
    }
    Ok(keys)
}

fn served_model(
    args: &ServeArgs,
    model: &OpenModel,
    text: TextCodec,
    engine: &mut InferenceEngine,
) -> Result<larder_serve::ServedModel> {
    let geometry = &model.blueprint.geometry;
    let mut names = args.alias.iter().cloned();
    let chat_format = text.template.as_ref().map(|template| ChatFormat::of_template(template, &text.tokenizer));
    Ok(larder_serve::ServedModel {
        name: names.next().unwrap_or_else(|| model_name(&args.model)),
        aliases: names.collect(),
        tokenizer: text.tokenizer,
        template: text.template,
        chat_format,
        generation: args.sampling.over(model.generation()?)?,
        max_tokens: args.max_tokens,
        welcome: model.welcome()?,
        context: args.context.min(model.blueprint.context),
        vocab: model.blueprint.vocab,
        has_embeddings: engine.decoder.encoder_layers() == 0,
        layers: geometry.moe_layers.iter().map(|layer| layer.index()).collect(),
        experts: geometry.experts,
        top_k: geometry.top_k,
        memory_plan: std::mem::take(&mut engine.plan),
    })
}

/// A running engine with its model.
struct Served {
    engine: InferenceEngine,
    model: OpenModel,
    routing: RoutingSpec,
    origins: SequenceOrigins,
    /// When the hot set was written last.
    hot_set_kept: Instant,
}

impl larder_serve::Engine for Served {
    fn decoder_and_experts(&mut self) -> (&Decoder, &mut dyn ExpertPath) {
        (&self.engine.decoder, &mut self.engine.experts)
    }

    fn step_tokens(&self) -> usize {
        self.engine.prefill_tokens
    }

    fn sequence_bytes(&self, tokens: usize) -> u64 {
        let (pool, memory) = (self.engine.decoder.kv_pool(), &self.model.blueprint.sequence_memory);
        memory.kv_bytes(tokens, pool.format().kind()) + memory.recurrent_bytes(tokens, &pool.checkpoints())
    }

    fn new_sequence(&mut self) {
        self.engine.experts.new_sequence();
    }

    fn idle(&mut self) -> bool {
        if self.hot_set_kept.elapsed() >= HOT_SET_PAUSE {
            self.engine.experts.write_hot_set();
            self.hot_set_kept = Instant::now();
        }
        self.engine.experts.idle()
    }

    fn end(&mut self) {
        self.engine.experts.write_hot_set();
    }

    fn status(&self) -> EngineStatus {
        let experts = &self.engine.experts;
        let quality = experts.routing().and_then(Routing::quality).map(|quality| RoutingQuality {
            agreement: quality.agreement(),
            kept_mass: quality.kept_mass(),
            kl: quality.mean_kl(),
        });
        let (routing, lambda) = (self.routing.to_string(), self.routing.lambda());
        EngineStatus { traffic: experts.traffic(), slots: experts.slots(), lambda, routing, quality }
    }

    fn set_routing(&mut self, spec: &str) -> Result<(), String> {
        let routing: RoutingSpec = spec.parse().map_err(|error| format!("{error}"))?;
        let InferenceEngine { decoder, experts, .. } = &mut self.engine;
        experts.set_routing_strategy(&routing, decoder, &self.model).map_err(|error| format!("{error:#}"))?;
        self.routing = routing;
        Ok(())
    }

    fn drafting(&self) -> Drafting {
        self.engine.experts.drafting(&self.engine.drafting())
    }

    fn sequence_origin(&self) -> SequenceOrigin {
        self.origins.with(&self.routing)
    }

    fn record_visits(&mut self, on: bool) {
        self.engine.experts.record_visits(on);
    }

    fn take_visits(&mut self) -> Vec<LayerVisit> {
        let rows = self.engine.decoder.geometry().moe_rows();
        let visits = self.engine.experts.take_visits().into_iter();
        let visit = |(layer, visit): (LayerIdx, _)| Some(LayerVisit { row: rows[layer.index()]?, visit });
        visits.filter_map(visit).collect()
    }

    fn resident_experts(&self) -> Vec<Vec<usize>> {
        let geometry = self.engine.decoder.geometry();
        let residency = self.engine.experts.residency();
        let there =
            |row: MoeRow, e: &usize| residency.is_none_or(|all| all.presence(row.expert(*e)) == Presence::Resident);
        let row = |row| (0..geometry.experts).filter(|e| there(row, e)).collect();
        (0..geometry.moe_layers.len()).map(MoeRow).map(row).collect()
    }
}
