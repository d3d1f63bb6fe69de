//! Writes row tables.

use std::path::Path;

use larder_core::{Blueprint, NumberFormat, RowOrder, TensorMeta};
use twox_hash::XxHash3_128;

use super::RowTable;
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{atomic_file::AtomicFile, checksum::checksum_of, safetensors::DATA_START},
    format_mix::WantedFormats,
    manifest::TableFile,
    progress::Progress,
    resident::{PlannedTensor, choose_stored},
    source::{Source, tensor_slice::convert, view_for},
};

/// A row table that is to be written.
pub(crate) struct TablePlan {
    /// Number format in the source.
    from: NumberFormat,
    /// The table, without its checksum.
    pub table: TableFile,
}

impl TablePlan {
    /// Whether the source has the table in another number format.
    pub fn is_converted(&self) -> bool {
        self.table.kind != self.from
    }

    /// The table as a tensor that is held in memory.
    pub fn into_tensor(self) -> PlannedTensor {
        let TableFile { name, kind, rows, cols, .. } = self.table;
        let bytes = kind.matrix_bytes(rows, cols).expect("formats are chosen so that rows are whole blocks");
        let meta = TensorMeta { kind, order: RowOrder::Plain, shape: vec![rows, cols], bytes };
        PlannedTensor { name, from: self.from, meta, offset: 0, importance: None }
    }
}

/// The row tables of a blueprint, checked against the source, and one sentence for each that is not stored in the
/// wanted format.
pub(crate) fn plans<'f>(
    source: &dyn Source,
    blueprint: &Blueprint,
    wanted: impl Into<WantedFormats<'f>>,
) -> Result<(Vec<TablePlan>, Vec<String>)> {
    let wanted = wanted.into();
    let (mut plans, mut notes) = (vec![], vec![]);
    for spec in blueprint.resident.iter().filter(|spec| spec.by_row) {
        let (from, kind) = choose_stored(source, spec, wanted.of(&spec.name), &mut notes)?;
        let table = match spec.shape[..] {
            [rows, cols] => TableFile::new(&spec.name, kind, rows, cols),
            _ => None,
        };
        let table = table.ok_or_else(|| {
            let what = format!("tensor '{}' with shape {:?} cannot be a row table", spec.name, spec.shape);
            StoreError::new(StoreErrorKind::Unsupported, source.path(), what)
        })?;
        plans.push(TablePlan { from, table });
    }
    Ok((plans, notes))
}

/// Checks that the file at `path` is what [`write`] would write, as far as the file itself shows.
pub(crate) fn check_written(plan: &TablePlan, path: &Path) -> Result<TableFile> {
    let (table, checksum) = RowTable::open_unlisted(path, &plan.table)?;
    table.check(&())?;
    Ok(TableFile { checksum, ..plan.table.clone() })
}

/// Writes the table at `path` atomically, a block at a time.
pub(crate) fn write(source: &dyn Source, plan: &TablePlan, path: &Path, progress: &dyn Progress) -> Result<TableFile> {
    let TablePlan { from, table } = plan;
    let source = view_for(source, &table.name, Some(*from));
    let from_row = from.row_bytes(table.cols).expect("formats are chosen so that rows are whole blocks");
    let (mut raw, mut out, mut values) = (vec![], vec![], vec![]);
    let mut checksums = Vec::with_capacity(table.checksums_bytes());
    let mut file = AtomicFile::create(path)?;
    file.write(&table.header())?;
    for first in (0..table.rows).step_by(table.block_rows) {
        let rows = table.block_rows.min(table.rows - first);
        raw.resize(rows * from_row, 0);
        source.read(&table.name, first * from_row, &mut raw)?;
        out.resize(rows * table.row_bytes(), 0);
        convert(source, &table.name, (*from, &raw), (table.kind, None, &mut out), &mut values)?;
        checksums.extend(XxHash3_128::oneshot(&out).to_be_bytes());
        file.write(&out)?;
        progress.advance(out.len() as u64);
    }
    let end = DATA_START + table.rows * table.row_bytes();
    file.write(&vec![0; table.checksums_start() - end])?;
    file.write(&checksums)?;
    file.publish()?;
    Ok(TableFile { checksum: checksum_of(&checksums), ..table.clone() })
}
