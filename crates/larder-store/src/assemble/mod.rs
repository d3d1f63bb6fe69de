//! Assembles experts from a source, in whatever form it stores their matrices.

use std::collections::BTreeMap;

use larder_core::{
    Blueprint, ExpertId, ExpertLayout, ExpertNames, Geometry, LayerIdx, MatrixScale, NumberFormat, PerMatrix,
    TensorSlice,
};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    expert_source::ExpertSource,
    format_mix::WantedFormats,
    importance::{Importance, WeighedMatrices},
    source::{
        Source, expert_names,
        matrix_scale::{find_scale, read_scale},
        tensor_slice::{AssemblyBuffers, ExpertRef, LocatedSlice, PartShape, choose_format},
    },
};

/// Largest number of experts per layer, limited by [`ExpertId`].
const MAX_EXPERTS: usize = 1 << 16;

/// Reads experts from a source and lays them out as a store does.
pub struct Assembler<'a> {
    source: &'a dyn Source,
    geometry: Geometry,
    names: ExpertNames,
    layouts: BTreeMap<LayerIdx, ExpertLayout>,
    notes: Vec<String>,
    importance: Option<&'a Importance>,
}

impl<'a> Assembler<'a> {
    /// Checks every expert's tensors against the blueprint and decides the layouts. `wanted` has the number formats of
    /// the matrices.
    pub fn new<'f>(
        source: &'a dyn Source,
        blueprint: &Blueprint,
        wanted: impl Into<WantedFormats<'f>>,
    ) -> Result<Self> {
        let wanted = wanted.into();
        let geometry = blueprint.geometry.clone();
        let names = expert_names(source, blueprint);
        if geometry.experts == 0 || geometry.experts > MAX_EXPERTS {
            let what = format!("has {} experts per layer; 1 to {MAX_EXPERTS} are supported", geometry.experts);
            return Err(StoreError::new(StoreErrorKind::Unsupported, source.path(), what));
        }
        if geometry.hidden == 0 || geometry.inter == 0 || geometry.moe_layers.is_empty() {
            return Err(StoreError::new(
                StoreErrorKind::Unsupported,
                source.path(),
                "has no experts; larder runs Mixture-of-Experts models only",
            ));
        }
        if geometry.bias && names.bias.is_none() {
            return Err(StoreError::new(
                StoreErrorKind::Missing,
                source.path(),
                "has no expert biases, which the config requires",
            ));
        }
        let mut assembler =
            Assembler { source, geometry, names, layouts: BTreeMap::new(), notes: Vec::new(), importance: None };
        for layer in assembler.geometry.moe_layers.clone() {
            let layout = assembler.check_layer(layer, wanted)?;
            assembler.layouts.insert(layer, layout);
        }
        Ok(assembler)
    }

    /// As [`new`](Self::new), with matrices rounded so that the errors in the columns that matter are small.
    pub fn weighed<'f>(
        source: &'a dyn Source,
        blueprint: &Blueprint,
        wanted: impl Into<WantedFormats<'f>>,
        importance: Option<&'a Importance>,
    ) -> Result<Self> {
        let mut assembler = Assembler::new(source, blueprint, wanted)?;
        if let Some(matrices) = importance {
            assembler.weigh(&mut WeighedMatrices::new(matrices, source))?;
        }
        Ok(assembler)
    }

    /// Has the matrices rounded so that the errors in the columns that matter are small.
    pub(crate) fn weigh(&mut self, importance: &mut WeighedMatrices<'a>) -> Result<()> {
        for (layer, layout) in &self.layouts {
            for ((part, matrix), (piece, shape)) in layout.matrices_and_biases().zip(self.slices()) {
                let PartShape::Matrix(_, columns) = shape else { continue };
                let of_first = self.expert_ref(*layer, ExpertId(0));
                let from = LocatedSlice::locate(self.source, piece, of_first, shape, Some(matrix.kind))?.kind;
                if matrix.kind != from && !matrix.kind.is_float() {
                    importance.check_experts(*layer, part, (self.geometry.experts, columns))?;
                }
            }
        }
        self.importance = Some(importance.matrices);
        Ok(())
    }

    /// One sentence for each part that is not stored in the requested format.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Number of experts of a layer.
    pub fn experts(&self) -> usize {
        self.geometry.experts
    }

    /// The expert layout of each MoE layer.
    pub fn layouts(&self) -> &BTreeMap<LayerIdx, ExpertLayout> {
        &self.layouts
    }

    /// Fills `into` with one expert, as [`ExpertSource::read_expert`] does.
    pub fn assemble(
        &self,
        layer: LayerIdx,
        expert: ExpertId,
        into: &mut [u8],
        scratch: &mut AssemblyBuffers,
    ) -> Result<()> {
        let layout = self.layout(layer);
        assert_eq!(into.len(), layout.bytes, "the buffer must have the layout's length");
        let mut end = 0;
        for ((name, part), (piece, shape)) in layout.matrices_and_biases().zip(self.slices()) {
            into[end..part.offset].fill(0);
            end = part.offset + part.bytes;
            let found =
                LocatedSlice::locate(self.source, piece, self.expert_ref(layer, expert), shape, Some(part.kind))?;
            let rounded = found.kind != part.kind && !part.kind.is_float();
            let importance = self.importance.filter(|_| rounded).and_then(|i| i.of_expert(layer, name, expert.index()));
            found.fill(part.kind, importance.as_deref(), &mut into[part.offset..end], scratch)?;
        }
        into[end..].fill(0);
        let scales =
            layout.matrices().zip(self.slices()).filter_map(|(part, (piece, _))| Some((part.scale_at?, piece)));
        for (at, piece) in scales {
            let stored = self.scale(piece, layer, expert)?;
            let scale = stored.map_or(Ok(1.0), |stored| read_scale(self.source, &stored))?;
            into[at..at + size_of::<f32>()].copy_from_slice(&scale.to_le_bytes());
        }
        Ok(())
    }

    /// Download rank of the last file that holds bytes of an expert; `None` if the model is complete.
    pub(crate) fn download_rank(&self, layer: LayerIdx, expert: ExpertId) -> Option<usize> {
        self.slices().filter_map(|(piece, _)| self.source.download_rank(&piece.tensor_name(layer, expert))).max()
    }

    /// Tells the source that the bytes of an expert are no longer needed.
    pub(crate) fn release(&self, layer: LayerIdx, expert: ExpertId) -> Result<()> {
        for (piece, shape) in self.slices() {
            let found = LocatedSlice::locate(self.source, piece, self.expert_ref(layer, expert), shape, None)?;
            self.source.release(&found.name, found.offset, found.bytes)?;
        }
        Ok(())
    }

    /// The scale that the source has for a matrix of an expert.
    fn scale(&self, piece: &TensorSlice, layer: LayerIdx, expert: ExpertId) -> Result<Option<MatrixScale>> {
        let place = if piece.stacked { (expert.index(), self.geometry.experts) } else { (0, 1) };
        find_scale(self.source, &piece.tensor_name(layer, expert), place)
    }

    /// The slices of an expert with their shapes, in the order of [`ExpertLayout::matrices_and_biases`].
    fn slices(&self) -> impl Iterator<Item = (&TensorSlice, PartShape)> {
        let Geometry { bias, .. } = self.geometry;
        let matrices = self.names.matrices.named();
        let matrices = matrices.map(|(name, slice)| (slice, self.matrix_shape(name)));
        let biases = self.names.bias.iter().filter(move |_| bias).flat_map(PerMatrix::named);
        matrices.chain(biases.map(|(name, slice)| match self.matrix_shape(name) {
            PartShape::Matrix(rows, _) | PartShape::Vector(rows) => (slice, PartShape::Vector(rows)),
        }))
    }

    fn matrix_shape(&self, name: &str) -> PartShape {
        let Geometry { hidden, inter, .. } = self.geometry;
        if name == "down" { PartShape::Matrix(hidden, inter) } else { PartShape::Matrix(inter, hidden) }
    }

    fn expert_ref(&self, layer: LayerIdx, expert: ExpertId) -> ExpertRef {
        ExpertRef { layer, expert, experts: self.geometry.experts }
    }

    /// The layout of a layer; all of its experts must have the same.
    fn check_layer(&mut self, layer: LayerIdx, wanted: WantedFormats) -> Result<ExpertLayout> {
        let first = self.check_expert(layer, ExpertId(0), wanted)?;
        for e in 1..self.geometry.experts {
            let kinds = self.check_expert(layer, ExpertId(e as u16), wanted)?;
            if let Some(((name, of_first), (_, of_other))) =
                first.named().zip(kinds.named()).find(|((_, a), (_, b))| a != b)
            {
                let what = format!(
                    "the experts of {layer} are stored in different formats: {name} of expert 0 as {of_first}, of expert \
                     {e} as {of_other}"
                );
                return Err(StoreError::new(StoreErrorKind::Mismatch, self.source.path(), what));
            }
        }
        let Geometry { hidden, inter, bias, .. } = self.geometry;
        ExpertLayout::new(hidden, inter, first, bias)
            .map_err(|e| StoreError::new(StoreErrorKind::Unsupported, self.source.path(), e.to_string()))
    }

    /// The number formats of one expert's matrices.
    fn check_expert(
        &mut self,
        layer: LayerIdx,
        expert: ExpertId,
        wanted: WantedFormats,
    ) -> Result<PerMatrix<NumberFormat>> {
        let parts = self.names.matrices.named().map(|(name, _)| name);
        let mut parts = parts.collect::<Vec<_>>().into_iter();
        let mut kinds = vec![];
        let mut notes = Vec::new();
        for (piece, shape) in self.slices() {
            let locate =
                |wanted| LocatedSlice::locate(self.source, piece, self.expert_ref(layer, expert), shape, wanted);
            match shape {
                PartShape::Vector(_) => {
                    let wanted = Some(NumberFormat::F32);
                    let found = locate(wanted)?;
                    choose_format(self.source, &found.name, found.kind, wanted, 1)?;
                }
                PartShape::Matrix(_, cols) => {
                    let part = parts.next().unwrap_or_default();
                    let wanted = wanted.of_experts(layer, part);
                    let found = locate(wanted)?;
                    let (kind, fallback) = choose_format(self.source, &found.name, found.kind, wanted, cols)?;
                    self.scale(piece, layer, expert)?;
                    kinds.push(kind);
                    if let Some(wanted) = wanted.filter(|_| fallback) {
                        notes.push(format!(
                            "{part} is stored as {kind}: its rows of {cols} values are not whole blocks of {wanted}"
                        ));
                    }
                }
            }
        }
        notes.retain(|note| !self.notes.contains(note));
        self.notes.append(&mut notes);
        let mut kinds = kinds.into_iter();
        Ok(self.names.matrices.as_ref().map(|_| kinds.next().expect("each matrix has a format")))
    }
}

impl ExpertSource for Assembler<'_> {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        &self.layouts[&layer]
    }

    fn read_expert(&self, layer: LayerIdx, expert: ExpertId, into: &mut [u8]) -> Result<()> {
        self.assemble(layer, expert, into, &mut AssemblyBuffers::default())
    }
}

#[cfg(test)]
mod tests;
