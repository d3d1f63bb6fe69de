//! Scales of whole matrices: `NAME.scale` has the f32 that all values of `NAME.weight` are multiplied by, or one for
//! each of its experts. `NAME.input_scale` is for products with activations of four bits, which no product here has.

use std::collections::HashSet;

use super::reader::GgufTensor;

/// What a tensor is to a matrix in a format whose matrices have scales.
#[derive(Debug, PartialEq)]
pub(super) enum Role {
    /// The scale of the matrix of this name.
    ScaleOf(String),
    /// The scale of the matrix's input, which is not used.
    InputScale,
}

/// The names of a file's matrices that may have scales.
pub(super) struct Scales<'a>(HashSet<&'a str>);

impl<'a> Scales<'a> {
    pub fn of(tensors: &'a [GgufTensor]) -> Self {
        let scaled = tensors.iter().filter(|tensor| tensor.meta.kind.has_matrix_scale());
        Scales(scaled.map(|tensor| tensor.name.as_str()).collect())
    }

    /// The role of the tensor `name`; `None` if it has none.
    pub fn role_of(&self, name: &str) -> Option<Role> {
        let (matrix, suffix) = name.rsplit_once('.')?;
        let matrix = Some(format!("{matrix}.weight")).filter(|matrix| self.0.contains(matrix.as_str()))?;
        match suffix {
            "scale" => Some(Role::ScaleOf(matrix)),
            "input_scale" => Some(Role::InputScale),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_core::{NumberFormat, TensorMeta};

    use super::*;

    #[test]
    fn scales_belong_to_the_matrices_beside_them() {
        let tensors = [("a.weight", NumberFormat::Nvfp4), ("b.weight", NumberFormat::Q8_0)].map(|(name, kind)| {
            let meta = TensorMeta::new(kind, vec![64]).unwrap();
            GgufTensor { name: name.to_owned(), meta, integers: false, file: 0, offset: 0 }
        });
        let scales = Scales::of(&tensors);
        assert_eq!(scales.role_of("a.scale"), Some(Role::ScaleOf("a.weight".to_owned())));
        assert_eq!(scales.role_of("a.input_scale"), Some(Role::InputScale));
        for other in ["a.weight", "b.scale", "b.input_scale", "c.scale", "scale"] {
            assert_eq!(scales.role_of(other), None, "{other}");
        }
    }
}
