//! How far rounding to each number format moves the results of a group's products.

use std::collections::BTreeMap;

use anyhow::Result;
use larder_core::{Blueprint, ExpertId, LayerIdx, NumberFormat, Tensors};
use larder_kernels::{WeightMatrix, widen, widen_row};
use larder_store::{Assembler, ConvertedTensors, ExpertSource, Importance, Source, encode_weighted};

use super::groups::MatrixGroup;

/// Experts of a layer whose matrices are rounded, spread evenly.
const EXPERTS_ROUNDED: usize = 4;
/// Rows of a matrix that are rounded, spread evenly.
const ROWS_ROUNDED: usize = 64;

/// For the name of each number format the mean squared error of the products of a group, relative to the mean squared
/// result.
pub type Errors = BTreeMap<String, f32>;

/// A model's weights in f32.
pub struct WideWeights<'a> {
    experts: Assembler<'a>,
    resident: ConvertedTensors<'a>,
    importance: Option<&'a Importance>,
}

/// Some rows of a matrix, and the mean squares of its inputs if they are known.
struct Sample {
    cols: usize,
    rows: Vec<f32>,
    importance: Option<Vec<f32>>,
}

impl<'a> WideWeights<'a> {
    /// The weights of `source`, and how large their inputs are.
    pub fn new(source: &'a dyn Source, blueprint: &Blueprint, importance: Option<&'a Importance>) -> Result<Self> {
        let wide = Some(NumberFormat::F32);
        let experts = Assembler::new(source, blueprint, wide)?;
        Ok(WideWeights { experts, resident: ConvertedTensors::new(source, blueprint, wide)?, importance })
    }

    /// The errors of a group in each of `kinds`, from a sample of its rows.
    pub fn errors(&self, group: &MatrixGroup, kinds: &[NumberFormat]) -> Result<Errors> {
        let mut samples = Vec::new();
        for (name, (rows, cols)) in group.names.iter().zip(&group.shapes) {
            match expert_matrix(name).filter(|_| group.of_experts) {
                Some((layer, part)) => self.sample_experts(layer, part, &mut samples)?,
                None => samples.push(self.sample_resident(name, *rows, *cols)?),
            }
        }
        let total: f64 = samples.iter().map(|sample| sample.weighed(|row, _| row.to_vec())).sum();
        let error = |kind: NumberFormat| samples.iter().map(|sample| sample.error(kind)).sum::<f64>();
        Ok(kinds.iter().map(|kind| (kind.name().to_owned(), relative(error(*kind), total))).collect())
    }

    fn sample_experts(&self, layer: LayerIdx, part: &str, into: &mut Vec<Sample>) -> Result<()> {
        let layout = self.experts.layout(layer);
        let experts = self.experts.experts();
        let mut data = vec![0; layout.bytes];
        for at in spread(experts, EXPERTS_ROUNDED) {
            self.experts.read_expert(layer, ExpertId(at as u16), &mut data)?;
            for (_, matrix) in layout.parts().filter(|(name, _)| *name == part) {
                let stored = WeightMatrix {
                    kind: matrix.kind,
                    order: matrix.order,
                    rows: matrix.rows,
                    cols: matrix.cols,
                    scale: 1.0,
                    bytes: matrix.of(&data),
                };
                let importance = self.importance.and_then(|all| all.of_expert(layer, part, at));
                into.push(Sample::of(stored, importance));
            }
        }
        Ok(())
    }

    fn sample_resident(&self, name: &str, rows: usize, cols: usize) -> Result<Sample> {
        let meta = self.resident.meta(name).expect("groups have the tensors of the source");
        let mut bytes = vec![0; meta.bytes];
        self.resident.read(name, 0, &mut bytes)?;
        let stored = WeightMatrix { kind: meta.kind, order: meta.order, rows, cols, scale: 1.0, bytes: &bytes };
        Ok(Sample::of(stored, self.importance.and_then(|all| all.of(name))))
    }
}

impl Sample {
    fn of(matrix: WeightMatrix, importance: Option<Vec<f32>>) -> Self {
        let cols = matrix.cols;
        let chosen: Vec<usize> = spread(matrix.rows, ROWS_ROUNDED).collect();
        let mut rows = vec![0.0; chosen.len() * cols];
        chosen.iter().zip(rows.chunks_exact_mut(cols)).for_each(|(row, out)| widen_row(matrix, *row, out));
        Sample { cols, rows, importance }
    }

    /// The sum over all rows of the squares of `values`, each times its column's importance.
    fn weighed(&self, mut values: impl FnMut(&[f32], Option<&[f32]>) -> Vec<f32>) -> f64 {
        let importance = self.importance.as_deref();
        let mut sum = 0.0;
        for row in self.rows.chunks_exact(self.cols) {
            for (column, value) in values(row, importance).into_iter().enumerate() {
                sum += f64::from(value).powi(2) * importance.map_or(1.0, |all| f64::from(all[column]));
            }
        }
        sum
    }

    /// The weighed sum of squared errors of the rows in a number format.
    fn error(&self, kind: NumberFormat) -> f64 {
        let mut bytes = vec![0; kind.row_bytes(self.cols).expect("candidates hold whole rows")];
        self.weighed(|row, importance| {
            let mut rounded = vec![0.0; row.len()];
            match encode_weighted(kind, row, importance, &mut bytes) {
                Ok(()) => widen(kind, &bytes, &mut rounded),
                // A format in which a value is out of range is of no use for this group.
                Err(_) => return vec![f32::INFINITY; row.len()],
            }
            rounded.iter().zip(row).map(|(rounded, value)| rounded - value).collect()
        })
    }
}

/// A share of `total`, finite as JSON wants it.
fn relative(error: f64, total: f64) -> f32 {
    ((error / total.max(f64::MIN_POSITIVE)) as f32).min(f32::MAX)
}

/// Layer and part of `layers.3.experts.down`.
fn expert_matrix(name: &str) -> Option<(LayerIdx, &str)> {
    let (layer, part) = name.strip_prefix("layers.")?.split_once(".experts.")?;
    Some((LayerIdx(layer.parse().ok()?), part))
}

/// Up to `most` of `all` indices.
fn spread(all: usize, most: usize) -> impl Iterator<Item = usize> {
    let count = all.min(most);
    (0..count).map(move |i| i * all / count.max(1))
}

#[cfg(test)]
mod tests {
    use larder_core::RowOrder;

    use super::*;

    #[test]
    fn errors_fall_with_bits_and_count_as_much_as_their_columns() {
        let values: Vec<f32> = (0..64 * 4).map(|i| (i as f32 * 0.7).sin() * 0.1).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let order = RowOrder::Plain;
        let stored = WeightMatrix { kind: NumberFormat::F32, order, rows: 4, cols: 64, scale: 1.0, bytes: &bytes };
        let sample = Sample::of(stored, None);
        let [q8, q4] = [NumberFormat::Q8_0, NumberFormat::Q4_0].map(|kind| sample.error(kind));
        assert!(q8 > 0.0 && q4 > 20.0 * q8, "{q8} {q4}");
        let doubled = Sample::of(stored, Some(vec![2.0; 64]));
        assert!((doubled.error(NumberFormat::Q8_0) / q8 - 2.0).abs() < 1e-6);
    }

    #[test]
    fn names_of_expert_matrices_are_parsed() {
        assert_eq!(expert_matrix("layers.12.experts.down"), Some((LayerIdx(12), "down")));
        assert_eq!(expert_matrix("model.layers.1.mlp.up_proj.weight"), None);
        assert_eq!(spread(10, 4).collect::<Vec<_>>(), [0, 2, 5, 7]);
        assert_eq!(spread(2, 4).collect::<Vec<_>>(), [0, 1]);
    }
}
