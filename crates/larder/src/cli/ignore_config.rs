//! The flag with which a model opens although its config has keys that might change its results.

use clap::Args;

use super::heading;

/// The keys of a model's config that are overlooked.
#[derive(Args, Clone, Default)]
pub struct IgnoreConfig {
    /// Go on in spite of these keys of config.json, which are refused because they might change the result, as if they
    /// were absent
    #[arg(long = "ignore-config", value_name = "KEY,…", value_delimiter = ',', hide_short_help = true, help_heading = heading::MODEL)]
    pub keys: Vec<String>,
}
