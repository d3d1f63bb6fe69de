//! What a manifest says about a set of shards: classes, and the checksums of every expert.

use std::collections::BTreeMap;

use larder_core::{ExpertLayout, Geometry, LayerIdx, NumberFormat, PerMatrix, RowOrder, SEGMENTS};
use serde::{Deserialize, Serialize};

use crate::files::{
    checksum::{checksum_of, is_checksum, is_checksum_of},
    safetensors::DATA_START,
};

/// In the file, the data of an expert are padded with zeros to a multiple of this many bytes.
pub const RECORD_ALIGN: usize = 64 << 10;

/// A set of shards: one for each expert of each MoE layer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertFiles {
    /// Row order of quantised matrices.
    pub layout: RowOrder,
    /// The forms that experts have; all experts of a layer are of one class.
    pub classes: Vec<ExpertClass>,
    /// Index of the class of each MoE layer.
    pub layers: Vec<usize>,
    /// Checksums of the experts' data, per MoE layer.
    pub checksums: Vec<Vec<ExpertChecksums>>,
}

/// Number formats and lengths that the shards of one or more layers have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertClass {
    /// Number formats of the matrices.
    pub kinds: PerMatrix<NumberFormat>,
    /// Bytes of an expert's data, which is what is read.
    pub data_bytes: usize,
    /// Bytes of a shard: the header, and the data padded to [`RECORD_ALIGN`].
    pub file_bytes: usize,
}

impl ExpertClass {
    /// The class of experts with this layout.
    pub fn of(layout: &ExpertLayout) -> Option<Self> {
        let record = layout.bytes.checked_next_multiple_of(RECORD_ALIGN)?;
        let file_bytes = record.checked_add(DATA_START)?;
        Some(ExpertClass { kinds: layout.kinds(), data_bytes: layout.bytes, file_bytes })
    }
}

/// The checksums of one expert's segments, in the order of [`ExpertLayout::segments`]: XXH3 of 128 bits in hex.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExpertChecksums(pub [String; SEGMENTS]);

impl ExpertChecksums {
    /// The checksums of the segments of `data`, which has this layout.
    pub fn of_segments(layout: &ExpertLayout, data: &[u8]) -> Self {
        ExpertChecksums(layout.segments().map(|range| checksum_of(&data[range])))
    }

    fn are_checksums(&self) -> bool {
        self.0.iter().all(|checksum| is_checksum(checksum))
    }

    /// Whether the checksum of `segment` is that of `bytes`; allocates nothing.
    pub(crate) fn is_of_segment(&self, segment: usize, bytes: &[u8]) -> bool {
        is_checksum_of(&self.0[segment], bytes)
    }

    /// Whether these are the checksums of `data`, which has this layout; allocates nothing.
    pub(crate) fn are_of(&self, layout: &ExpertLayout, data: &[u8]) -> bool {
        layout.segments().into_iter().zip(&self.0).all(|(range, checksum)| is_checksum_of(checksum, &data[range]))
    }
}

impl ExpertFiles {
    /// The expert layout of each MoE layer, from its class and the geometry.
    pub fn layouts(&self, geometry: &Geometry) -> Result<BTreeMap<LayerIdx, ExpertLayout>, String> {
        let layouts = self.classes.iter().map(|class| class.layout(geometry, self.layout));
        let layouts = layouts.collect::<Result<Vec<_>, _>>()?;
        let layer = |(layer, class): (&LayerIdx, &usize)| {
            let unknown = || format!("puts {layer} into class {class} of {}", layouts.len());
            Ok((*layer, layouts.get(*class).ok_or_else(unknown)?.clone()))
        };
        geometry.moe_layers.iter().zip(&self.layers).map(layer).collect()
    }

    /// Bytes of the largest expert.
    pub fn largest_bytes(&self) -> usize {
        self.classes.iter().map(|class| class.data_bytes).max().unwrap_or_default()
    }

    /// Bytes of the smallest expert.
    pub fn smallest_bytes(&self) -> usize {
        self.classes.iter().map(|class| class.data_bytes).min().unwrap_or_default()
    }

    /// Bytes of the shards of the MoE row `row`.
    pub fn file_bytes(&self, row: usize) -> usize {
        self.classes[self.layers[row]].file_bytes
    }

    /// Bytes of all shards together; `None` if that overflows.
    pub fn total_bytes(&self) -> Option<u64> {
        self.layers.iter().zip(&self.checksums).try_fold(0u64, |sum, (class, experts)| {
            let file_bytes = self.classes.get(*class)?.file_bytes as u64;
            sum.checked_add(file_bytes.checked_mul(experts.len() as u64)?)
        })
    }

    /// The checks that need only the manifest.
    pub fn check(&self, geometry: &Geometry) -> Result<(), String> {
        let (rows, experts) = (geometry.moe_layers.len(), geometry.experts);
        let counts = self.checksums.iter().map(Vec::len);
        if self.checksums.len() != rows || counts.clone().any(|n| n != experts) {
            return Err(format!("does not have a checksum for each of {rows} x {experts} experts"));
        }
        if !self.checksums.iter().flatten().all(ExpertChecksums::are_checksums) {
            return Err("has a checksum of an expert that is not 32 hexadecimal digits".to_owned());
        }
        if self.layers.len() != rows || self.classes.is_empty() || self.classes.len() > rows {
            let (classes, layers) = (self.classes.len(), self.layers.len());
            return Err(format!("has {classes} classes for {layers} layers; there are {rows} MoE layers"));
        }
        let layouts = self.layouts(geometry)?;
        let gated = layouts.values().filter(|layout| layout.gate.is_some()).count();
        if gated != 0 && gated != layouts.len() {
            return Err("has layers with and without gate matrices".to_owned());
        }
        for (class, layout) in self.classes.iter().map(|c| (c, c.layout(geometry, self.layout))) {
            let layout = layout?;
            if ExpertClass::of(&layout) != Some(*class) {
                let (says, gives) = (class.data_bytes, layout.bytes);
                let file_bytes = class.file_bytes;
                return Err(format!(
                    "says {says} bytes per expert and {file_bytes} per shard, but the geometry gives {gives}"
                ));
            }
        }
        self.total_bytes().map(drop).ok_or_else(|| "describes shards that are too large to address".to_owned())
    }
}

impl ExpertClass {
    fn layout(&self, geometry: &Geometry, order: RowOrder) -> Result<ExpertLayout, String> {
        let Geometry { hidden, inter, bias, .. } = *geometry;
        let layout = ExpertLayout::new(hidden, inter, self.kinds, bias).map_err(|e| e.to_string())?;
        Ok(layout.in_order(order))
    }
}
