//! The commands of `larder eval`, one file each.

use anyhow::Result;

use crate::cli::eval::{EvalArgs, EvalCommand};

mod agreement;
mod grid;
mod gsm8k;
mod mcq;
mod measure;
mod optimal;
mod passage;
mod ppl;
mod sensitivity;
mod sweep;

pub use measure::{Measurement, bar, read_all};
pub use passage::Passage;
pub use sweep::small_share;

/// Runs a command of `larder eval`.
pub fn run(args: EvalArgs) -> Result<()> {
    match args.command {
        EvalCommand::Ppl(args) => ppl::run(&args),
        EvalCommand::Mcq(args) => mcq::run(&args),
        EvalCommand::Gsm8k(args) => gsm8k::run(&args),
        EvalCommand::Agreement(args) => agreement::run(args),
        EvalCommand::Sensitivity(args) => sensitivity::run(&args),
        EvalCommand::Optimal(args) => optimal::run(args),
        EvalCommand::Sweep(args) => sweep::run(*args),
    }
}
