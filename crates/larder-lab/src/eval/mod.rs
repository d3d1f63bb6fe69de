//! Quality: what a text costs a model, how often it answers rightly, and how far routing by the cache leads it astray.
//!
//! Whoever calls brings a model and its sequences; nothing here opens a model or knows of a command line.

mod agreement;
mod calibration;
mod csv;
mod forced;
mod gsm8k;
mod loss;
mod mcq;
mod optimal;
mod pareto;
mod recording;
mod score;
mod statistics;
mod text;
mod tradeoffs;

pub use agreement::{Followed, Shadow};
pub use calibration::{Calibration, Spread};
pub use forced::{Forced, Order, Swap};
pub use gsm8k::{Problem, final_number, problems};
pub use loss::loss;
pub use mcq::{CHOICES, Question, Sheet, opening, questions, subject};
pub use optimal::{Optimal, Probe};
pub use pareto::front;
pub use recording::Recording;
pub use score::{Scored, piece_of, score};
pub use statistics::{Estimate, change, perplexity, wilson};
pub use text::{chunks, head, read_ids, read_text};
#[cfg(test)]
pub(crate) use tradeoffs::tests::sweep as sample_tradeoffs;
pub use tradeoffs::{Run, Setup, Tradeoff, Tradeoffs, Within, tradeoffs_csv};
