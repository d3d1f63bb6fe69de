//! The manifest `larder.json`: what a store holds. It is written last, so a folder without it is not a store.

use std::{collections::BTreeSet, path::Path};

use larder_core::Geometry;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{
        checksum::{checksum_of, is_checksum},
        read_at::read_small,
    },
    format_mix::FormatMix,
    importance::ImportanceRecord,
    source::{MtpTensors, SIDECARS, SourceFile, SourceOptions, ignored_keys, uses_mtp},
};

mod experts;
mod seal;
mod seal_file;
mod table;

pub use experts::{ExpertChecksums, ExpertClass, ExpertFiles, RECORD_ALIGN};
pub(crate) use seal::{seal, unseal};
pub(crate) use seal_file::{Seal, seal_path};
#[cfg(test)]
pub(crate) use table::BLOCK_BYTES;
pub use table::TableFile;
pub(crate) use table::{CHECKSUM_BYTES, TABLES};

/// File name of the manifest.
pub const MANIFEST_FILE: &str = "larder.json";
/// Name of the file that marks an unfinished conversion.
pub const CONVERSION_STATE: &str = "convert.json";
/// File name of the resident weights.
pub const RESIDENT_FILE: &str = "resident.safetensors";
/// The store format that this version writes, and the only one that it reads.
pub const FORMAT_VERSION: u64 = 2;

const MANIFEST_LIMIT: u64 = 64 << 20;

/// The content of a store.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the store format.
    pub format: u64,
    /// Version of the larder that wrote it.
    pub larder: String,
    /// The config's `model_type`.
    pub model_type: String,
    /// Sizes of the model.
    pub geometry: Geometry,
    /// Layout, lengths and checksums of the shards.
    pub experts: ExpertFiles,
    /// The same for a second, smaller copy of every expert, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub small_experts: Option<ExpertFiles>,
    /// The file of resident weights.
    pub resident: ResidentFile,
    /// Matrices whose rows are read one by one.
    pub tables: Vec<TableFile>,
    /// Files that are copied unchanged.
    pub sidecars: Vec<SidecarFile>,
    /// The source it was converted from.
    pub source: Provenance,
    /// The model's config, verbatim.
    pub config: Value,
}

/// The file of resident tensors.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResidentFile {
    /// Length in bytes.
    pub bytes: u64,
    /// Checksum of its header, which holds a checksum of every tensor.
    pub header_checksum: String,
}

/// A file that is copied unchanged, such as the tokenizer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SidecarFile {
    /// File name, one of [`SIDECARS`].
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Checksum of the content.
    pub checksum: String,
}

/// What a store was converted from: names, lengths and content, no paths and no times, so that equal input gives equal
/// stores.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The source's files.
    pub files: Vec<SourceFile>,
    /// Digest of the source's content, see [`identity`](crate::identity); absent if the source is lost, as that of the
    /// demo model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// Requested number format of the experts, or `keep`.
    pub experts: String,
    /// Requested number format of the resident weights, or `keep`.
    pub resident: String,
    /// Rules that came before the two.
    #[serde(default, skip_serializing_if = "FormatMix::is_empty")]
    pub mix: FormatMix,
    /// The importance matrix with which matrices were rounded, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imatrix: Option<ImportanceRecord>,
    /// Requested number format of the small copy of the experts, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub small_experts: Option<String>,
}

impl Manifest {
    /// Whether the store was made with the tensors of a layer for multi-token prediction.
    pub fn mtp(&self) -> MtpTensors {
        if uses_mtp(&self.config) { MtpTensors::Kept } else { MtpTensors::LeftOut }
    }

    /// How the store's source is opened to be the model of the store.
    pub fn source_options(&self) -> SourceOptions {
        SourceOptions { mtp: self.mtp(), ignored_keys: ignored_keys(&self.config) }
    }

    /// Reads and checks the manifest of the store at `store`; also returns its hash, the checksum over itself.
    pub fn read(store: &Path) -> Result<(Self, String)> {
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let path = store.join(MANIFEST_FILE);
        let bytes = read_small(&path, MANIFEST_LIMIT)?.ok_or_else(|| no_manifest(store))?;
        let broken = |e: serde_json::Error| StoreError::malformed(&path, format!("is not a valid manifest: {e}"));
        let Version { format } = serde_json::from_slice(&bytes).map_err(broken)?;
        if format != FORMAT_VERSION {
            return Err(StoreError::new(StoreErrorKind::OtherFormat, &path, other_format(format)));
        }
        let malformed = |what: String| StoreError::malformed(&path, what);
        let (json, hash) = unseal(&bytes).map_err(|what| malformed(what.to_owned()))?;
        let manifest: Manifest = serde_json::from_slice(&json).map_err(broken)?;
        manifest.check().map_err(malformed)?;
        Ok((manifest, hash))
    }

    /// The bytes of the file; equal manifests give equal bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        seal(&serde_json::to_string_pretty(self).expect("text and numbers serialize as JSON"))
    }

    /// The hash of a store with this manifest: the checksum of the file over itself.
    pub(crate) fn hash(&self) -> String {
        unseal(&self.to_bytes()).expect("what was just sealed has its checksum").1
    }

    /// Identifies model, number formats and data of the experts; clients and workers compare it.
    pub fn experts_fingerprint(&self) -> String {
        let identity = serde_json::to_vec(&(&self.model_type, &self.geometry, &self.experts));
        checksum_of(&identity.expect("text and numbers serialize as JSON"))
    }

    /// Bytes of a slot that holds any expert of the store.
    pub fn slot_bytes(&self) -> usize {
        self.experts.largest_bytes()
    }

    /// The checks that need only the manifest.
    fn check(&self) -> Result<(), String> {
        let Geometry { layers, ref moe_layers, experts, top_k, hidden, inter, .. } = self.geometry;
        if !moe_layers.is_sorted_by(|a, b| a < b) || moe_layers.last().is_some_and(|l| l.index() >= layers) {
            return Err(format!("lists MoE layers that are not in ascending order or not below {layers}"));
        }
        if moe_layers.is_empty() || hidden == 0 || inter == 0 || top_k == 0 || top_k > experts {
            return Err("describes a model without experts".to_owned());
        }
        for files in [Some(&self.experts), self.small_experts.as_ref()].into_iter().flatten() {
            files.check(&self.geometry)?;
        }
        let mut names = BTreeSet::new();
        for table in &self.tables {
            table.check()?;
            if !names.insert(&table.name) {
                return Err(format!("lists the table '{}' twice", table.name));
            }
        }
        let files = self.tables.iter().map(|t| &t.checksum).chain(self.sidecars.iter().map(|s| &s.checksum));
        if let Some(text) = files.chain([&self.resident.header_checksum]).find(|text| !is_checksum(text)) {
            return Err(format!("has the checksum '{text}', which is not 32 hexadecimal digits"));
        }
        match self.sidecars.iter().find(|s| !SIDECARS.contains(&s.name.as_str())) {
            Some(sidecar) => Err(format!("lists the file '{}', which is not a sidecar of a store", sidecar.name)),
            None => Ok(()),
        }
    }
}

fn other_format(format: u64) -> String {
    let update = if format > FORMAT_VERSION { "update larder, or " } else { "" };
    format!(
        "has store format {format}, but this larder reads only format {FORMAT_VERSION}; {update}make a new store in another folder with \
         `larder convert SOURCE STORE`"
    )
}

fn no_manifest(store: &Path) -> StoreError {
    let what = if store.join(CONVERSION_STATE).exists() {
        "is not a complete store: its conversion was not finished; run the same conversion again to resume it"
    } else {
        "is not a store: it has no larder.json"
    };
    StoreError::new(StoreErrorKind::Missing, store, what)
}

#[cfg(test)]
mod tests;
