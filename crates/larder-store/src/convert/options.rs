//! Options of a conversion.

use std::{path::PathBuf, sync::Arc};

use larder_core::NumberFormat;

use crate::{format_mix::FormatMix, importance::Importance, source::TowerSource};

/// Number formats of a conversion, and where it writes to beside its target.
#[derive(Clone, Default)]
pub struct ConvertOptions {
    /// Number format of the experts; `None` keeps the source's.
    pub experts: Option<NumberFormat>,
    /// Number format of the resident weights of products; `None` keeps the source's.
    pub resident: Option<NumberFormat>,
    /// Number formats of single matrices, before the two above.
    pub mix: FormatMix,
    /// What the columns of the matrices matter, for those that are rounded.
    pub importance: Option<Arc<Importance>>,
    /// Number format of a second, smaller copy of every expert; `None` makes none.
    pub small_experts: Option<NumberFormat>,
    /// The image tower that the store gets, as it is.
    pub tower: Option<TowerSource>,
    /// Folder on another drive that gets every other expert of each layer; `None` leaves all in the store.
    pub stripe: Option<PathBuf>,
}
