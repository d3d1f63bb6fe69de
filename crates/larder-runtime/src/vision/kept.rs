//! The tower that a conversion keeps.

use std::path::Path;

use anyhow::Result;
use larder_core::Blueprint;
use larder_store::{Source, TowerSource};

use super::tower::find_tower;
use crate::notices::sentence;

/// The note about a model whose tower cannot encode.
pub const UNKNOWN_TOWER: &str = "runs as a model of text: its image tower is of a kind that larder does not know";

/// The image tower that a store of the source gets: that of the `mmproj` file if one is named. Where there is none that
/// is of use, a note may say why.
pub fn kept_tower(
    source: &dyn Source,
    mmproj: Option<&Path>,
    blueprint: &Blueprint,
) -> Result<(Option<TowerSource>, Option<String>)> {
    match find_tower(source, mmproj, blueprint) {
        Ok(Some(tower)) => Ok((Some(tower.source), None)),
        Ok(None) => Ok((None, source.tower()?.map(|_| UNKNOWN_TOWER.to_owned()))),
        // A text needs no tower.
        Err(error) if mmproj.is_none() => {
            Ok((None, Some(format!("the image tower is not kept: {}", sentence(&error)))))
        }
        Err(error) => Err(error),
    }
}
