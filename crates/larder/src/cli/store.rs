//! The flags of commands about stores.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Check every byte of a store against its checksums
#[derive(Args)]
pub struct VerifyArgs {
    /// Folder of the store
    pub store: PathBuf,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Maintain a store
#[derive(Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    pub command: StoreCommand,
}

#[derive(Subcommand)]
pub enum StoreCommand {
    /// Change the config of a store, as in `larder store set STORE rope_theta=500000`
    Set(SetArgs),
    /// Accept evictor.safetensors, quality.json and vision.json that were copied into a store
    Seal(SealArgs),
    /// Add the image tower of its source to a store that was made without it
    AddVision(AddVisionArgs),
}

/// Add the image tower of its source to a store that was made without it
#[derive(Args)]
pub struct AddVisionArgs {
    /// Checkpoint folder, .gguf file with an mmproj file beside it, or mmproj file
    pub source: PathBuf,
    /// Folder of the store
    pub store: PathBuf,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Change the config of a store, as in `larder store set STORE rope_theta=500000`
#[derive(Args)]
pub struct SetArgs {
    /// Folder of the store
    pub store: PathBuf,
    /// Key of the config, with dots between nested keys, and its new value as JSON or plain text; refused where it
    /// contradicts the tensors
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = parse_assignment)]
    pub changes: Vec<Assignment>,
    /// Print the changes as JSON
    #[arg(long)]
    pub json: bool,
}

/// `KEY=VALUE`.
#[derive(Clone, PartialEq, Debug)]
pub struct Assignment {
    pub key: String,
    pub value: serde_json::Value,
}

fn parse_assignment(text: &str) -> Result<Assignment, String> {
    let (key, value) = text.split_once('=').filter(|(key, _)| !key.is_empty()).ok_or("must be KEY=VALUE")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok(Assignment { key: key.to_owned(), value })
}

/// Accept evictor.safetensors, quality.json and vision.json that were copied into a store
#[derive(Args)]
pub struct SealArgs {
    /// Folder of the store
    pub store: PathBuf,
    /// Print the names as JSON
    #[arg(long)]
    pub json: bool,
}
