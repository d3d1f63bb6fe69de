//! Tables that a checkpoint has in several parts: the rows of `NAME.shard_0.weight`, `NAME.shard_1.weight`, … are those
//! of `NAME.weight`.

use std::{collections::BTreeMap, ops::Range};

use larder_core::{NumberFormat, TensorMeta, Tensors};

use super::{Checkpoint, Encoding, Found, PackedTensor};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    quantize::decode_floats,
    source::{Source, require_tensor},
};

/// A table in parts.
struct Joined {
    kind: NumberFormat,
    parts: Vec<Part>,
}

/// A part of a table.
struct Part {
    name: String,
    /// How it is stored, if it is quantised.
    encoding: Option<Box<dyn Encoding>>,
    /// The values of the table that it holds.
    held: Range<usize>,
}

/// Finds all tables in parts, which take the place of quantised parts among `found`.
pub(super) fn join(from: &Checkpoint, found: &mut Found) -> Result<()> {
    let mut tables = BTreeMap::<&str, BTreeMap<usize, &str>>::new();
    for name in from.names() {
        if let Some((table, part)) = part_of(name) {
            tables.entry(table).or_default().insert(part, name);
        }
    }
    for (table, parts) in tables {
        let name = format!("{table}.weight");
        let joined = join_parts(from, &name, &parts, found)?;
        found.tensors.insert(name, joined);
    }
    Ok(())
}

/// The table's name and the number of the part that the tensor `name` is; `None` if it is none.
pub(super) fn part_of(name: &str) -> Option<(&str, usize)> {
    let (table, number) = name.strip_suffix(".weight")?.rsplit_once(".shard_")?;
    Some((table, number.parse().ok()?))
}

fn join_parts(
    from: &Checkpoint,
    name: &str,
    numbered: &BTreeMap<usize, &str>,
    found: &mut Found,
) -> Result<PackedTensor> {
    let refused = |kind, what: String| Err(StoreError::new(kind, from.path(), what));
    if let Some((missing, _)) = numbered.keys().enumerate().find(|(i, number)| i != *number) {
        return refused(StoreErrorKind::Missing, format!("has no part {missing} of the table '{name}'"));
    }
    let (mut first, mut rows, mut parts) = (None, 0usize, vec![]);
    for part in numbered.values() {
        let (TensorMeta { kind, shape, .. }, encoding) = match found.tensors.remove(*part) {
            Some(packed) => (packed.kept, Some(packed.encoding)),
            None => (require_tensor(from, part)?.clone(), None),
        };
        if kind.has_matrix_scale() {
            let what = format!("has parts of the table '{name}' in {kind}, which is not supported");
            return refused(StoreErrorKind::Unsupported, what);
        }
        let (own, cols) = match shape[..] {
            [rows, cols] if rows > 0 && cols > 0 => (rows, cols),
            _ => {
                let what = format!("has the part '{part}' of a table with the shape {shape:?}");
                return refused(StoreErrorKind::Unsupported, what);
            }
        };
        if *first.get_or_insert((kind, cols)) != (kind, cols) {
            let what = format!("has parts of the table '{name}' in several formats or widths");
            return refused(StoreErrorKind::Mismatch, what);
        }
        // The values of all parts are in files, so that their number does not overflow.
        parts.push(Part { name: (*part).to_owned(), encoding, held: rows * cols..(rows + own) * cols });
        rows += own;
    }
    let (kind, cols) = first.expect("a table has a part");
    PackedTensor::new(from, name, vec![rows, cols], Box::new(Joined { kind, parts }))
}

impl Part {
    /// Names of the stored tensors that it is made of.
    fn stored(&self) -> Vec<&str> {
        match &self.encoding {
            Some(encoding) => encoding.parts(),
            None => vec![&self.name],
        }
    }
}

impl Joined {
    /// The parts that hold these values of the table, and which of their own.
    fn overlaps(&self, values: Range<usize>) -> impl Iterator<Item = (&Part, Range<usize>)> {
        let first = self.parts.partition_point(|part| part.held.end <= values.start);
        let met = self.parts[first..].iter().take_while(move |part| part.held.start < values.end);
        met.map(move |part| {
            let Range { start, end } = part.held;
            (part, values.start.max(start) - start..values.end.min(end) - start)
        })
    }

    /// Bytes of this many values, which are whole blocks.
    fn bytes(&self, values: usize) -> usize {
        values / self.kind.block_len() * self.kind.block_bytes()
    }
}

impl Encoding for Joined {
    fn kind(&self) -> NumberFormat {
        self.kind
    }

    fn parts(&self) -> Vec<&str> {
        self.parts.iter().flat_map(Part::stored).collect()
    }

    fn widen(&self, from: &Checkpoint, first: usize, out: &mut [f32]) -> Result<()> {
        let mut rest = out;
        for (part, values) in self.overlaps(first..first + rest.len()) {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(values.len());
            match &part.encoding {
                Some(encoding) => encoding.widen(from, values.start, now)?,
                None => {
                    let mut bytes = vec![0; self.bytes(now.len())];
                    from.read(&part.name, self.bytes(values.start), &mut bytes)?;
                    decode_floats(self.kind, &bytes, now);
                }
            }
            rest = later;
        }
        Ok(())
    }

    fn keep(&self, from: &Checkpoint, first: usize, out: &mut [u8]) -> Result<()> {
        let mut rest = out;
        let count = rest.len() / self.kind.block_bytes() * self.kind.block_len();
        for (part, values) in self.overlaps(first..first + count) {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(self.bytes(values.len()));
            match &part.encoding {
                Some(encoding) => encoding.keep(from, values.start, now)?,
                None => from.read(&part.name, self.bytes(values.start), now)?,
            }
            rest = later;
        }
        Ok(())
    }

    fn ranges(&self, values: Range<usize>) -> Vec<(&str, Range<usize>)> {
        let mut ranges = vec![];
        for (part, own) in self.overlaps(values) {
            match &part.encoding {
                Some(encoding) => ranges.extend(encoding.ranges(own)),
                None => ranges.push((part.name.as_str(), self.bytes(own.start)..self.bytes(own.end))),
            }
        }
        ranges
    }

    fn rounds(&self) -> bool {
        self.parts.iter().any(|part| part.encoding.as_ref().is_some_and(|encoding| encoding.rounds()))
    }
}
