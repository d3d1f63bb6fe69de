//! Weights by name, as matrices in panels or as values.

use larder_core::{NumberFormat, RowOrder, TensorMeta, Tensors};
use larder_kernels::widen;

use crate::compute::{ColumnPanels, LayerNorm, TowerLinear};
use crate::error::VisionError;

/// Panels of the bits of rows of some length.
type PanelsOf = fn(&[u16], usize) -> ColumnPanels;

/// Reads tensors of a tower. Shapes follow from a config within bounds, and are compared with those of the file
/// before anything is allocated.
pub struct WeightReader<'a> {
    /// The tensors.
    pub tensors: &'a dyn Tensors,
}

impl WeightReader<'_> {
    /// Whether there is such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.meta(name).is_some()
    }

    /// Format and size of a tensor, which must have this shape.
    pub fn meta(&self, name: &str, shape: &[usize]) -> Result<&TensorMeta, VisionError> {
        let meta = self.tensors.meta(name).ok_or_else(|| VisionError::MissingTensor(name.into()))?;
        if meta.shape != shape {
            return Err(VisionError::Shape { name: name.into(), found: meta.shape.clone(), wanted: shape.into() });
        }
        let is_plain = meta.order == RowOrder::Plain && !meta.kind.has_matrix_scale();
        if is_plain && meta.kind.row_bytes(shape.iter().product()) == Some(meta.bytes) {
            Ok(meta)
        } else {
            Err(VisionError::StoredForm(name.into()))
        }
    }

    fn bytes(&self, name: &str, meta: &TensorMeta) -> Result<Vec<u8>, VisionError> {
        let mut bytes = vec![0; meta.bytes];
        self.tensors.read(name, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// The values of a tensor of this shape.
    pub fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, VisionError> {
        let meta = self.meta(name, shape)?;
        let mut values = vec![0.0; shape.iter().product()];
        widen(meta.kind, &self.bytes(name, meta)?, &mut values);
        finite(name, values.iter().all(|value| value.is_finite()))?;
        Ok(values)
    }

    /// A matrix `[columns, depth]`, in halves or bfloats if it is stored in these.
    fn matrix(&self, name: &str, columns: usize, depth: usize) -> Result<ColumnPanels, VisionError> {
        let meta = self.meta(name, &[columns, depth])?;
        let (infinite, panels): (u16, PanelsOf) = match meta.kind {
            NumberFormat::F16 => (0x7c00, ColumnPanels::from_f16),
            NumberFormat::Bf16 => (0x7f80, ColumnPanels::from_bf16),
            _ => return Ok(ColumnPanels::from_f32(&self.values(name, &[columns, depth])?, depth)),
        };
        let bytes = self.bytes(name, meta)?;
        let bits: Vec<u16> = bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
        finite(name, bits.iter().all(|bits| bits & infinite != infinite))?;
        Ok(panels(&bits, depth))
    }

    /// The linear layer `name.weight` and `name.bias`.
    pub fn linear(&self, name: &str, columns: usize, depth: usize) -> Result<TowerLinear, VisionError> {
        let weights = self.matrix(&format!("{name}.weight"), columns, depth)?;
        Ok(TowerLinear { weights, bias: self.values(&format!("{name}.bias"), &[columns])? })
    }

    /// The norm `name.weight` and `name.bias`.
    pub fn norm(&self, name: &str, width: usize, epsilon: f64) -> Result<LayerNorm, VisionError> {
        let of = |part: &str| self.values(&format!("{name}.{part}"), &[width]);
        Ok(LayerNorm { weight: of("weight")?, bias: of("bias")?, epsilon })
    }
}

fn finite(name: &str, is_finite: bool) -> Result<(), VisionError> {
    if is_finite { Ok(()) } else { Err(VisionError::NotFinite(name.into())) }
}
