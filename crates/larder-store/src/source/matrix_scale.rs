//! The scales that a source has beside matrices.

use larder_core::MatrixScale;

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::Source,
};

/// The scale of the matrix `name`, or of number `index` of the `count` matrices that the tensor holds. Refused is a
/// tensor that does not fit them.
pub fn find_scale(source: &dyn Source, name: &str, place: (usize, usize)) -> Result<Option<MatrixScale>> {
    MatrixScale::find(source, name, place)
        .map_err(|e| StoreError::new(StoreErrorKind::Mismatch, source.path(), e.to_string()))
}

/// Reads a scale; refused if it is infinite or NaN.
pub fn read_scale(source: &dyn Source, stored: &MatrixScale) -> Result<f32> {
    let scale = stored.read(source)?;
    if scale.is_finite() {
        Ok(scale)
    } else {
        let what = format!("tensor '{}' holds the scale {scale}", stored.name());
        Err(StoreError::malformed(source.path(), what))
    }
}
