//! Writes one set of shards: assembles each expert and arranges its rows for the kernels.

use std::{collections::BTreeMap, path::PathBuf};

use larder_core::{Blueprint, ExpertId, ExpertLayout, LayerIdx, RowOrder};

use super::target::{Target, Targets};
use crate::{
    assemble::Assembler,
    error::{Result, StoreError, StoreErrorKind},
    files::{
        atomic_file::{AtomicFile, sync_folder},
        safetensors::DATA_START,
    },
    format_mix::WantedFormats,
    importance::WeighedMatrices,
    manifest::{ExpertChecksums, ExpertClass, ExpertFiles},
    shard::{Shard, layer_folder, shard_path_in},
    source::{Source, tensor_slice::AssemblyBuffers},
};

/// Writes the shards of one set.
pub(super) struct ShardWriter<'a> {
    /// Folder of the set.
    pub name: &'static str,
    pub assembler: Assembler<'a>,
    /// The row order in which products are fastest; float formats have only one.
    order: RowOrder,
    classes: Vec<ExpertClass>,
    /// Index of the class of each layer.
    layers: BTreeMap<LayerIdx, usize>,
}

impl<'a> ShardWriter<'a> {
    /// Checks every expert's tensors; `wanted` has the number formats of their matrices, and `importance` what their
    /// columns matter.
    pub fn new(
        name: &'static str,
        source: &'a dyn Source,
        blueprint: &Blueprint,
        wanted: WantedFormats,
        importance: Option<&mut WeighedMatrices<'a>>,
    ) -> Result<Self> {
        let mut assembler = Assembler::new(source, blueprint, wanted)?;
        if let Some(importance) = importance {
            assembler.weigh(importance)?;
        }
        let too_large =
            || StoreError::new(StoreErrorKind::Unsupported, source.path(), "has experts that are too large to address");
        let (mut classes, mut layers, mut order) = (vec![], BTreeMap::new(), RowOrder::Plain);
        for (layer, layout) in assembler.layouts() {
            let class = ExpertClass::of(layout).ok_or_else(too_large)?;
            let known = classes.iter().position(|known| *known == class);
            layers.insert(*layer, known.unwrap_or(classes.len()));
            if known.is_none() {
                classes.push(class);
            }
            order = if order == RowOrder::Plain { layout.clone().in_order(RowOrder::Rows8).order() } else { order };
        }
        Ok(ShardWriter { name, assembler, order, classes, layers })
    }

    /// Bytes of the shards of a layer.
    pub fn file_bytes(&self, layer: LayerIdx) -> usize {
        self.classes[self.layers[&layer]].file_bytes
    }

    /// Bytes of the largest shard.
    pub fn largest_file_bytes(&self) -> usize {
        self.classes.iter().map(|class| class.file_bytes).max().unwrap_or_default()
    }

    /// Path of a shard relative to the store, and its length.
    pub fn file(&self, layer: LayerIdx, expert: ExpertId) -> (PathBuf, u64) {
        (shard_path_in(self.name, layer, expert), self.file_bytes(layer) as u64)
    }

    /// What the manifest says about the set; `checksums` are those of all experts, layer by layer.
    pub fn files(&self, checksums: Vec<ExpertChecksums>) -> ExpertFiles {
        let experts = checksums.len() / self.layers.len();
        ExpertFiles {
            layout: self.order,
            classes: self.classes.clone(),
            layers: self.layers.values().copied().collect(),
            checksums: checksums.chunks(experts).map(<[_]>::to_vec).collect(),
        }
    }

    /// Writes a shard, unless an earlier attempt did; returns its checksums and whether it was there.
    ///
    /// `file` has at least the length of the shard.
    pub fn write(
        &self,
        target: &Target,
        layer: LayerIdx,
        expert: ExpertId,
        file: &mut [u8],
        scratch: &mut AssemblyBuffers,
    ) -> Result<(ExpertChecksums, bool)> {
        let layout: &ExpertLayout = &self.assembler.layouts()[&layer];
        let written = layout.clone().in_order(self.order);
        let file_bytes = self.file_bytes(layer);
        let shard = Shard { layer, expert, layout: &written, file_bytes };
        let path = target.path().join(shard_path_in(self.name, layer, expert));
        let file = &mut file[..file_bytes];
        let (header, data) = file.split_at_mut(DATA_START);
        // A shard that exists and is damaged is written again.
        if let Some(found) = target.is_resumed().then(|| shard.check_by_itself(&path, data).ok()).flatten() {
            return Ok((found, true));
        }
        let (data, tail) = data.split_at_mut(layout.bytes);
        self.assembler.assemble(layer, expert, data, scratch)?;
        layout.rearrange(data);
        tail.fill(0);
        let checksums = ExpertChecksums::of_segments(&written, data);
        header.copy_from_slice(&shard.header(&checksums));
        let atomic_file = AtomicFile::create(&path)?;
        atomic_file.write_direct(file)?;
        atomic_file.publish()?;
        Ok((checksums, false))
    }

    /// Makes the names of a layer's shards durable.
    pub fn sync(&self, targets: &Targets, layer: LayerIdx) -> Result<()> {
        targets.all().try_for_each(|target| sync_folder(&target.path().join(layer_folder(self.name, layer))))
    }
}
