//! Makes a model ready to run: finds and opens it, plans its memory, and starts an engine of decoder and expert path.
//!
//! - [`Model`] is all of it in three lines: `Model::load(path)?.generate(prompt)?`.
//! - [`OpenModel`] is a model on disk: a store, a checkpoint folder, a GGUF file, or a name on the hub ([`models`]).
//! - [`Options`] say how it runs. [`plan`] decides from them and from the memory of the [`machine`] how many experts
//!   stay in memory, before anything is loaded.
//! - [`InferenceEngine`] is the running model; [`InferenceEngine::session`] generates with it.
//! - [`Notices`] receive what is worth telling meanwhile: the plan, the reader, downloads. This crate prints nothing.
//! - [`settings`] are options as text: the one table of their names, values, defaults and help.
//!
//! The crate parses no flags, reads no configuration and computes nothing itself. Errors are one sentence that says
//! what to do; they name an option by a [`Setting`]. [`sentence`] puts an error and its causes in one line.
//!
//! ```
//! use std::path::Path;
//!
//! use larder_engine::{Listener, Request, Sampler, Sampling, Speculation, generate};
//! use larder_text::StopMatcher;
//! use larder_runtime::{CacheOptions, CacheSize, ContextSize, EngineExperts, InferenceEngine, ModelOptions, Notices, OpenModel, Options};
//!
//! /// Prints the text as it is generated.
//! struct Printer;
//!
//! impl Listener<EngineExperts> for Printer {
//!     fn text(&mut self, piece: &str) -> bool {
//!         print!("{piece}");
//!         true // go on
//!     }
//! }
//!
//! // Notices (the memory plan, the reader) go to standard error, and half of the experts stay in memory.
//! let model_options = ModelOptions { notices: Notices::to(|notice| eprintln!("{notice}")), ..Default::default() };
//! let cache = CacheOptions { size: CacheSize::ExpertsPerLayer(16), ..Default::default() };
//! let options = Options { context: ContextSize::Tokens(64), cache, speculation: Speculation::Auto, ..Default::default() };
//!
//! let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
//! let model = OpenModel::open(&demo, &model_options)?;
//! let text = model.text_codec()?;
//! let prompt = text.tokenizer.encode("The old man looked at the door, and", true)?;
//! let eos = model.generation()?.eos;
//! let mut engine = InferenceEngine::start(&model, &options)?;
//!
//! let sampler = Sampler::new(Sampling::default(), 0)?; // greedy
//! let stop = StopMatcher::new(vec![])?;
//! let drafting = engine.drafting();
//! let request =
//!     Request { prompt: &prompt, sampler, grammar: None, shown: &[], eos: &eos, stop, max_tokens: 8, drafting };
//! let generated = generate(&mut engine.session(), &text.tokenizer, request, &mut Printer)?;
//! assert_eq!(generated.ids.len(), 8);
//! assert!(engine.experts.traffic().is_some_and(|traffic| traffic.counts.misses > 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod engine;
mod experts;
mod inputs;
mod model;
mod notices;
mod open;
mod options;
mod rounding;

pub mod format_search;
pub mod machine;
pub mod plan;
pub mod settings;
pub mod text_pass;
mod vision;

pub use engine::{InferenceEngine, OnGpu, blindness, require_store};
#[cfg(feature = "edge")]
pub use experts::edge;
pub use experts::{CapacityChanges, EngineExperts, Slots, make_router, policy_inputs};
pub use inputs::{
    AvailableMemory, check_drafting, expert_sizes, plan_inputs, plan_inputs_in, tell_context, tier_inputs,
};
pub use machine::gpu;
pub use model::{
    ChatMessages, GenerateOptions, GeneratedText, LoadOptions, Model, ModelStats, PieceKind, PieceListener,
    SharedStats, TextPiece, guarded, text_format,
};
pub use notices::{Notice, Notices, Setting, WorkProgress, error_message, sentence};
pub use open::{
    FormatBytes, ModelExperts, ModelOptions, MtpUse, OpenModel, TextCodec, blueprint_of, check_ignored, check_sidecars,
    model_name, models,
};
#[cfg(feature = "edge")]
pub use options::EdgeOptions;
pub use options::{
    BatteryOptions, CacheOptions, CacheSize, ComputeOptions, ContextSize, DeviceKind, DeviceOptions, Options,
    THREADS_MAX, TraceOptions, VisionOptions, VisionUse, default_threads,
};
pub use rounding::rounding_error;
pub use settings::EngineSettings;
#[cfg(feature = "vision")]
pub use vision::ModelSight;
pub use vision::{
    FoundTower, ImagePrompt, PICTURE_BYTES, PICTURE_PIXELS, PictureFile, PromptWithImages, content_with_images,
    expand_images, find_tower, kept_tower, pictures_to_show, seeing_models, tokens_of_picture,
};
