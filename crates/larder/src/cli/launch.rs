//! The flags of `larder launch`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use larder_runtime::ContextSize;

use super::heading;
use crate::launch::{CLIENTS, Client};

/// Start a coding agent with a model of this machine, and a server for it if none runs
#[derive(Args)]
pub struct LaunchArgs {
    /// Program to start
    #[arg(value_name = "PROGRAM", value_parser = client())]
    pub client: &'static Client,
    /// Model, as -m
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub named: Option<PathBuf>,
    /// Store, checkpoint folder, .gguf file or model name (default: that of the server that runs, or the demo model)
    #[arg(short, long, help_heading = heading::MODEL)]
    pub model: Option<PathBuf>,
    /// Context size in tokens, as in 64K or max (default: as long as memory allows, and as the program needs)
    #[arg(long, value_name = "N", help_heading = heading::MODEL)]
    pub context: Option<ContextSize>,
    /// Address of the server (default: that of `larder serve`)
    #[arg(long, value_name = "ADDRESS", help_heading = heading::SERVER)]
    pub host: Option<String>,
    /// Port of the server (default: that of `larder serve`)
    #[arg(long, value_name = "N", help_heading = heading::SERVER)]
    pub port: Option<u16>,
    /// Print the environment and the command instead, for a shell
    #[arg(long)]
    pub print: bool,
    /// Arguments of the program
    #[arg(last = true, value_name = "ARGS")]
    pub rest: Vec<String>,
}

fn client() -> impl TypedValueParser<Value = &'static Client> {
    let names = PossibleValuesParser::new(CLIENTS.iter().map(|client| client.name));
    names.try_map(|name| Client::named(&name).ok_or("is not one of the programs"))
}
