//! Text generation on top of a decoder: prefill, decode, sampling, drafting.
//!
//! - A [`Session`] is a [`Sequence`] (tokens with their KV cache) with a decoder and an expert path; [`step()`]
//!   computes pending tokens of any number of sequences. [`generate()`] runs prefill and decode of one session; a
//!   [`Writer`] draws tokens with a [`Sampler`] and turns them into text; a [`Listener`] is told. [`Drafting`] says how
//!   tokens are drafted, so that one step computes several; a [`DraftSource`] drafts them.
//! - Expert paths: [`StreamingPath`] takes experts from a cache in main memory, [`TieredPath`] from device memory and
//!   main memory; both are a [`CachedPath`] and route by a [`Routing`]. A [`Recorder`] collects a trace of the routing.
//! - [`Sequence::save`] and [`Sequence::restore`]: a sequence as bytes, for another run; a [`SavedHead`] is its
//!   beginning.
//! - [`Images`] gives numbers to pictures, of which the ids of their tokens are made, and keeps what a tower made of
//!   recent ones; [`Sequence::show`] tells a sequence of those in its next prompt.
//! - Files beside a model for its policies: [`QualityCalibration`] of routing strategies, [`evictor_from_bytes`].
//!
//! This crate never opens a file (the files of a model arrive as bytes), never prints, and reads the clock only to
//! measure.
//!
//! ```
//! use larder_engine::{Sampler, Sampling};
//!
//! let mut logits = [0.5, 3.0, 1.0];
//! let mut greedy = Sampler::new(Sampling::default(), 7)?;
//! assert_eq!(greedy.sample(&mut logits, &[])?, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod choice;
mod context_limit;
mod generation;
mod hidden_sum;
mod images;
mod output_loss;
mod paths;
mod picture_text;
mod sampler;
mod sequence;
mod sidecars;
mod sight;
mod speculation;
mod times;

pub use choice::{NextDraws, TokenChoice};
pub use context_limit::ContextLimit;
pub use generation::{
    Decoding, FinishReason, GenerateError, Generated, Listener, Request, Session, SessionDecoding, StepStats, Writer,
    WrittenToken, generate,
};
pub use hidden_sum::HiddenSum;
pub use images::{Images, Picture, TooManyPictures};
pub use output_loss::{ExactLogits, LossMeter, MEASURE_EVERY, OutputLoss, kl_divergence_from, log_sum_exp};
pub use paths::{CachedPath, FakeDeviceExperts, Recorder, Routing, StreamingPath, TieredPath};
pub use picture_text::{PictureTextError, base64_of_picture, picture_of_base64};
pub use sampler::{Sampler, SamplerError, Sampling};
pub use sequence::{
    AheadCounts, DRAFT_MAX, MtpState, OwnLayer, PREFILL_TOKENS, SAVED_NOTE_BYTES_MAX, SavedHead, SavedSequenceError,
    Sequence, SequenceOrigin, StepPart, TokenInput, step,
};
pub use sidecars::{
    CostNote, EVICTOR_BYTES_MAX, EVICTOR_FILE, LambdaCost, MeasuredLambda, MeasuredSetting, QualityCalibration,
    SidecarError, evictor_arrays, evictor_from_bytes, lambda_cost_note, text_breaks,
};
pub use sight::{ImageMarks, Sight, SightError};
pub use speculation::{
    Draft, DraftCounts, DraftModel, DraftSource, Drafting, SharedSource, Speculation, SpeculationError, TextSoFar,
};
pub use times::PhaseTimes;
