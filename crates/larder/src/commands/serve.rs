//! `larder serve`.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use larder_core::{LayerIdx, MoeRow, Presence};
use larder_engine::{ChatFormat, Routing, SequenceOrigin};
use larder_model::{Decoder, ExpertPath};
use larder_policy::routing::RoutingSpec;
use larder_runtime::{InferenceEngine, OpenModel, Options, TextCodec, model_name};
use larder_serve::{EngineStatus, LayerVisit, RoutingQuality, ServerOptions, SessionDisk, TOKENIZER_THREADS};
use std::time::{Duration, Instant};

use super::{listen, signal};
use crate::cli::serve::ServeArgs;
use crate::models;
use crate::origin::SequenceOrigins;

/// Time between two writes of the hot set.
const HOT_SET_PAUSE: Duration = Duration::from_secs(300);

/// Serves HTTP until a signal ends it.
pub fn run(args: ServeArgs) -> Result<()> {
    if args.api_key.as_deref().is_some_and(str::is_empty) {
        bail!("the API key is empty; set --api-key (or LARDER_API_KEY) to some text, or leave it out");
    }
    let address = SocketAddr::new(args.host, args.port);
    // The port is bound before the model is loaded, so that a port in use is reported at once.
    let listener = listen(address, "--port")?;
    let address = listener.local_addr()?;
    let options = options(&args);
    let flags = args.engine.full();
    let model = models::open_to_run(&args.model, flags.no_store)?;
    let text = model.text_codec()?;
    let context = args.context.min(model.blueprint.context);
    let prompt_bytes = text.tokenizer.longest_text(context).saturating_mul(TOKENIZER_THREADS);
    // While a sequence is written to disk, its memory is still in use.
    let sequences = options.sessions + usize::from(options.session_disk.is_some());
    let engine_options = Options { sequences, prompt_bytes, ..args.hot_set.set(flags.options(args.context)) };
    let mut engine = InferenceEngine::start(&model, &engine_options)?;
    let origins = SequenceOrigins::new(&model, &engine_options, &engine, options.session_disk.is_some())
        .context("--session-dir cannot be used")?;
    let served = served_model(&args, &model, text, &mut engine)?;
    if !options.is_local && options.api_key.is_none() {
        eprintln!("warning: {address} is reachable from other machines without a key; set --api-key to require one");
    }
    eprintln!("serving {} on http://{address}", served.name);
    let routing = flags.routing.strategy;
    let engine = Box::new(Served { engine, model, routing, origins, hot_set_kept: Instant::now() });
    Ok(larder_serve::serve(listener, options, served, engine, signal)?)
}

fn options(args: &ServeArgs) -> ServerOptions {
    ServerOptions {
        parallel: args.parallel,
        sessions: args.sessions.unwrap_or(args.parallel).max(args.parallel),
        session_disk: args.session_dir.clone().map(|folder| SessionDisk { folder, limit_bytes: args.session_disk.0 }),
        queue: args.queue,
        timeout: Duration::from_secs(args.timeout),
        client_timeout: Duration::from_secs(args.client_timeout),
        body_bytes: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        api_key: args.api_key.clone(),
        cors: args.cors.clone(),
        is_local: args.host.is_loopback(),
    }
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
        generation: model.generation()?,
        context: args.context.min(model.blueprint.context),
        vocab: model.blueprint.vocab,
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

    fn new_sequence(&mut self) {
        self.engine.experts.new_sequence();
    }

    fn idle(&mut self) -> bool {
        if self.hot_set_kept.elapsed() >= HOT_SET_PAUSE {
            self.engine.experts.write_hot_set();
            self.hot_set_kept = Instant::now();
        }
        self.engine.experts.read_hot()
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
        EngineStatus { traffic: experts.traffic(), lambda, routing, quality }
    }

    fn set_routing(&mut self, spec: &str) -> Result<(), String> {
        let routing: RoutingSpec = spec.parse().map_err(|error| format!("{error}"))?;
        let InferenceEngine { decoder, experts, .. } = &mut self.engine;
        experts.set_routing_strategy(&routing, decoder, &self.model).map_err(|error| format!("{error:#}"))?;
        self.routing = routing;
        Ok(())
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
