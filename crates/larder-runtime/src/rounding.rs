//! How far a conversion has moved the weights of a quantised checkpoint.

use std::path::Path;

use anyhow::Result;
use larder_core::{Blueprint, ExpertId, ExpertPart, NumberFormat, RowOrder, TensorMeta, Tensors, matrix_scale};
use larder_kernels::{WeightMatrix, widen_row};
use larder_store::{Assembler, ExpertSource, Source, Store};

/// Resident matrices that are compared, spread evenly over the model.
const MATRICES_COMPARED: usize = 8;

/// The root mean square of the difference between the weights of the store at `path` and those of `source`, of which it
/// was made, relative to that of the weights. Compared are an expert of each layer and some resident matrices that are
/// quantised. `None` if the source has no quantised weights, or if its bytes are gone because it was downloaded.
pub fn rounding_error(source: &dyn Source, blueprint: &Blueprint, path: &Path) -> Result<Option<f64>> {
    let Some(floats) = source.as_floats().filter(|_| source.published().is_none()) else { return Ok(None) };
    let store = Store::open(path)?;
    let mut difference = Difference::default();
    let exact = Assembler::new(floats, blueprint, Some(NumberFormat::F32))?;
    for layer in &blueprint.geometry.moe_layers {
        let [stored, wide] = [&store as &dyn ExpertSource, &exact].map(|experts| (experts, experts.layout(*layer)));
        let [stored, wide] = [stored, wide].map(|(experts, layout)| {
            let mut data = vec![0; layout.bytes];
            experts.read_expert(*layer, ExpertId(0), &mut data).map(|()| (layout, data))
        });
        let ((layout, data), (wide_layout, wide)) = (stored?, wide?);
        for (part, exact) in layout.matrices().zip(wide_layout.matrices()) {
            let ExpertPart { kind, order, rows, cols, .. } = *part;
            let (scale, bytes) = (part.scale(&data), part.of(&data));
            difference.add(WeightMatrix { kind, order, rows, cols, scale, bytes }, exact.of(&wide));
        }
    }
    let quantised = |name: &&str| source.meta(name).map(|m| m.kind) != floats.meta(name).map(|m| m.kind);
    let whole = blueprint.resident.iter().filter(|spec| !spec.by_row).map(|spec| spec.name.as_str());
    let names: Vec<&str> = whole.filter(quantised).collect();
    for name in names.iter().step_by(names.len().div_ceil(MATRICES_COMPARED).max(1)) {
        let (Some(meta), Some(wide)) = (store.meta(name), floats.meta(name)) else { continue };
        let (mut data, mut exact) = (vec![0; meta.bytes], vec![0; wide.bytes]);
        store.read(name, 0, &mut data)?;
        floats.read(name, 0, &mut exact)?;
        difference.add(WeightMatrix { scale: matrix_scale(&store, name)?, ..matrix(meta, &data) }, &exact);
    }
    Ok(Some(difference.relative()))
}

/// The rows of a tensor of any number of dimensions.
fn matrix<'a>(meta: &TensorMeta, bytes: &'a [u8]) -> WeightMatrix<'a> {
    let cols = meta.shape.last().copied().unwrap_or(1);
    let rows = meta.shape.iter().product::<usize>().checked_div(cols).unwrap_or_default();
    let order = if meta.shape.len() == 2 { meta.order } else { RowOrder::Plain };
    WeightMatrix { kind: meta.kind, order, rows, cols, scale: 1.0, bytes }
}

/// Sums of squares.
#[derive(Default)]
struct Difference {
    of_difference: f64,
    of_values: f64,
}

impl Difference {
    /// Adds the rows of `stored`, whose exact values are the f32 in `exact`.
    fn add(&mut self, stored: WeightMatrix, exact: &[u8]) {
        let mut row = vec![0.0; stored.cols];
        for (i, exact) in exact.chunks_exact(4 * stored.cols).enumerate() {
            widen_row(stored, i, &mut row);
            for (got, exact) in row.iter().zip(exact.as_chunks().0) {
                let exact = f64::from(f32::from_le_bytes(*exact));
                self.of_difference += (f64::from(*got) - exact).powi(2);
                self.of_values += exact.powi(2);
            }
        }
    }

    fn relative(&self) -> f64 {
        if self.of_difference == 0.0 { 0.0 } else { (self.of_difference / self.of_values).sqrt() }
    }
}
