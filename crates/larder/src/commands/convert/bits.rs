//! `larder convert --bits`: number formats by size.

use std::path::Path;

use anyhow::{Result, bail};
use larder_runtime::default_threads;
use larder_runtime::format_search::{ChosenFormats, FormatSearch, SearchProgress};
use larder_store::{Importance, checksum_of};
use serde_json::{Value, json};

use crate::cli::ConvertArgs;
use crate::cli::eval::TextFlags;
use crate::commands::eval::Passage;
use crate::models;
use crate::progress::{self, Bar};

/// Tokens of a chunk of the text.
const CHUNK: usize = 512;

/// Chooses the formats, and describes them on standard error.
pub fn choose(args: &ConvertArgs, bits: f64, text: &Path, importance: Option<&Importance>) -> Result<ChosenFormats> {
    if larder_runtime::models::hub_name(&args.source).is_some() {
        bail!(
            "{}: --bits needs the whole model before it converts any of it; download it first",
            args.source.display()
        );
    }
    let model = models::open_ignoring(&args.source, &args.ignore_config)?;
    if model.store().is_some() {
        bail!("{}: is a store, and --bits needs a checkpoint or a .gguf file", args.source.display());
    }
    let tokens = Some(args.bits.text_tokens as usize);
    let chunk = CHUNK.min(model.blueprint.context);
    let passage = Passage::open(&model, &TextFlags { file: text.to_owned(), chunk, tokens })?;
    let chunks: Vec<&[u32]> = passage.chunks().collect();
    let resident = args.resident.0.is_none();
    let search = FormatSearch {
        source: model.source(),
        blueprint: &model.blueprint,
        importance,
        chunks: &chunks,
        resident,
        threads: args.bits.threads.unwrap_or_else(default_threads),
    };
    let ids: Vec<u8> = chunks.iter().copied().flatten().flat_map(|id| id.to_le_bytes()).collect();
    let measured_with = importance.map_or_else(|| "none".to_owned(), Importance::digest);
    let key = format!(
        "source {}, text {}, imatrix {measured_with}, resident {resident}",
        model.identity()?,
        checksum_of(&ids)
    );
    let mut shown = Shown(None);
    let chosen = search.choose(&args.store, &key, bits, &mut shown)?;
    shown.0.iter().for_each(Bar::finish);
    eprintln!("{}", describe(&chosen, &passage));
    Ok(chosen)
}

/// What was chosen, in a line.
fn describe(chosen: &ChosenFormats, passage: &Passage) -> String {
    let all: u64 = chosen.shares.iter().map(|(_, weights)| weights).sum();
    let share = |weights: u64| 100.0 * weights as f64 / all.max(1) as f64;
    let shares: Vec<_> =
        chosen.shares.iter().map(|(kind, weights)| format!("{kind} {:.1} %", share(*weights))).collect();
    format!(
        "formats: {:.3} bits per weight: {}; the output differs by a KL divergence of {:.5} nats on {} tokens of {} (sum of \
         the parts: {:.5})",
        chosen.bits,
        shares.join(", "),
        chosen.kl,
        passage.tokens(),
        passage.name,
        chosen.expected_kl,
    )
}

/// What was chosen, as JSON.
pub fn json(chosen: &ChosenFormats) -> Value {
    let shares: serde_json::Map<String, Value> =
        chosen.shares.iter().map(|(kind, weights)| (kind.name().to_owned(), (*weights).into())).collect();
    json!({
        "bits": chosen.bits,
        "kl": chosen.kl,
        "expected_kl": chosen.expected_kl,
        "weights": shares,
        "mix": chosen.mix,
    })
}

/// A bar for the search.
struct Shown(Option<Bar>);

impl SearchProgress for Shown {
    fn begin(&mut self, tokens: usize) {
        self.0 = Some(progress::count("measuring formats", "tokens", tokens as u64));
    }

    fn advance(&mut self, tokens: usize) {
        self.0.iter().for_each(|bar| bar.advance(tokens as u64));
    }
}
