//! The manifest of store format 1, which is read and never written.

use std::collections::BTreeMap;

use larder_core::{ExpertLayout, Geometry, NumberFormat, PerMatrix, RowOrder};
use serde::Deserialize;
use serde_json::Value;

use super::{ExpertChecksums, ExpertClass, ExpertFiles, Manifest, Provenance, ResidentFile, SidecarFile};
use crate::{shard::DATA_START, source::SourceFile};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestV1 {
    format: u64,
    larder: String,
    model_type: String,
    geometry: Geometry,
    experts: ExpertFilesV1,
    resident: ResidentFile,
    sidecars: Vec<SidecarFile>,
    source: ProvenanceV1,
    config: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpertFilesV1 {
    layout: RowOrder,
    /// Gate, up and down: per MoE layer, or once if all layers have the same.
    kinds: Vec<[NumberFormat; 3]>,
    /// Bytes of the largest expert.
    data_bytes: usize,
    /// Bytes of every shard, whatever its layer.
    file_bytes: usize,
    /// One checksum over all data of each expert, per MoE layer.
    checksums: Vec<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProvenanceV1 {
    files: Vec<SourceFile>,
    experts: String,
    resident: String,
}

impl ManifestV1 {
    /// The same content in the form of the current format, with checksums of whole experts.
    pub fn into_manifest(self) -> Result<Manifest, String> {
        let ManifestV1 { format, larder, model_type, geometry, experts, resident, sidecars, source, config } = self;
        let ProvenanceV1 { files, experts: experts_as, resident: resident_as } = source;
        Ok(Manifest {
            format,
            larder,
            model_type,
            experts: experts.into_files(&geometry)?,
            small_experts: None,
            geometry,
            resident,
            tables: vec![],
            sidecars,
            source: Provenance {
                files,
                identity: None,
                experts: experts_as,
                resident: resident_as,
                mix: Default::default(),
                imatrix: None,
                small_experts: None,
            },
            config,
        })
    }
}

impl ExpertFilesV1 {
    fn into_files(self, geometry: &Geometry) -> Result<ExpertFiles, String> {
        let Geometry { hidden, inter, bias, ref moe_layers, .. } = *geometry;
        let ExpertFilesV1 { layout, kinds, data_bytes, file_bytes, checksums } = self;
        if kinds.len() != 1 && kinds.len() != moe_layers.len() {
            return Err(format!("lists {} sets of number formats for {} MoE layers", kinds.len(), moe_layers.len()));
        }
        let (mut classes, mut layers) = (Vec::<ExpertClass>::new(), vec![]);
        let mut known = BTreeMap::new();
        for kinds in kinds.iter().cycle().take(moe_layers.len()).map(|kinds| PerMatrix::from(*kinds)) {
            let name = kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>();
            let class = *known.entry(name).or_insert(classes.len());
            if class == classes.len() {
                let data_bytes = ExpertLayout::new(hidden, inter, kinds, bias).map_err(|e| e.to_string())?.bytes;
                classes.push(ExpertClass { kinds, data_bytes, file_bytes });
            }
            layers.push(class);
        }
        let largest = classes.iter().map(|class| class.data_bytes).max().unwrap_or_default();
        if data_bytes != largest || largest.checked_add(DATA_START) != Some(file_bytes) {
            return Err(format!("says {data_bytes} bytes per expert, but the geometry gives {largest}"));
        }
        let whole = |layer: Vec<String>| layer.into_iter().map(ExpertChecksums::Whole).collect();
        let checksums = checksums.into_iter().map(whole).collect();
        Ok(ExpertFiles { layout, classes, layers, checksums })
    }
}
