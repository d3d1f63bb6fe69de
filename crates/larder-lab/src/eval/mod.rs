//! Quality: perplexity, accuracy on questions, and the effect of cache-aware routing on both.
//!
//! The caller provides the decoder, its experts and the token sequences; nothing here opens a model or parses flags.

mod agreement;
mod csv;
mod forced_router;
mod gsm8k;
mod logit_spread;
mod loss;
mod loss_fit;
mod mcq;
mod pareto;
mod rank_probe;
mod recording;
mod score;
mod statistics;
mod text;
mod tradeoffs;

pub use agreement::{RoutingAgreement, ShadowRouting};
pub use forced_router::{ExpertSwap, ForcedRouter, SwapHandle};
pub use gsm8k::{MathProblem, final_number, read_problems};
pub use logit_spread::LogitSpread;
pub use loss::loss;
pub use loss_fit::{LossSample, fit_losses, fit_quality};
pub use mcq::{CHOICES, McqPrompt, Question, mcq_preamble, read_questions, subject_of};
pub use pareto::pareto_front;
pub use rank_probe::{RankOptimality, RankProbe};
pub use recording::RecordingPath;
pub use score::{ChunkScore, score, step_tokens};
pub use statistics::{ChunkEstimate, perplexity, perplexity_change, wilson_interval};
pub use text::{chunks, read_text, read_token_ids, text_prefix};
#[cfg(test)]
pub(crate) use tradeoffs::tests::sweep as sample_tradeoffs;
pub use tradeoffs::{BestWithin, RoutingRun, Tradeoff, TradeoffSetup, Tradeoffs, tradeoffs_csv};
