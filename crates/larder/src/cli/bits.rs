//! The flags that choose number formats by size.

use std::path::PathBuf;

use clap::Args;

use super::engine::parse_threads;

/// Number formats by size.
#[derive(Args)]
pub struct BitsFlags {
    /// Choose the number format of each matrix, so that weights have N bits on average and the model's output changes
    /// as little as possible. That is measured on the text of --text, with one pass through the model for each group of
    /// matrices; the measurements are kept beside the store
    #[arg(long, value_name = "N", value_parser = parse_bits, requires = "text", conflicts_with_all = ["mix", "experts"])]
    pub bits: Option<f64>,
    /// UTF-8 text on which --bits measures, of the kind that the model will read and write
    #[arg(long, value_name = "FILE", requires = "bits")]
    pub text: Option<PathBuf>,
    /// Tokens of the text that --bits uses, in chunks of 512
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(2..))]
    pub text_tokens: u32,
    /// Compute threads of --bits (default: all performance cores)
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<usize>,
}

fn parse_bits(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(bits) if (1.0..=16.0).contains(&bits) => Ok(bits),
        _ => Err("must be a number from 1 to 16".into()),
    }
}
