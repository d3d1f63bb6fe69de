//! Loading the tensors that an architecture requests, and recording the requests.

mod bytes;
mod embedding;
mod matrix;
mod placed_matrix;
mod read_ahead;
mod row_cache;

pub use bytes::Bytes;
pub use embedding::{EmbeddingRows, RowTraffic, ScaledRows};
pub use matrix::{Linear, Matrix};
pub use placed_matrix::PlacedMatrix;
pub(crate) use read_ahead::ReadAhead;
use row_cache::CachedRows;
pub use row_cache::row_cache_bytes;

use std::sync::Arc;

use larder_core::{
    DIGITS, NumberFormat, RowOrder, TensorMeta, TensorSpec, Tensors, deinterleave, from_digits, interleave,
    matrix_scale,
};

use crate::compute::ComputeContext;
use crate::error::{ModelError, Result};

/// Hands out the resident weights that an architecture requests by name and shape.
///
/// The code that builds a model also lists the tensors that it needs: without a source every tensor comes back empty,
/// and only the list of requests is used.
pub struct WeightLoader<'a> {
    source: Option<&'a dyn Tensors>,
    ahead: Option<&'a ReadAhead<'a>>,
    compute: Arc<ComputeContext>,
    requested: Vec<TensorSpec>,
}

impl<'a> WeightLoader<'a> {
    /// Loads from `source`, from which `ahead` reads; matmuls with the weights are computed on `compute`.
    pub fn load(source: &'a dyn Tensors, ahead: &'a ReadAhead<'a>, compute: Arc<ComputeContext>) -> Self {
        WeightLoader { source: Some(source), ahead: Some(ahead), compute, requested: Vec::new() }
    }

    /// Loads nothing and only records requests; see [`requested`](Self::requested).
    pub fn list() -> Self {
        WeightLoader {
            source: None,
            ahead: None,
            compute: Arc::new(ComputeContext::single_threaded()),
            requested: Vec::new(),
        }
    }

    /// Every tensor asked for so far.
    pub fn requested(&self) -> &[TensorSpec] {
        &self.requested
    }

    /// The weight of a matmul, `[rows, cols]`, in its stored number format.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        match self.bytes(name, &[rows, cols], true)? {
            Some((meta, bytes)) => Ok(self.arranged(&meta, rows, cols, bytes).scaled(self.scale(name)?).named(name)),
            None => Ok(self.without_values(rows, cols)),
        }
    }

    /// A matrix that stands for one that was only requested.
    fn without_values(&self, rows: usize, cols: usize) -> Matrix {
        let bytes = Arc::new(Bytes::zeroed(0));
        Matrix::new(NumberFormat::F32, RowOrder::Plain, rows, cols, bytes, self.compute.clone())
    }

    /// A matrix of which only single rows are used. It stays on the SSD if the source can read single rows of it.
    pub fn rows(&mut self, name: &str, rows: usize, cols: usize) -> Result<Box<dyn EmbeddingRows>> {
        let stored = self.source.and_then(|source| Some((source, source.rows(name)?)));
        let found: Box<dyn EmbeddingRows> = match stored {
            Some((source, stored)) => {
                self.request(name, &[rows, cols], true);
                check_shape(source, name, &[rows, cols])?;
                let cached = Box::new(CachedRows::new(stored));
                match self.scale(name)? {
                    1.0 => cached,
                    scale => Box::new(ScaledRows::new(cached, vec![0.0; cols], vec![scale; cols])),
                }
            }
            None => Box::new(self.matrix(name, rows, cols)?),
        };
        self.last_request().by_row = true;
        Ok(found)
    }

    /// `prefix.weight [rows, cols]`, and `prefix.bias [rows]` if `bias`.
    pub fn linear(&mut self, prefix: &str, rows: usize, cols: usize, bias: bool) -> Result<Linear> {
        let matrix = self.matrix(&format!("{prefix}.weight"), rows, cols)?;
        let bias = if bias { Some(self.vector(&format!("{prefix}.bias"), &[rows])?) } else { None };
        Linear::new(matrix, bias)
    }

    /// As [`linear`](Self::linear), as a matmul for each of `parts`, which have the rows of their groups one after the
    /// other.
    pub fn linear_parts<const N: usize>(
        &mut self,
        prefix: &str,
        rows: usize,
        cols: usize,
        bias: bool,
        parts: [&[RowGroups]; N],
    ) -> Result<[Linear; N]> {
        let name = format!("{prefix}.weight");
        let matrices = self.matrix_parts(&name, rows, cols, parts)?;
        let biases = if bias { Some(self.vector(&format!("{prefix}.bias"), &[rows])?) } else { None };
        let mut linears = [const { None }; N];
        for ((place, matrix), part) in linears.iter_mut().zip(matrices).zip(parts) {
            let of_part = |all: &Vec<f32>| {
                if all.is_empty() { Vec::new() } else { rows_of(part, rows).map(|row| all[row]).collect() }
            };
            *place = Some(Linear::new(matrix, biases.as_ref().map(of_part))?);
        }
        Ok(linears.map(|linear| linear.expect("one product for each part")))
    }

    /// The matrix `name [rows, cols]`, as a matrix for each of `parts`.
    fn matrix_parts<const N: usize>(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        parts: [&[RowGroups]; N],
    ) -> Result<[Matrix; N]> {
        let stored = self.bytes(name, &[rows, cols], true)?;
        self.last_request().pieces = N;
        let Some((meta, mut all)) = stored else {
            return Ok(parts.map(|part| self.without_values(rows_of(part, rows).count(), cols)));
        };
        if meta.order != RowOrder::Plain {
            deinterleave(meta.kind, rows, cols, &mut all);
        }
        let (scale, row_bytes) = (self.scale(name)?, meta.bytes / rows);
        let matrices = parts.map(|part| {
            let bytes: Vec<u8> =
                rows_of(part, rows).flat_map(|row| &all[row * row_bytes..][..row_bytes]).copied().collect();
            let count = bytes.len() / row_bytes;
            let (shape, order) = (vec![count, cols], RowOrder::Plain);
            let of_part = TensorMeta { kind: meta.kind, order, shape, bytes: bytes.len() };
            self.arranged(&of_part, count, cols, Bytes::from(&bytes[..])).scaled(scale)
        });
        // Their inputs are the same, and are collected once.
        let mut named = false;
        Ok(matrices.map(|matrix| if std::mem::replace(&mut named, true) { matrix } else { matrix.named(name) }))
    }

    /// The values of a small tensor; empty without a source.
    pub fn vector(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        Ok(self.values(name, shape)?.unwrap_or_default())
    }

    /// The integers of a small tensor, which sources present as [`larder_core::digits`]; empty without a source.
    pub fn integers(&mut self, name: &str, shape: &[usize]) -> Result<Vec<i64>> {
        let values = self.vector(name, &[shape, &[DIGITS]].concat())?;
        let integers = values.as_chunks::<DIGITS>().0.iter().map(|digits| from_digits(*digits));
        let whole: Option<Vec<i64>> = integers.collect();
        whole.ok_or_else(|| ModelError::Weights(format!("tensor {name} has values that are no integers")))
    }

    /// A matrix of `heads` row blocks with `parts[0] + parts[1]` rows each, split by head: the first part transposed,
    /// `[cols, parts[0]]`, and the second unchanged, `[parts[1], cols]`.
    ///
    /// Quantised blocks run along rows and cannot be transposed: both parts are then converted to f16.
    pub fn split_heads(
        &mut self,
        name: &str,
        heads: usize,
        parts: [usize; 2],
        cols: usize,
    ) -> Result<[Vec<PlacedMatrix>; 2]> {
        let per_head = parts[0] + parts[1];
        let matrix = self.matrix(name, heads * per_head, cols)?;
        let spec = self.last_request();
        (spec.by_head, spec.pieces) = (true, 2 * heads);
        if self.source.is_none() {
            return Ok([vec![], vec![]]);
        }
        let kind = if matrix.kind().is_float() { matrix.kind() } else { NumberFormat::F16 };
        let mut split = [Vec::with_capacity(heads), Vec::with_capacity(heads)];
        let mut head = vec![0.0; per_head * cols];
        for at in 0..heads {
            head.chunks_exact_mut(cols).enumerate().for_each(|(r, row)| matrix.row(at * per_head + r, row));
            let (first, second) = head.split_at(parts[0] * cols);
            let transposed: Vec<f32> = (0..cols).flat_map(|c| first[c..].iter().step_by(cols)).copied().collect();
            split[0].push(self.floats(kind, cols, parts[0], &transposed).place()?);
            split[1].push(self.floats(kind, parts[1], cols, second).place()?);
        }
        Ok(split)
    }

    /// One matrix `[rows, cols]` per head of a tensor `[heads, rows, cols]`, in its stored number format.
    pub fn heads(&mut self, name: &str, shape: [usize; 3]) -> Result<Vec<PlacedMatrix>> {
        let [heads, rows, cols] = shape;
        let stored = self.bytes(name, &shape, true)?;
        self.last_request().pieces = heads;
        let Some((meta, all)) = stored else { return Ok(vec![]) };
        let head = TensorMeta { shape: vec![rows, cols], bytes: meta.bytes / heads, ..meta };
        let scale = self.scale(name)?;
        let matrix = |bytes: &[u8]| self.arranged(&head, rows, cols, Bytes::from(bytes)).scaled(scale).place();
        all.chunks_exact(head.bytes).map(matrix).collect()
    }

    /// The matrix `name [groups · rows, cols]`, as one matrix `[rows, cols]` per group, in its stored number format.
    pub fn row_groups(&mut self, name: &str, groups: usize, rows: usize, cols: usize) -> Result<Vec<PlacedMatrix>> {
        let stored = self.bytes(name, &[groups * rows, cols], true)?;
        self.last_request().pieces = groups;
        let Some((meta, mut all)) = stored else { return Ok(vec![]) };
        if meta.order != RowOrder::Plain {
            deinterleave(meta.kind, groups * rows, cols, &mut all);
        }
        let (shape, bytes, order) = (vec![rows, cols], meta.bytes / groups, RowOrder::Plain);
        let group = TensorMeta { shape, bytes, order, ..meta };
        let scale = self.scale(name)?;
        let matrix = |bytes: &[u8]| self.arranged(&group, rows, cols, Bytes::from(bytes)).scaled(scale).place();
        all.chunks_exact(group.bytes).map(matrix).collect()
    }

    /// The kernel `name [groups · width, width, taps]` of a grouped convolution: for each group a matrix
    /// `[width, taps · width]`, whose rows have the weights of the first tap before those of the second. It keeps its
    /// number format.
    pub fn grouped_kernel(
        &mut self,
        name: &str,
        groups: usize,
        width: usize,
        taps: usize,
    ) -> Result<Vec<PlacedMatrix>> {
        let stored = self.bytes(name, &[groups * width, width, taps], false)?;
        let spec = self.last_request();
        (spec.on_device, spec.pieces) = (true, groups);
        let Some((meta, bytes)) = stored else { return Ok(vec![]) };
        let mut stored = vec![0.0; groups * width * width * taps];
        larder_kernels::widen(meta.kind, &bytes, &mut stored);
        let matrix = |group: &[f32]| {
            let by_tap = |row: &[f32]| -> Vec<f32> {
                (0..taps).flat_map(|tap| row.iter().skip(tap).step_by(taps)).copied().collect()
            };
            let rows: Vec<f32> = group.chunks_exact(width * taps).flat_map(by_tap).collect();
            self.floats(meta.kind, width, taps * width, &rows).place()
        };
        stored.chunks_exact(width * width * taps).map(matrix).collect()
    }

    /// A matrix from f32 values, stored as `kind`.
    fn floats(&self, kind: NumberFormat, rows: usize, cols: usize, values: &[f32]) -> Matrix {
        let mut bytes = Bytes::zeroed(values.len() * kind.block_bytes());
        larder_kernels::narrow(kind, values, &mut bytes);
        let meta = TensorMeta { kind, order: RowOrder::Plain, shape: vec![rows, cols], bytes: bytes.len() };
        self.arranged(&meta, rows, cols, bytes)
    }

    /// Brings the rows into the order in which matmuls are fastest.
    fn arranged(&self, meta: &TensorMeta, rows: usize, cols: usize, mut bytes: Bytes) -> Matrix {
        let order = RowOrder::best(meta.kind);
        if meta.order != order {
            interleave(meta.kind, rows, cols, &mut bytes);
        }
        Matrix::new(meta.kind, order, rows, cols, Arc::new(bytes), self.compute.clone())
    }

    /// What all values of a matrix are multiplied by.
    fn scale(&self, name: &str) -> Result<f32> {
        self.source.map_or(Ok(1.0), |source| Ok(matrix_scale(source, name)?))
    }

    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>> {
        let Some((meta, bytes)) = self.bytes(name, shape, false)? else { return Ok(None) };
        let mut values = vec![0.0; shape.iter().product()];
        larder_kernels::widen(meta.kind, &bytes, &mut values);
        Ok(Some(values))
    }

    fn request(&mut self, name: &str, shape: &[usize], product: bool) {
        self.requested.push(TensorSpec::new(name, shape, product));
    }

    /// The tensor that was asked for last.
    fn last_request(&mut self) -> &mut TensorSpec {
        self.requested.last_mut().expect("a tensor was asked for")
    }

    fn bytes(&mut self, name: &str, shape: &[usize], product: bool) -> Result<Option<(TensorMeta, Bytes)>> {
        self.request(name, shape, product);
        let Some(source) = self.source else { return Ok(None) };
        let meta = check_shape(source, name, shape)?.clone();
        if !product && !meta.kind.is_float() {
            return Err(ModelError::Weights(format!(
                "tensor {name} is stored as {}; f32, f16 or bf16 is needed",
                meta.kind
            )));
        }
        if let Some(read) = self.ahead.and_then(|ahead| ahead.take(name)) {
            return Ok(Some((meta, read?)));
        }
        let mut bytes = Bytes::zeroed(meta.bytes);
        source.read(name, 0, &mut bytes)?;
        Ok(Some((meta, bytes)))
    }
}

/// Some rows of each group of consecutive rows of a matrix.
#[derive(Clone, Copy)]
pub struct RowGroups {
    /// Rows of a group.
    pub group: usize,
    /// The first of them that belongs to the part.
    pub first: usize,
    /// Rows that belong to the part.
    pub count: usize,
}

impl RowGroups {
    /// Consecutive parts of all `rows` rows, with as many rows each as `counts` has.
    pub fn consecutive<const N: usize>(rows: usize, counts: [usize; N]) -> [Self; N] {
        let mut end = 0;
        counts.map(|count| {
            end += count;
            RowGroups { group: rows, first: end - count, count }
        })
    }
}

/// The rows of a part, of a matrix with `rows` rows.
fn rows_of(part: &[RowGroups], rows: usize) -> impl Iterator<Item = usize> {
    part.iter().flat_map(move |&RowGroups { group, first, count }| {
        (0..rows).step_by(group).flat_map(move |start| start + first..start + first + count)
    })
}

fn check_shape<'a>(source: &'a dyn Tensors, name: &str, shape: &[usize]) -> Result<&'a TensorMeta> {
    let meta = source.meta(name).ok_or_else(|| ModelError::Weights(format!("tensor {name} is missing")))?;
    if meta.shape != shape {
        let what = format!("tensor {name} has shape {:?}; config.json calls for {shape:?}", meta.shape);
        return Err(ModelError::Weights(what));
    }
    Ok(meta)
}

#[cfg(test)]
mod tests {
    use larder_core::TensorsError;
    use larder_kernels::quantise_row;

    use super::*;

    const ROWS: usize = 24;
    const COLS: usize = 64;

    /// A matrix in q8_0 and its bias.
    struct Joined([TensorMeta; 2], [Vec<u8>; 2]);

    impl Joined {
        fn new(order: RowOrder) -> Self {
            let value = |i: usize| ((i * 37 + i / 5) % 101) as f32 / 101.0 - 0.5;
            let row_bytes = COLS / 32 * 34;
            let mut bytes = vec![0; ROWS * row_bytes];
            for (row, out) in bytes.chunks_exact_mut(row_bytes).enumerate() {
                quantise_row(&(0..COLS).map(|c| value(row * COLS + c)).collect::<Vec<_>>(), out);
            }
            if order == RowOrder::Rows8 {
                interleave(NumberFormat::Q8_0, ROWS, COLS, &mut bytes);
            }
            let bias: Vec<u8> = (0..ROWS).flat_map(|row| (row as f32).to_le_bytes()).collect();
            let meta = |kind, order, shape, bytes: &[u8]| TensorMeta { kind, order, shape, bytes: bytes.len() };
            let metas = [
                meta(NumberFormat::Q8_0, order, vec![ROWS, COLS], &bytes),
                meta(NumberFormat::F32, RowOrder::Plain, vec![ROWS], &bias),
            ];
            Joined(metas, [bytes, bias])
        }
    }

    impl Tensors for Joined {
        fn meta(&self, name: &str) -> Option<&TensorMeta> {
            Some(&self.0[usize::from(name.ends_with("bias"))])
        }

        fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> std::result::Result<(), TensorsError> {
            into.copy_from_slice(&self.1[usize::from(name.ends_with("bias"))][offset..][..into.len()]);
            Ok(())
        }
    }

    #[test]
    fn parts_of_a_matrix_yield_its_rows_in_their_order() {
        // Of each six rows the first, then the last two; and the others.
        let first = RowGroups { group: 6, first: 0, count: 1 };
        let last = RowGroups { group: 6, first: 4, count: 2 };
        let between = RowGroups { group: 6, first: 1, count: 3 };
        let rows = [vec![0, 6, 12, 18, 4, 5, 10, 11, 16, 17, 22, 23], vec![1, 2, 3, 7, 8, 9, 13, 14, 15, 19, 20, 21]];
        let values: Vec<f32> = (0..2 * COLS).map(|i| (i as f32 * 0.3).sin()).collect();
        for order in [RowOrder::Plain, RowOrder::Rows8] {
            let source = Joined::new(order);
            let compute = Arc::new(ComputeContext::single_threaded());
            let ahead = ReadAhead::new(&source, &[]);
            let mut weights = WeightLoader::load(&source, &ahead, compute.clone());
            let ops = compute.ops();
            let x = ops.send(&values, COLS).unwrap();
            let product = |linear: &Linear| ops.download(&[linear.forward(x, ops).unwrap()]).unwrap()[0].to_vec();
            let whole = product(&weights.linear("m", ROWS, COLS, true).unwrap());
            let parts = weights.linear_parts("m", ROWS, COLS, true, [&[first, last], &[between]]).unwrap();
            for (part, rows) in parts.iter().zip(&rows) {
                let tokens = whole.chunks_exact(ROWS);
                let wanted: Vec<f32> = tokens.flat_map(|token| rows.iter().map(|row| token[*row])).collect();
                assert_eq!(product(part), wanted, "{order:?}");
            }
            assert_eq!(weights.requested().len(), 4, "each tensor once for all parts");
        }
        let mut list = WeightLoader::list();
        let [one, other] = list.linear_parts("m", ROWS, COLS, false, [&[first, last], &[between]]).unwrap();
        assert_eq!((one.rows(), other.rows(), list.requested().len()), (12, 12, 1));
    }
}
