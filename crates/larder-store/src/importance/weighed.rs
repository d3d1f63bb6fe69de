//! Which of the matrices that a conversion rounds have an importance, and whether it fits them.

use larder_core::LayerIdx;

use super::Importance;
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    format_mix::expert_matrix,
    source::Source,
};

/// The importance matrix of a conversion, and what it is used for.
pub(crate) struct WeighedMatrices<'a> {
    pub matrices: &'a Importance,
    source: &'a dyn Source,
    /// Number of matrices that are rounded by their importance.
    weighed: usize,
    /// Names of those that are rounded without one.
    others: Vec<String>,
}

impl<'a> WeighedMatrices<'a> {
    pub fn new(matrices: &'a Importance, source: &'a dyn Source) -> Self {
        WeighedMatrices { matrices, source, weighed: 0, others: vec![] }
    }

    /// The importance of each of the `columns` columns of a resident weight that is rounded, if it is known.
    pub fn of(&mut self, name: &str, columns: usize) -> Result<Option<Vec<f32>>> {
        self.check(name, |(_, of)| of == columns, || format!("{columns} columns"))?;
        Ok(self.matrices.of(name))
    }

    /// Checks the importance of a matrix of the experts of a layer, which is rounded, against its shape.
    pub fn check_experts(&mut self, layer: LayerIdx, part: &str, (experts, columns): (usize, usize)) -> Result<()> {
        let shape = || format!("{experts} experts and {columns} columns");
        self.check(&expert_matrix(layer, part), |of| of == (experts, columns), shape)
    }

    fn check(&mut self, name: &str, fits: impl Fn((usize, usize)) -> bool, wanted: impl Fn() -> String) -> Result<()> {
        match self.matrices.shape(name) {
            None => self.others.push(name.to_owned()),
            Some(shape) if fits(shape) => self.weighed += 1,
            Some((experts, columns)) => {
                let found = if experts == 1 { String::new() } else { format!("{experts} experts and ") };
                let what = format!(
                    "has {} in the matrix '{name}', but its importance is that of {found}{columns} columns; the importance \
                     matrix is of another model",
                    wanted()
                );
                return Err(StoreError::new(StoreErrorKind::Mismatch, self.source.path(), what));
            }
        }
        Ok(())
    }

    /// A sentence about matrices without an importance; an error if no matrix has one.
    pub fn note(&self) -> Result<Option<String>> {
        let rounded = self.weighed + self.others.len();
        match &self.others[..] {
            [] if rounded == 0 => Ok(Some("the importance matrix is not used, because no matrix is rounded".into())),
            [] => Ok(None),
            _ if self.weighed == 0 => {
                let what = format!(
                    "has {rounded} matrices that are rounded, and the importance matrix has none of them; it is of another model"
                );
                Err(StoreError::new(StoreErrorKind::Mismatch, self.source.path(), what))
            }
            [one] => Ok(Some(format!("the importance matrix does not have {one}"))),
            [first, second] => Ok(Some(format!("the importance matrix does not have {first} and {second}"))),
            [first, rest @ ..] => {
                Ok(Some(format!("the importance matrix does not have {first} and {} others", rest.len())))
            }
        }
    }
}
