//! The resident weights that a conversion would write, without writing them.

use std::{collections::BTreeMap, sync::Arc};

use larder_core::{Blueprint, TensorMeta, TensorRows, Tensors, TensorsError};

use super::{PlannedTensor, ResidentPlan, TensorEncoder};
use crate::{
    error::Result,
    format_mix::WantedFormats,
    importance::{Importance, WeighedMatrices},
    row_table::{self, TablePlan},
    source::Source,
};

/// The tensors of a source, with resident weights in the formats that a conversion gives them. They are converted as
/// they are read.
pub struct ConvertedTensors<'a> {
    source: &'a dyn Source,
    converted: BTreeMap<String, PlannedTensor>,
}

impl<'a> ConvertedTensors<'a> {
    /// The resident weights of `blueprint` as `wanted` has them; all other tensors are those of the source.
    pub fn new<'f>(
        source: &'a dyn Source,
        blueprint: &Blueprint,
        wanted: impl Into<WantedFormats<'f>>,
    ) -> Result<Self> {
        Self::weighed(source, blueprint, wanted, None)
    }

    /// As [`new`](Self::new), with matrices rounded so that the errors in the columns that matter are small.
    pub fn weighed<'f>(
        source: &'a dyn Source,
        blueprint: &Blueprint,
        wanted: impl Into<WantedFormats<'f>>,
        importance: Option<&Importance>,
    ) -> Result<Self> {
        let wanted = wanted.into();
        let mut resident = ResidentPlan::new(source, blueprint, wanted)?;
        if let Some(matrices) = importance {
            resident.weigh(&mut WeighedMatrices::new(matrices, source))?;
        }
        // Other row tables stay where they are, whatever their size.
        let (tables, _) = row_table::plans(source, blueprint, wanted)?;
        let tables = tables.into_iter().filter(|plan| plan.is_converted()).map(TablePlan::into_tensor);
        let converted = resident.items.into_iter().chain(tables).map(|tensor| (tensor.name.clone(), tensor)).collect();
        Ok(ConvertedTensors { source, converted })
    }
}

impl Tensors for ConvertedTensors<'_> {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.converted.get(name).map(|tensor| &tensor.meta).or_else(|| self.source.meta(name))
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> std::result::Result<(), TensorsError> {
        let Some(tensor) = self.converted.get(name) else { return self.source.read(name, offset, into) };
        let (mut at, end) = (0, offset + into.len());
        TensorEncoder::new(self.source).encode(tensor, &mut |piece| {
            let (from, to) = (offset.max(at), end.min(at + piece.len()));
            if from < to {
                into[from - offset..to - offset].copy_from_slice(&piece[from - at..to - at]);
            }
            at += piece.len();
            Ok(())
        })?;
        Ok(())
    }

    fn rows(&self, name: &str) -> Option<Arc<dyn TensorRows>> {
        if self.converted.contains_key(name) { None } else { self.source.rows(name) }
    }
}
