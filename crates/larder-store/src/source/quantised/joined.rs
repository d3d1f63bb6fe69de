//! Tables that a checkpoint has in several parts: the rows of `NAME.shard_0.weight`, `NAME.shard_1.weight`, … are those of
//! `NAME.weight`.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use larder_core::{NumberFormat, TensorMeta, TensorRows, Tensors};

use super::{Checkpoint, Encoding, PackedTensor};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    quantize::decode_floats,
    source::{Source, file_rows::FileRows, require_tensor},
};

/// A table in parts.
struct Joined {
    kind: NumberFormat,
    /// Names of the parts, with the values of the table that each holds.
    parts: Vec<(String, Range<usize>)>,
}

/// All tables in parts, by their plain names.
pub(super) fn find(from: &Checkpoint) -> Result<BTreeMap<String, PackedTensor>> {
    let mut tables = BTreeMap::<&str, BTreeMap<usize, &str>>::new();
    for name in from.names() {
        if let Some((table, part)) = part_of(name) {
            tables.entry(table).or_default().insert(part, name);
        }
    }
    let joined = tables.into_iter().map(|(table, parts)| {
        let name = format!("{table}.weight");
        Ok((name.clone(), join(from, &name, &parts)?))
    });
    joined.collect()
}

/// The table's name and the number of the part that the tensor `name` is; `None` if it is none.
fn part_of(name: &str) -> Option<(&str, usize)> {
    let (table, number) = name.strip_suffix(".weight")?.rsplit_once(".shard_")?;
    Some((table, number.parse().ok()?))
}

fn join(from: &Checkpoint, name: &str, numbered: &BTreeMap<usize, &str>) -> Result<PackedTensor> {
    let refused = |kind, what: String| Err(StoreError::new(kind, from.path(), what));
    if let Some((missing, _)) = numbered.keys().enumerate().find(|(i, number)| i != *number) {
        return refused(StoreErrorKind::Missing, format!("has no part {missing} of the table '{name}'"));
    }
    let (mut first, mut rows, mut parts) = (None, 0usize, vec![]);
    for part in numbered.values() {
        let meta = require_tensor(from, part)?;
        let (own, cols) = match meta.shape[..] {
            [rows, cols] if rows > 0 && cols > 0 => (rows, cols),
            _ => {
                let what = format!("has the part '{part}' of a table with the shape {:?}", meta.shape);
                return refused(StoreErrorKind::Unsupported, what);
            }
        };
        if *first.get_or_insert((meta.kind, cols)) != (meta.kind, cols) {
            let what = format!("has parts of the table '{name}' in several formats or widths");
            return refused(StoreErrorKind::Mismatch, what);
        }
        // The values of all parts are in files, so that their number does not overflow.
        parts.push(((*part).to_owned(), rows * cols..(rows + own) * cols));
        rows += own;
    }
    let (kind, cols) = first.expect("a table has a part");
    PackedTensor::new(from, name, vec![rows, cols], Box::new(Joined { kind, parts }))
}

impl Joined {
    /// The parts that hold these values of the table, and which of their own.
    fn overlaps(&self, values: Range<usize>) -> impl Iterator<Item = (&str, Range<usize>)> {
        let first = self.parts.partition_point(|(_, held)| held.end <= values.start);
        let met = self.parts[first..].iter().take_while(move |(_, held)| held.start < values.end);
        met.map(move |(name, held)| {
            (name.as_str(), values.start.max(held.start) - held.start..values.end.min(held.end) - held.start)
        })
    }
}

impl Encoding for Joined {
    fn kind(&self) -> NumberFormat {
        self.kind
    }

    fn parts(&self) -> Vec<&str> {
        self.parts.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn widen(&self, from: &Checkpoint, first: usize, out: &mut [f32]) -> Result<()> {
        let mut bytes = vec![0; out.len() * self.kind.block_bytes()];
        self.keep(from, first, &mut bytes)?;
        decode_floats(self.kind, &bytes, out);
        Ok(())
    }

    fn keep(&self, from: &Checkpoint, first: usize, out: &mut [u8]) -> Result<()> {
        let size = self.kind.block_bytes();
        let mut rest = out;
        for (part, values) in self.overlaps(first..first + rest.len() / size) {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(values.len() * size);
            from.read(part, values.start * size, now)?;
            rest = later;
        }
        Ok(())
    }

    fn ranges(&self, values: Range<usize>) -> Vec<(&str, Range<usize>)> {
        let size = self.kind.block_bytes();
        self.overlaps(values).map(|(part, own)| (part, own.start * size..own.end * size)).collect()
    }

    fn rows(&self, from: &Checkpoint, kept: &TensorMeta) -> Option<Arc<dyn TensorRows>> {
        let parts = self.parts.iter().map(|(name, _)| from.file_part(name)).collect::<Option<_>>()?;
        FileRows::open(kept.clone(), parts)
    }
}
