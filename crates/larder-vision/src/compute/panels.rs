//! Matrices in panels of sixteen columns, in f32 or as they were stored.

/// Columns of a panel.
pub const PANEL: usize = 16;

/// The values of a matrix, in the bits in which they were stored.
#[derive(Clone)]
enum PanelValues {
    F32(Vec<[f32; PANEL]>),
    F16(Vec<[u16; PANEL]>),
    Bf16(Vec<[u16; PANEL]>),
}

/// A matrix `[depth, columns]`: for every sixteen columns, their values row by row. The last panel is filled with
/// zeros.
#[derive(Clone)]
pub struct ColumnPanels {
    depth: usize,
    columns: usize,
    values: PanelValues,
}

impl ColumnPanels {
    /// From the rows of the transposed matrix: `rows` holds, for each column, `depth` values.
    pub fn from_f32(rows: &[f32], depth: usize) -> Self {
        ColumnPanels { depth, columns: rows.len() / depth, values: PanelValues::F32(packed(rows, depth)) }
    }

    /// As [`from_f32`](Self::from_f32), of halves.
    pub fn from_f16(rows: &[u16], depth: usize) -> Self {
        ColumnPanels { depth, columns: rows.len() / depth, values: PanelValues::F16(packed(rows, depth)) }
    }

    /// As [`from_f32`](Self::from_f32), of bfloats.
    pub fn from_bf16(rows: &[u16], depth: usize) -> Self {
        ColumnPanels { depth, columns: rows.len() / depth, values: PanelValues::Bf16(packed(rows, depth)) }
    }

    /// Rows of the matrix: the length of its sums.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Columns of the matrix: the number of its sums.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        match &self.values {
            PanelValues::F32(values) => size_of_val(values.as_slice()),
            PanelValues::F16(values) | PanelValues::Bf16(values) => size_of_val(values.as_slice()),
        }
    }

    /// Number of panels.
    pub fn count(&self) -> usize {
        self.columns.div_ceil(PANEL)
    }

    /// `length` rows of a panel from row `first` on: as they are, or widened into `scratch`.
    #[inline(always)]
    pub fn widened<'a>(
        &'a self,
        panel: usize,
        first: usize,
        length: usize,
        scratch: &'a mut [[f32; PANEL]],
    ) -> &'a [[f32; PANEL]] {
        let at = panel * self.depth + first;
        match &self.values {
            PanelValues::F32(values) => return &values[at..][..length],
            PanelValues::F16(values) => widen(&values[at..][..length], scratch, wide_f16),
            PanelValues::Bf16(values) => {
                widen(&values[at..][..length], scratch, |v| f32::from_bits(u32::from(v) << 16))
            }
        }
        &scratch[..length]
    }
}

fn packed<T: Copy + Default>(rows: &[T], depth: usize) -> Vec<[T; PANEL]> {
    let columns = rows.len() / depth;
    let mut values = vec![[T::default(); PANEL]; columns.div_ceil(PANEL) * depth];
    for (column, row) in rows.chunks_exact(depth).enumerate() {
        let panel = &mut values[column / PANEL * depth..][..depth];
        panel.iter_mut().zip(row).for_each(|(values, value)| values[column % PANEL] = *value);
    }
    values
}

#[inline(always)]
fn widen(stored: &[[u16; PANEL]], wide: &mut [[f32; PANEL]], value: impl Fn(u16) -> f32) {
    for (stored, wide) in stored.iter().zip(wide) {
        for i in 0..PANEL {
            wide[i] = value(stored[i]);
        }
    }
}

/// A finite half as f32, without branches.
#[inline(always)]
fn wide_f16(half: u16) -> f32 {
    const EXPONENTS: f32 = f32::from_bits((127 + 112) << 23);
    let size = f32::from_bits(u32::from(half & 0x7fff) << 13) * EXPONENTS;
    f32::from_bits(size.to_bits() | u32::from(half & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn every_finite_half_is_widened() {
        for bits in (0..=u16::MAX).filter(|bits| f16::from_bits(*bits).is_finite()) {
            assert_eq!(wide_f16(bits).to_bits(), f16::from_bits(bits).to_f32().to_bits(), "{bits:x}");
        }
    }

    #[test]
    fn a_panel_has_the_values_of_its_columns() {
        let rows: Vec<f32> = (0..20 * 5).map(|i| i as f32).collect();
        let panels = ColumnPanels::from_f32(&rows, 5);
        assert_eq!((panels.depth(), panels.columns(), panels.count()), (5, 20, 2));
        let mut scratch = [[0.0; PANEL]; 5];
        let second = panels.widened(1, 2, 3, &mut scratch);
        assert_eq!(second[0][..5], [rows[16 * 5 + 2], rows[17 * 5 + 2], rows[18 * 5 + 2], rows[19 * 5 + 2], 0.0]);
    }
}
