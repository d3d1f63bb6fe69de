//! `larder.json`: what a store holds. It is written last, so a folder without it is not a store.

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

/// The manifest's name.
pub const MANIFEST_FILE: &str = "larder.json";
/// The file of everything but the experts.
pub const RESIDENT_FILE: &str = "resident.safetensors";
/// The version that this larder writes, and the newest that it reads.
pub const FORMAT_VERSION: u64 = 1;

const MANIFEST_LIMIT: u64 = 64 << 20;

/// What a store holds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the store's format.
    pub format: u64,
    /// Version of the larder that wrote it.
    pub larder: String,
    /// The config's `model_type`.
    pub model_type: String,
    /// The sizes.
    pub geometry: Geometry,
    /// The shards.
    pub experts: ExpertFiles,
    /// Everything else that is computed with.
    pub resident: ResidentFile,
    /// The files that travel with the model.
    pub sidecars: Vec<SidecarFile>,
    /// What it was made of.
    pub source: Provenance,
    /// The model's config, verbatim.
    pub config: Value,
}

/// The shards of a store.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertFiles {
    /// How the rows of quantised matrices lie beside each other.
    pub layout: RowOrder,
    /// Kinds of gate, up and down: per MoE layer, or once if all layers agree.
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
    /// Its length.
    pub bytes: u64,
    /// Checksum of its header, which holds a checksum of every tensor.
    pub header_checksum: String,
}

/// A file that travels with the model.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SidecarFile {
    /// Its name, one of [`SIDECARS`].
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its checksum.
    pub checksum: String,
}

/// What a store was made of: names and lengths, no paths and no times, so that equal input gives equal stores.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The source's files.
    pub files: Vec<SourceFile>,
    /// The kind asked for, or `keep`.
    pub experts: String,
    /// The kind asked for, or `keep`.
    pub resident: String,
}

impl Manifest {
    /// Reads and checks the manifest of the store at `store`; also returns its bytes.
    pub fn read(store: &Path) -> Result<(Self, Vec<u8>)> {
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let path = store.join(MANIFEST_FILE);
        let bytes = read_small(&path, MANIFEST_LIMIT)?.ok_or_else(|| no_manifest(store))?;
        let broken = |e: serde_json::Error| StoreError::malformed(&path, format!("is not a store's manifest: {e}"));
        let Version { format } = serde_json::from_slice(&bytes).map_err(broken)?;
        if format > FORMAT_VERSION {
            let what =
                format!("has store format {format}, this larder reads up to {FORMAT_VERSION}: a newer larder wrote it");
            return Err(StoreError::new(StoreErrorKind::Newer, &path, what));
        }
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(broken)?;
        manifest.check().map_err(|what| StoreError::malformed(&path, what))?;
        Ok((manifest, bytes))
    }

    /// Its bytes, the same for equal manifests.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("text and numbers are JSON");
        bytes.push(b'\n');
        bytes
    }

    /// What tells experts apart from those of another model, and from the same ones stored otherwise.
    pub fn experts_fingerprint(&self) -> String {
        let facts = serde_json::to_vec(&(&self.model_type, &self.geometry, &self.experts));
        checksum_of(&facts.expect("text and numbers are JSON"))
    }

    /// The layouts that geometry and kinds call for.
    pub fn layouts(&self) -> Result<BTreeMap<LayerIdx, ExpertLayout>, String> {
        let Geometry { hidden, inter, bias, ref moe_layers, .. } = self.geometry;
        let kinds = &self.experts.kinds;
        if kinds.len() != 1 && kinds.len() != moe_layers.len() {
            return Err(format!("names {} sets of kinds for {} MoE layers", kinds.len(), moe_layers.len()));
        }
        let layout = |(i, layer): (usize, &LayerIdx)| {
            let kinds = kinds[if kinds.len() == 1 { 0 } else { i }];
            let layout = ExpertLayout::new(hidden, inter, kinds, bias).map_err(|e| e.to_string())?;
            Ok((*layer, layout.in_order(self.experts.layout)))
        };
        moe_layers.iter().enumerate().map(layout).collect()
    }

    /// What can be told from the manifest alone.
    fn check(&self) -> Result<(), String> {
        let Geometry { layers, ref moe_layers, experts, top_k, hidden, inter, .. } = self.geometry;
        if !moe_layers.is_sorted_by(|a, b| a < b) || moe_layers.last().is_some_and(|l| l.index() >= layers) {
            return Err(format!("names MoE layers that are not among {layers} layers in rising order"));
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
            return Err(format!("claims {data_bytes} bytes per expert, the geometry makes {largest}"));
        }
        match self.sidecars.iter().find(|s| !SIDECARS.contains(&s.name.as_str())) {
            Some(sidecar) => Err(format!("names the file '{}', which is none that a store has", sidecar.name)),
            None => Ok(()),
        }
    }
}

fn no_manifest(store: &Path) -> StoreError {
    let what = match store.join(CONVERSION_STATE).exists() {
        true => "is no store yet: its conversion was not finished; run the same conversion again",
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
    fn a_manifest_reads_back_with_its_config_in_order() {
        let bytes = manifest().to_bytes();
        let back = read(&bytes).unwrap();
        assert_eq!(back, manifest());
        assert_eq!(back.to_bytes(), bytes);
    }

    #[test]
    fn other_experts_have_another_fingerprint() {
        let (one, mut other, mut resident) = (manifest(), manifest(), manifest());
        other.experts.checksums[1][0] = "e".into();
        resident.resident.header_checksum = "r".into();
        assert_ne!(one.experts_fingerprint(), other.experts_fingerprint());
        assert_eq!(one.experts_fingerprint(), resident.experts_fingerprint());
    }

    #[test]
    fn a_newer_format_is_told_apart_from_a_broken_one() {
        let newer = br#"{"format": 2, "something": "else"}"#;
        assert_eq!(read(newer).unwrap_err().kind, StoreErrorKind::Newer);
        assert_eq!(read(br#"{"format": 1, "something": "else"}"#).unwrap_err().kind, StoreErrorKind::Malformed);
        assert_eq!(read(b"{").unwrap_err().kind, StoreErrorKind::Malformed);
    }

    #[test]
    fn lies_are_refused() {
        type Lie = fn(&mut Manifest);
        let lies: [(&str, Lie); 10] = [
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
        for (name, lie) in lies {
            let mut manifest = manifest();
            lie(&mut manifest);
            assert_eq!(read(&manifest.to_bytes()).expect_err(name).kind, StoreErrorKind::Malformed);
        }
    }
}
