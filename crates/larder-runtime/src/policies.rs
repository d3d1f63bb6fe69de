//! What policies need from the files of a model: trained weights of evictors, calibrations of routing strategies.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use larder_engine::{Calibration, EVICTOR_BYTES_MAX, EVICTOR_FILE, evictor_from_bytes};
use larder_policy::eviction::{EvictionSpec, PolicyInputs, PolicyNeeds};
use larder_policy::routing::RoutingSpec;

use crate::open::OpenModel;
use crate::options::Setting;

/// The inputs of an eviction policy: trained weights for `learned`.
pub fn policy_inputs(eviction: &EvictionSpec, model: &OpenModel, evictor: Option<&Path>) -> Result<PolicyInputs> {
    if eviction.needs() != PolicyNeeds::Evictor {
        return Ok(PolicyInputs::default());
    }
    let own = model.source().path().join(EVICTOR_FILE);
    if evictor.is_none() && !own.exists() {
        bail!(
            "{}: not found, and {} learned needs trained weights; make them with `larder lab train` or name a file with {}",
            own.display(),
            Setting::Eviction,
            Setting::Evictor
        );
    }
    let path = evictor.unwrap_or(&own);
    let evictor =
        evictor_from_bytes(&read_beside(path, EVICTOR_BYTES_MAX)?).map_err(|e| anyhow!("{} {e}", path.display()))?;
    Ok(PolicyInputs { evictor: Some(Arc::new(evictor)), ..PolicyInputs::default() })
}

/// Reads a regular file of at most `most` bytes.
fn read_beside(path: &Path, most: u64) -> Result<Vec<u8>> {
    let failed = || format!("{}: reading failed", path.display());
    let about = fs::metadata(path).with_context(failed)?;
    if !about.is_file() || about.len() > most {
        bail!("{} is too large, or not a regular file", path.display());
    }
    fs::read(path).with_context(failed)
}

/// The calibrated spread of each layer's router logits, if the strategy needs it.
pub fn deltas(spec: &RoutingSpec, model: &OpenModel) -> Result<Option<Vec<f32>>> {
    if !spec.needs_calibration() {
        return Ok(None);
    }
    let path = model.source().path().join(Calibration::FILE);
    if !path.exists() {
        let store = model.source().path().display();
        bail!("{}: not found; make it with `larder eval calibrate -m {store} TEXT`", path.display());
    }
    let blueprint = &model.blueprint;
    let found = read_beside(&path, Calibration::BYTES_MAX)?;
    let calibration = Calibration::from_bytes(&found, &blueprint.model_type, &blueprint.geometry)
        .map_err(|e| anyhow!("{} {e}", path.display()))?;
    Ok(Some(calibration.delta))
}
