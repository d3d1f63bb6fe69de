//! Opens and starts a model with the flags of `larder serve`.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_core::format_bytes;
use larder_runtime::plan::{PlanInputs, decide};
use larder_runtime::{
    AvailableMemory, CacheSize, ContextSize, DeviceKind, InferenceEngine, OpenModel, Options, TextCodec, VisionUse,
    blindness, plan_inputs, plan_inputs_in,
};
use larder_serve::{Engine, FilesCheck, ModelFacts, PINS, ServedModel, ServedVision, ServerOptions, TOKENIZER_THREADS};
use larder_text::ChatFormat;

use super::engine::ServedEngine;
use crate::cli::serve::ServeArgs;
use crate::models;
use crate::origin::SequenceOrigins;

/// The flags that models are opened with.
pub struct ModelOpener {
    pub args: ServeArgs,
    pub server: ServerOptions,
}

/// A model on disk with the options of its engine.
pub struct OpenedModel {
    opener: Arc<ModelOpener>,
    model: OpenModel,
    text: TextCodec,
    options: Options,
}

impl ModelOpener {
    /// The names of a single model in the API.
    pub fn names(&self, name: &str) -> Vec<String> {
        if self.args.alias.is_empty() { vec![name.to_owned()] } else { self.args.alias.clone() }
    }

    /// Opens a model, without loading weights.
    pub fn open(self: &Arc<Self>, path: &Path) -> Result<OpenedModel> {
        let ModelOpener { args, server } = &**self;
        let settings = &args.engine.settings;
        let model = models::open_to_run(path, settings, &args.ignore_config)?;
        let mut text = model.text_codec()?;
        if let Some(path) = &args.chat_template_file {
            text.template = Some(models::template_of(&model, path)?);
        }
        // While a sequence is written to disk, its memory is still in use.
        let saved = usize::from(server.session_disk.is_some());
        let mut options = Options {
            sequences: server.sessions + saved,
            whole_contexts: 1 + saved,
            pins: PINS,
            prompt_bytes_per_token: text.tokenizer.longest_text(1).saturating_mul(TOKENIZER_THREADS),
            program_bytes: server.bytes(settings.options.context.at_most(model.blueprint.context)),
            kv_limit_bytes: args.kv_mem.map(|size| size.0),
            ..models::options(settings, settings.options.context)?
        };
        if settings.options.vision.tower != VisionUse::Off
            && let Ok(Some(tower)) = model.tower()
        {
            let image_tokens = settings.options.vision.image_tokens;
            options.program_bytes += server.picture_bytes(image_tokens, tower.token_bytes);
        }
        // Slots that follow the available memory give way to grammars.
        if options.cache.size != CacheSize::Auto {
            options.program_bytes += server.grammar_bytes(model.blueprint.vocab);
        }
        check_kv_limit(&plan_inputs(&model, &options)?)?;
        Ok(OpenedModel { opener: self.clone(), model, text, options })
    }

    /// Refuses flags that concern one model where there are several.
    pub fn check_several(&self) -> Result<()> {
        let args = &self.args;
        let settings = &args.engine.settings;
        let options = settings.options(settings.options.context);
        for (is_given, flag, instead) in [
            (!args.alias.is_empty(), "--alias", "name a model with -m NAME=PATH"),
            (!args.ignore_config.keys.is_empty(), "--ignore-config", "convert that model with it"),
            (args.chat_template_file.is_some(), "--chat-template-file", "put chat_template.jinja into its folder"),
            (settings.draft.is_some(), "--speculate draft=STORE", "serve that model alone"),
            (options.cache.evictor.is_some(), "-o evictor=FILE", "put the file into the model's store"),
            (options.cache.size == CacheSize::Auto, "--cache auto", "give a size"),
            (options.device.kind != DeviceKind::Cpu, "--device", "serve that model alone"),
            (options.uses_edge(), "--edge", "serve that model alone"),
        ] {
            if is_given {
                bail!("{flag} is for one model, and several were named; {instead}");
            }
        }
        Ok(())
    }
}

impl OpenedModel {
    /// The context by the memory plan, and the model's own.
    pub fn contexts(&self) -> Result<[usize; 2]> {
        Ok([plan_inputs(&self.model, &self.options)?.context, self.model.blueprint.context])
    }

    /// Decides the memory plan as if the model were alone in a process that takes `process_bytes` before, with
    /// `available` bytes for it and the context of one of `models` that share them. Its sizes are kept for the start.
    /// Returns the bytes that it needs beside the process.
    pub fn plan_alone(&mut self, process_bytes: u64, available: u64, models: usize) -> Result<u64> {
        let within = |bytes| AvailableMemory { process: process_bytes, available: Some(bytes) };
        let shared = plan_inputs_in(&self.model, &self.options, within(available / models.max(1) as u64))?;
        self.options.kv_limit_bytes = shared.kv_limit_bytes;
        if self.options.context == ContextSize::Auto {
            self.options.context = shared.context.into();
        }
        let inputs = plan_inputs_in(&self.model, &self.options, within(available))?;
        let plan = decide(&inputs, &self.options)?;
        let bytes = plan.total_bytes(&inputs).saturating_sub(process_bytes);
        if matches!(self.options.cache.size, CacheSize::Available | CacheSize::All) && plan.slots().is_some() {
            self.options.cache.size = CacheSize::Bytes(plan.expert_bytes(&inputs));
        }
        Ok(bytes)
    }

    /// Loads the resident weights and starts the engine. The first name is that of responses.
    pub fn start(self, names: Vec<String>) -> Result<(ServedModel, Box<dyn Engine>)> {
        let OpenedModel { opener, model, text, options } = self;
        let mut engine = InferenceEngine::start(&model, &options)?;
        let origins = SequenceOrigins::new(&model, &options, &engine, opener.server.session_disk.is_some())
            .context("--session-dir cannot be used")?;
        let served = served_model(&opener.args, &model, text, &mut engine, names)?;
        let routing = options.routing;
        Ok((served, Box::new(ServedEngine::new(engine, model, routing, origins))))
    }
}

/// Refuses memory for KV caches in which not even one request of a whole context fits, beside a sequence that is
/// written to disk.
fn check_kv_limit(inputs: &PlanInputs) -> Result<()> {
    let Some(limit) = inputs.kv_limit_bytes else { return Ok(()) };
    let least = PlanInputs { sequences: inputs.whole_contexts, kv_limit_bytes: None, ..inputs.clone() }.kv_bytes();
    if limit < least {
        bail!(
            "--kv-mem {} is less than the {} of {}{}; raise it, or lower --context",
            format_bytes(limit),
            format_bytes(least),
            if inputs.whole_contexts > 1 { "two contexts of " } else { "a context of " },
            format_args!("{} tokens", inputs.context),
        );
    }
    Ok(())
}

fn served_model(
    args: &ServeArgs,
    model: &OpenModel,
    text: TextCodec,
    engine: &mut InferenceEngine,
    names: Vec<String>,
) -> Result<ServedModel> {
    let geometry = &model.blueprint.geometry;
    let mut names = names.into_iter();
    let of_template = |template| ChatFormat::of_template(template, &text.tokenizer);
    let vision = ServedVision {
        sight: engine.sight(model, &text.tokenizer)?,
        images: engine.images().clone(),
        blindness: blindness(model, args.engine.settings.options.vision.tower),
        ..ServedVision::default()
    };
    let chat_format = text.template.as_ref().map_or_else(ChatFormat::plain, of_template);
    Ok(ServedModel {
        name: names.next().unwrap_or_default(),
        aliases: names.collect(),
        tokenizer: text.tokenizer,
        template: text.template,
        chat_format,
        generation: args.sampling.over(model.generation()?)?,
        max_tokens: args.max_tokens,
        welcome: model.welcome()?,
        context: engine.context.clone(),
        vocab: model.blueprint.vocab,
        facts: facts(model)?,
        has_embeddings: engine.decoder.encoder_layers() == 0,
        layers: geometry.moe_layers.iter().map(|layer| layer.index()).collect(),
        experts: geometry.experts,
        top_k: geometry.top_k,
        memory_plan: std::mem::take(&mut engine.plan),
        vision,
        files: files_check(model),
    })
}

/// What the API says of a model; its quantization is the format of the experts' largest matrix.
fn facts(model: &OpenModel) -> Result<ModelFacts> {
    let (resident, experts) = model.bytes()?;
    let sources = model.experts()?;
    let first = model.blueprint.geometry.moe_layers.first();
    let format = first.map(|layer| sources.as_dyn().layout(*layer).kinds().up.to_string());
    Ok(ModelFacts {
        family: model.blueprint.model_type.clone(),
        parameters: model.parameters()?,
        quantization: format.unwrap_or_default().to_uppercase(),
        bytes: resident + experts,
    })
}

/// Tells whether the drives of a store are there; other models are in memory as a whole.
fn files_check(model: &OpenModel) -> FilesCheck {
    let store = model.store().cloned();
    Box::new(move || store.as_ref().map_or(Ok(()), |store| store.require_drives().map_err(|error| error.to_string())))
}
