//! `larder inspect`.

use std::collections::BTreeMap;

use anyhow::Result;
use larder_core::{Geometry, NumberFormat, PerMatrix, TensorMeta, printable};
use larder_runtime::plan::ExpertSizes;
use larder_runtime::{FoundTower, OpenModel, sentence};
use larder_store::ExpertSource;
use serde_json::json;

use crate::cli::InspectArgs;
use crate::models;
use crate::print;

/// Usual memory sizes, in GB.
const MEMORIES: [u64; 8] = [2, 4, 8, 12, 16, 24, 32, 64];

/// Shows what a model consists of.
pub fn run(args: &InspectArgs) -> Result<()> {
    let model = models::open_whole(&args.model, &args.ignore_config)?;
    let experts = model.experts()?;
    let found = Found::of(&model, experts.as_dyn());
    if args.json {
        println!("{}", found.json());
        return Ok(());
    }
    print!("{}", print::table(&found.facts()));
    println!("\nExperts that fit beside the resident weights (without KV cache and activations):");
    print!("{}", print::table(&found.fits()));
    Ok(())
}

struct Found {
    model_type: String,
    form: &'static str,
    geometry: Geometry,
    /// Width of the residual stream.
    hidden: usize,
    vocab: usize,
    context: usize,
    /// Bytes by which a long sequence grows with each token, in f16.
    kv_per_token: u64,
    resident: BTreeMap<&'static str, u64>,
    expert_sizes: ExpertSizes,
    expert_kinds: Vec<String>,
    /// Format of the store; `None` for another form of model.
    store_format: Option<u64>,
    /// Number formats and bytes of the largest of the smaller copies of the experts, if there are any.
    small_copy: Option<(Vec<String>, usize)>,
    /// The division of experts between two folders, and the second, if there is one.
    second: Option<(&'static str, String)>,
    /// Bytes of the matrices whose rows are read one by one, by name.
    tables: BTreeMap<String, u64>,
    /// The image tower; what is wrong with it if it cannot be used.
    tower: Result<Option<FoundTower>>,
}

/// The number formats of an expert's matrices.
fn kinds_text(kinds: &PerMatrix<NumberFormat>) -> String {
    kinds.named().map(|(matrix, kind)| format!("{matrix} {kind}")).collect::<Vec<_>>().join(", ")
}

impl Found {
    fn of(model: &OpenModel, experts: &dyn ExpertSource) -> Self {
        let blueprint = &model.blueprint;
        let mut resident = BTreeMap::new();
        let manifest = model.store().map(|store| store.manifest());
        let tables = blueprint.resident.iter().filter(|t| t.by_row);
        let tables = tables.filter_map(|t| Some((t.name.clone(), model.source().rows(&t.name)?.meta().bytes as u64)));
        let tables: BTreeMap<_, _> = tables.collect();
        let in_memory = blueprint.resident.iter().filter(|t| !tables.contains_key(&t.name));
        let metas = in_memory.filter_map(|t| model.source().meta(&t.name));
        for TensorMeta { kind, bytes, .. } in metas {
            *resident.entry(kind.name()).or_default() += *bytes as u64;
        }
        let layouts = || blueprint.geometry.moe_layers.iter().map(|l| experts.layout(*l));
        let mut expert_kinds: Vec<String> = Vec::new();
        for layout in layouts() {
            let kinds = kinds_text(&layout.kinds());
            if !expert_kinds.contains(&kinds) {
                expert_kinds.push(kinds);
            }
        }
        let small_copy = manifest.and_then(|manifest| manifest.small_experts.as_ref());
        let small_copy = small_copy
            .map(|files| (files.classes.iter().map(|class| kinds_text(&class.kinds)).collect(), files.largest_bytes()));
        let second = model.store().and_then(|store| store.second_folder());
        let second = second.map(|second| (second.division.name(), printable(&second.folder.to_string_lossy())));
        Found {
            model_type: blueprint.model_type.clone(),
            form: if model.store().is_some() { "store" } else { "not converted" },
            geometry: blueprint.geometry.clone(),
            hidden: blueprint.hidden,
            vocab: blueprint.vocab,
            context: blueprint.context,
            kv_per_token: blueprint.sequence_memory.bytes_per_token(NumberFormat::F16),
            resident,
            expert_sizes: ExpertSizes::new(layouts().map(|layout| layout.bytes as u64)),
            expert_kinds,
            store_format: manifest.map(|manifest| manifest.format),
            small_copy,
            second,
            tables,
            tower: model.tower(),
        }
    }

    /// Width of what experts read and yield, if it is projected down from the residual stream.
    fn latent(&self) -> Option<usize> {
        Some(self.geometry.hidden).filter(|width| *width != self.hidden)
    }

    fn resident_bytes(&self) -> u64 {
        self.resident.values().sum()
    }

    fn experts_bytes(&self) -> u64 {
        self.expert_sizes.one_per_layer() * self.geometry.experts as u64
    }

    /// Number of experts that one token uses, over all layers.
    fn token_experts(&self) -> usize {
        self.geometry.moe_layers.len() * self.geometry.top_k
    }

    fn facts(&self) -> Vec<Vec<String>> {
        let g = &self.geometry;
        let resident: Vec<String> = self.resident.iter().map(|(k, b)| format!("{k} {}", print::bytes(*b))).collect();
        let row = |name: &str, value: String| vec![format!("{name:<12}{value}")];
        let per_token = self.expert_sizes.one_per_layer() * g.top_k as u64;
        let form = match self.store_format {
            Some(format) => format!("store, format {format}"),
            None => self.form.to_owned(),
        };
        let latent = self.latent().map_or(String::new(), |width| format!(" on a latent {width}"));
        let mut facts = vec![
            row("model", format!("{} ({form})", self.model_type)),
            row("layers", format!("{}, {} of them with experts", g.layers, g.moe_layers.len())),
            row("experts", format!("{} per layer, {} per token, {} in all", g.experts, g.top_k, g.expert_count())),
            row("widths", format!("hidden {}, expert {}{}, vocabulary {}", self.hidden, g.inter, latent, self.vocab)),
            row("context", format!("{} tokens", self.context)),
            row("resident", format!("{} ({})", print::bytes(self.resident_bytes()), resident.join(", "))),
            row("one expert", format!("{} ({})", self.expert_text(), self.expert_kinds.join("; "))),
            row("all experts", print::bytes(self.experts_bytes())),
            row("per token", format!("{} of experts", print::bytes(per_token))),
            row("KV cache", format!("{} per token in f16", print::bytes(self.kv_per_token))),
        ];
        for (name, bytes) in &self.tables {
            facts.push(row("table", format!("{} ({name}), read row by row", print::bytes(*bytes))));
        }
        if let Some((kinds, bytes)) = &self.small_copy {
            let (bytes, kinds) = (print::bytes(*bytes as u64), kinds.join("; "));
            facts.push(row("small copy", format!("{bytes} ({kinds}) of every expert; read by --routing shelf")));
        }
        if let Some((division, folder)) = &self.second {
            let share = if *division == "mirror" { "a copy of every expert" } else { "every other expert" };
            facts.push(row("drive 2", format!("{folder}: {share}")));
        }
        match &self.tower {
            Ok(None) => {}
            Ok(Some(tower)) => {
                let (layers, width, bytes) = (tower.layers, tower.width, print::bytes(tower.source.bytes()));
                facts.push(row("images", format!("tower of {layers} layers, width {width}, {bytes}")));
            }
            Err(error) => facts.push(row("images", format!("the tower cannot be used: {}", sentence(error)))),
        }
        facts
    }

    fn tower_json(&self) -> serde_json::Value {
        match &self.tower {
            Ok(None) => serde_json::Value::Null,
            Ok(Some(FoundTower { layers, width, source, .. })) => {
                json!({ "layers": layers, "width": width, "bytes": source.bytes() })
            }
            Err(error) => json!({ "error": sentence(error) }),
        }
    }

    fn expert_text(&self) -> String {
        self.expert_sizes.classes_text().unwrap_or_else(|| print::bytes(self.expert_sizes.largest()))
    }

    /// Number of experts that fit into `memory` bytes beside the resident weights; `None` if those do not fit.
    fn fit(&self, memory: u64) -> Option<usize> {
        let available = memory.checked_sub(self.resident_bytes())?;
        Some(((available / self.expert_sizes.mean().max(1)) as usize).min(self.geometry.expert_count()))
    }

    fn fits(&self) -> Vec<Vec<String>> {
        let heading = vec!["memory".into(), "experts".into(), "share".into()];
        let mut rows = vec![heading];
        for gb in MEMORIES {
            let (experts, share, remark) = self.fit_row(gb * 1_000_000_000);
            rows.push(vec![format!("{gb} GB"), experts, share, remark.into()]);
            if self.fit(gb * 1_000_000_000) == Some(self.geometry.expert_count()) {
                break;
            }
        }
        rows
    }

    fn fit_row(&self, memory: u64) -> (String, String, &'static str) {
        let Some(n) = self.fit(memory) else {
            return ("-".into(), "-".into(), "too small for the resident weights");
        };
        let all = self.geometry.expert_count();
        let remark = match n {
            n if n == all => "everything",
            n if n < self.token_experts() => "fewer than one token uses",
            _ => "",
        };
        (n.to_string(), format!("{:.0} %", 100.0 * n as f64 / all.max(1) as f64), remark)
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "model_type": self.model_type,
            "store": self.form == "store",
            "store_format": self.store_format,
            "tables": self.tables,
            "small_copy_kinds": self.small_copy.as_ref().map(|(kinds, _)| kinds),
            "second": self.second.as_ref().map(|(division, folder)| json!({"division": division, "folder": folder})),
            "small_copy_expert_bytes": self.small_copy.as_ref().map(|(_, bytes)| bytes),
            "geometry": Geometry { hidden: self.hidden, ..self.geometry.clone() },
            "latent": self.latent(),
            "tower": self.tower_json(),
            "vocab": self.vocab,
            "context": self.context,
            "kv_bytes_per_token": self.kv_per_token,
            "resident_bytes": self.resident_bytes(),
            "resident_bytes_by_kind": self.resident,
            "expert_bytes": self.expert_sizes.largest(),
            "expert_kinds": self.expert_kinds,
            "experts_bytes": self.experts_bytes(),
            "token_experts": self.token_experts(),
        })
    }
}
