//! Which tensors the resident file holds, and where.

use std::collections::BTreeMap;

use larder_core::{Blueprint, NumberFormat, RowOrder, TensorMeta, TensorSpec};

use super::{ALIGN, DATA_ALIGN, line};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{
        describe::stored_shape,
        safetensors::{HeaderWriter, dtype_of},
    },
    format_mix::WantedFormats,
    importance::WeighedMatrices,
    row_table,
    source::{
        Source,
        matrix_scale::{find_scale, read_scale},
        require_tensor,
        tensor_slice::{check_shape, choose_format},
        view_for,
    },
};

/// A tensor of the resident file, and where it lies.
#[derive(Debug)]
pub struct PlannedTensor {
    /// Name in the source and in the store.
    pub name: String,
    /// Number format in the source.
    pub from: NumberFormat,
    /// Number format, row order and shape in the store.
    pub meta: TensorMeta,
    /// First byte, counted from the start of the data.
    pub offset: usize,
    /// What each column matters, if it is known and the tensor is rounded.
    pub importance: Option<Vec<f32>>,
}

/// The tensors that the resident file will hold, checked against the source.
#[derive(Debug)]
pub struct ResidentPlan {
    /// The tensors, in order of their offsets.
    pub items: Vec<PlannedTensor>,
    /// One sentence for each tensor that is not stored in the requested format.
    pub notes: Vec<String>,
}

/// Checks that a source has every resident tensor of the blueprint, in the required shape and a supported format.
pub fn check_resident(source: &dyn Source, blueprint: &Blueprint) -> Result<()> {
    ResidentPlan::new(source, blueprint, None)?;
    row_table::plans(source, blueprint, None).map(drop)
}

impl ResidentPlan {
    /// Plans every resident tensor of the blueprint. `wanted` has the number formats of weights of products.
    pub fn new<'f>(source: &dyn Source, blueprint: &Blueprint, wanted: impl Into<WantedFormats<'f>>) -> Result<Self> {
        let wanted = wanted.into();
        let mut plan = ResidentPlan { items: vec![], notes: vec![] };
        check_missing(source, &blueprint.resident)?;
        for spec in unique(&blueprint.resident) {
            let wanted = wanted.of(&spec.name).filter(|_| spec.product || spec.by_row);
            if !spec.by_row {
                plan.add(source, spec, wanted.filter(|_| spec.product))?;
            }
            plan.add_scale(source, spec, wanted)?;
        }
        Ok(plan)
    }

    /// Plans every tensor of a source as it is.
    pub fn unchanged(source: &dyn Source) -> Result<Self> {
        let mut plan = ResidentPlan { items: vec![], notes: vec![] };
        for name in source.names() {
            let shape = require_tensor(source, name)?.shape.clone();
            plan.add(source, &TensorSpec::new(name, &shape, false), None)?;
        }
        Ok(plan)
    }

    /// Has the tensors rounded so that the errors in the columns that matter are small.
    pub fn weigh(&mut self, importance: &mut WeighedMatrices) -> Result<()> {
        for item in self.items.iter_mut().filter(|item| item.meta.kind != item.from && !item.meta.kind.is_float()) {
            let columns = item.meta.shape.last().copied().unwrap_or(1);
            item.importance = importance.of(&item.name, columns)?;
        }
        Ok(())
    }

    /// Adds the scale of a matrix that is kept in a format with one, if the source has it.
    fn add_scale(&mut self, source: &dyn Source, spec: &TensorSpec, wanted: Option<NumberFormat>) -> Result<()> {
        let kept = view_for(source, &spec.name, wanted);
        let Some(scale) = find_scale(kept, &spec.name, (0, 1))? else { return Ok(()) };
        // While a model is being downloaded, reading would wait for it.
        if source.published().is_none() {
            read_scale(kept, &scale)?;
        }
        let name = scale.name().to_owned();
        let shape = require_tensor(source, &name)?.shape.clone();
        self.add(source, &TensorSpec::new(name, &shape, false), None)
    }

    fn add(&mut self, source: &dyn Source, spec: &TensorSpec, wanted: Option<NumberFormat>) -> Result<()> {
        let (from, kind) = choose_stored(source, spec, wanted, &mut self.notes)?;
        let too_large = || {
            let what = format!("tensor '{}' with shape {:?} is too large to address", spec.name, spec.shape);
            StoreError::new(StoreErrorKind::Unsupported, source.path(), what)
        };
        let meta = TensorMeta::new(kind, spec.shape.clone()).ok_or_else(too_large)?;
        let order = if spec.product && spec.shape.len() == 2 { RowOrder::best(kind) } else { RowOrder::Plain };
        let meta = TensorMeta { order, ..meta };
        let end = self.items.last().map_or(0, |last| last.offset + last.meta.bytes);
        let offset = end.checked_next_multiple_of(ALIGN).ok_or_else(too_large)?;
        offset.checked_add(meta.bytes).filter(|end| *end < isize::MAX as usize).ok_or_else(too_large)?;
        self.items.push(PlannedTensor { name: spec.name.clone(), from, meta, offset, importance: None });
        Ok(())
    }

    /// The first bytes of the file. `checksums` are those of the tensors, in order.
    pub fn header<'a>(&self, checksums: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
        let mut header = HeaderWriter::default();
        for (PlannedTensor { name, meta, offset, .. }, checksum) in self.items.iter().zip(checksums) {
            header.describe(name, line(meta, checksum));
            header.pad_to(*offset);
            header.push(name, dtype_of(meta.kind), &stored_shape(meta), meta.bytes);
        }
        header.finish(DATA_ALIGN)
    }

    /// Length of the header in bytes; it does not depend on the checksums.
    pub fn header_bytes(&self) -> usize {
        self.header(self.items.iter().map(|_| "00000000000000000000000000000000")).len()
    }

    /// Length of the file in bytes.
    pub fn file_bytes(&self) -> usize {
        self.header_bytes() + self.items.last().map_or(0, |last| last.offset + last.meta.bytes)
    }
}

/// The format of a tensor in the source and the one that it is stored in. A format that was not the wanted one is
/// noted.
pub(crate) fn choose_stored(
    source: &dyn Source,
    spec: &TensorSpec,
    wanted: Option<NumberFormat>,
    notes: &mut Vec<String>,
) -> Result<(NumberFormat, NumberFormat)> {
    let from = require_tensor(view_for(source, &spec.name, wanted), &spec.name)?;
    check_shape(source, &spec.name, &from.shape, &spec.shape)?;
    let cols = spec.shape.last().copied().unwrap_or(1);
    let (kind, fallback) = choose_format(source, &spec.name, from.kind, wanted, cols)?;
    if let Some(wanted) = wanted.filter(|_| fallback) {
        let why = format!("its rows of {cols} values are not whole blocks of {wanted}");
        notes.push(format!("{} is stored as {kind}: {why}", spec.name));
    }
    Ok((from.kind, kind))
}

/// Checks that all tensors exist; the error names the first missing one and counts the others.
fn check_missing(source: &dyn Source, specs: &[TensorSpec]) -> Result<()> {
    let exists = |name: &str| source.meta(name).is_some() || source.unsupported_dtype(name).is_some();
    let missing: Vec<&str> = specs.iter().map(|s| s.name.as_str()).filter(|name| !exists(name)).collect();
    let what = match missing[..] {
        [] => return Ok(()),
        [one] => format!("has no tensor '{one}'"),
        [first, ref rest @ ..] => format!("has no tensor '{first}', and {} more are missing", rest.len()),
    };
    Err(StoreError::new(StoreErrorKind::Missing, source.path(), what))
}

/// Each tensor once, in order. A tensor that is also used outside a product does not count as the weight of a product.
fn unique(specs: &[TensorSpec]) -> Vec<&TensorSpec> {
    let mut all: BTreeMap<&str, (usize, &TensorSpec)> = BTreeMap::new();
    for (i, spec) in specs.iter().enumerate() {
        let (_, known) = all.entry(&spec.name).or_insert((i, spec));
        if !spec.product {
            *known = spec;
        }
    }
    let mut ordered: Vec<_> = all.into_values().collect();
    ordered.sort_by_key(|(i, _)| *i);
    ordered.into_iter().map(|(_, spec)| spec).collect()
}
