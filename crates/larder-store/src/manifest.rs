//! The manifest `larder.json`: what a store holds. It is written last, so a folder without it is not a store.

use std::{collections::BTreeMap, path::Path};

use larder_core::{ExpertLayout, Geometry, LayerIdx, NumberFormat, RowOrder};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    convert::CONVERSION_STATE,
    error::{Result, StoreError, StoreErrorKind},
    file::read_small,
    shard::{DATA_START, checksum_of},
    source::{SIDECARS, SourceFile},
};

/// File name of the manifest.
pub const MANIFEST_FILE: &str = "larder.json";
/// File name of the resident weights.
pub const RESIDENT_FILE: &str = "resident.safetensors";
/// The store format that this version writes, and the newest that it reads.
pub const FORMAT_VERSION: u64 = 1;

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
    /// The file of resident weights.
    pub resident: ResidentFile,
    /// Files that are copied unchanged.
    pub sidecars: Vec<SidecarFile>,
    /// The source it was converted from.
    pub source: Provenance,
    /// The model's config, verbatim.
    pub config: Value,
}

/// The shards of a store.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertFiles {
    /// Row order of quantised matrices.
    pub layout: RowOrder,
    /// Number formats of gate, up and down: per MoE layer, or once if all layers have the same.
    pub kinds: Vec<[NumberFormat; 3]>,
    /// Bytes of the largest expert.
    pub data_bytes: usize,
    /// Bytes of every shard.
    pub file_bytes: usize,
    /// Checksums of the experts' data, per MoE layer.
    pub checksums: Vec<Vec<String>>,
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

/// What a store was converted from: names and lengths, no paths and no times, so that equal input gives equal stores.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The source's files.
    pub files: Vec<SourceFile>,
    /// Requested number format of the experts, or `keep`.
    pub experts: String,
    /// Requested number format of the resident weights, or `keep`.
    pub resident: String,
}

impl Manifest {
    /// Reads and checks the manifest of the store at `store`; also returns the bytes of the file.
    pub fn read(store: &Path) -> Result<(Self, Vec<u8>)> {
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let path = store.join(MANIFEST_FILE);
        let bytes = read_small(&path, MANIFEST_LIMIT)?.ok_or_else(|| no_manifest(store))?;
        let broken = |e: serde_json::Error| StoreError::malformed(&path, format!("is not a valid manifest: {e}"));
        let Version { format } = serde_json::from_slice(&bytes).map_err(broken)?;
        if format > FORMAT_VERSION {
            let what = format!("has store format {format} of a newer larder; this one reads up to {FORMAT_VERSION}");
            return Err(StoreError::new(StoreErrorKind::Newer, &path, what));
        }
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(broken)?;
        manifest.check().map_err(|what| StoreError::malformed(&path, what))?;
        Ok((manifest, bytes))
    }

    /// The bytes of the file; equal manifests give equal bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("text and numbers serialize as JSON");
        bytes.push(b'\n');
        bytes
    }

    /// Identifies model, number formats and data of the experts; clients and workers compare it.
    pub fn experts_fingerprint(&self) -> String {
        let identity = serde_json::to_vec(&(&self.model_type, &self.geometry, &self.experts));
        checksum_of(&identity.expect("text and numbers serialize as JSON"))
    }

    /// The expert layout of each MoE layer, from geometry and number formats.
    pub fn layouts(&self) -> Result<BTreeMap<LayerIdx, ExpertLayout>, String> {
        let Geometry { hidden, inter, bias, ref moe_layers, .. } = self.geometry;
        let kinds = &self.experts.kinds;
        if kinds.len() != 1 && kinds.len() != moe_layers.len() {
            return Err(format!("lists {} sets of number formats for {} MoE layers", kinds.len(), moe_layers.len()));
        }
        let layout = |(i, layer): (usize, &LayerIdx)| {
            let kinds = kinds[if kinds.len() == 1 { 0 } else { i }];
            let layout = ExpertLayout::new(hidden, inter, kinds, bias).map_err(|e| e.to_string())?;
            Ok((*layer, layout.in_order(self.experts.layout)))
        };
        moe_layers.iter().enumerate().map(layout).collect()
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
        let (rows, counts) = (self.experts.checksums.len(), self.experts.checksums.iter().map(Vec::len));
        if rows != moe_layers.len() || counts.clone().any(|n| n != experts) {
            return Err(format!("does not have a checksum for each of {} x {experts} experts", moe_layers.len()));
        }
        let largest = self.layouts()?.values().map(|l| l.bytes).max().unwrap_or_default();
        let ExpertFiles { data_bytes, file_bytes, .. } = self.experts;
        if data_bytes != largest || largest.checked_add(DATA_START) != Some(file_bytes) {
            return Err(format!("says {data_bytes} bytes per expert, but the geometry gives {largest}"));
        }
        match self.sidecars.iter().find(|s| !SIDECARS.contains(&s.name.as_str())) {
            Some(sidecar) => Err(format!("lists the file '{}', which is not a sidecar of a store", sidecar.name)),
            None => Ok(()),
        }
    }
}

fn no_manifest(store: &Path) -> StoreError {
    let what = match store.join(CONVERSION_STATE).exists() {
        true => "is not a complete store: its conversion was not finished; run the same conversion again to resume it",
        false => "is not a store: it has no larder.json",
    };
    StoreError::new(StoreErrorKind::Missing, store, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let geometry = Geometry {
            layers: 3,
            moe_layers: vec![LayerIdx(1), LayerIdx(2)],
            experts: 2,
            top_k: 1,
            hidden: 64,
            inter: 32,
            bias: false,
        };
        let bytes = ExpertLayout::new(64, 32, [NumberFormat::F16; 3], false).unwrap().bytes;
        Manifest {
            format: FORMAT_VERSION,
            larder: "0".into(),
            model_type: "olmoe".into(),
            geometry,
            experts: ExpertFiles {
                layout: RowOrder::Plain,
                kinds: vec![[NumberFormat::F16; 3]],
                data_bytes: bytes,
                file_bytes: bytes + DATA_START,
                checksums: vec![vec!["a".into(), "b".into()], vec!["c".into(), "d".into()]],
            },
            resident: ResidentFile { bytes: 0, header_checksum: String::new() },
            sidecars: vec![],
            source: Provenance { files: vec![], experts: "keep".into(), resident: "keep".into() },
            config: serde_json::json!({"b": 1, "a": 2}),
        }
    }

    fn read(bytes: &[u8]) -> Result<Manifest> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(MANIFEST_FILE), bytes).unwrap();
        Manifest::read(dir.path()).map(|(manifest, _)| manifest)
    }

    #[test]
    fn a_manifest_round_trips_with_its_config_in_order() {
        let bytes = manifest().to_bytes();
        let back = read(&bytes).unwrap();
        assert_eq!(back, manifest());
        assert_eq!(back.to_bytes(), bytes);
    }

    #[test]
    fn other_experts_give_another_fingerprint() {
        let (one, mut other, mut resident) = (manifest(), manifest(), manifest());
        other.experts.checksums[1][0] = "e".into();
        resident.resident.header_checksum = "r".into();
        assert_ne!(one.experts_fingerprint(), other.experts_fingerprint());
        assert_eq!(one.experts_fingerprint(), resident.experts_fingerprint());
    }

    #[test]
    fn a_newer_format_is_distinguished_from_a_broken_one() {
        let newer = br#"{"format": 2, "something": "else"}"#;
        assert_eq!(read(newer).unwrap_err().kind, StoreErrorKind::Newer);
        assert_eq!(read(br#"{"format": 1, "something": "else"}"#).unwrap_err().kind, StoreErrorKind::Malformed);
        assert_eq!(read(b"{").unwrap_err().kind, StoreErrorKind::Malformed);
    }

    #[test]
    fn contradictory_manifests_are_refused() {
        type Change = fn(&mut Manifest);
        let changes: [(&str, Change); 10] = [
            ("layer beyond", |m| m.geometry.layers = 2),
            ("layers out of order", |m| m.geometry.moe_layers.reverse()),
            ("more experts", |m| m.geometry.experts = usize::MAX),
            ("no experts per token", |m| m.geometry.top_k = 0),
            ("huge", |m| m.geometry.hidden = usize::MAX / 64 * 32),
            ("other width", |m| m.geometry.inter = 64),
            ("odd width", |m| (m.geometry.inter, m.experts.kinds) = (33, vec![[NumberFormat::Q8_0; 3]])),
            ("other data bytes", |m| m.experts.data_bytes += 4096),
            ("kinds", |m| m.experts.kinds = vec![]),
            ("sidecar", |m| {
                m.sidecars = vec![SidecarFile { name: "../x".into(), bytes: 0, checksum: String::new() }];
            }),
        ];
        for (name, change) in changes {
            let mut manifest = manifest();
            change(&mut manifest);
            assert_eq!(read(&manifest.to_bytes()).expect_err(name).kind, StoreErrorKind::Malformed);
        }
    }
}
