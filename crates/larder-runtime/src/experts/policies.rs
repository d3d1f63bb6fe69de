//! What policies need from the files of a model: trained weights of evictors, and the calibration of routing
//! strategies.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use larder_engine::{EVICTOR_BYTES_MAX, EVICTOR_FILE, QualityCalibration, evictor_from_bytes};
use larder_os::read_regular;
use larder_policy::eviction::{EvictionSpec, PolicyInputs, PolicyNeeds};
use larder_policy::routing::{DialTable, Router, RoutingSpec, StrategyInputs};

use crate::notices::{Notice, Setting};
use crate::open::OpenModel;

/// The inputs of an eviction policy: trained weights for `learned`, from the file `evictor` or else from the model's
/// folder.
pub fn policy_inputs(eviction: &EvictionSpec, model: &OpenModel, evictor: Option<&Path>) -> Result<PolicyInputs> {
    if eviction.needs() != PolicyNeeds::Evictor {
        return Ok(PolicyInputs::default());
    }
    let own = model.source().path().join(EVICTOR_FILE);
    let found = match evictor {
        Some(file) => Some(read_file(file, EVICTOR_BYTES_MAX)?),
        None => own_sidecar(model, EVICTOR_FILE, EVICTOR_BYTES_MAX)?,
    };
    let Some(found) = found else {
        bail!(
            "{}: not found, and {} needs trained weights; make them with `larder lab train` or name a file with {}",
            own.display(),
            Setting::Eviction.with("learned"),
            Setting::Evictor.with("FILE")
        );
    };
    let evictor = evictor_from_bytes(&found).map_err(|e| anyhow!("{} {e}", evictor.unwrap_or(&own).display()))?;
    Ok(PolicyInputs { evictor: Some(Arc::new(evictor)), ..PolicyInputs::default() })
}

/// A file in the model's folder that was written after it; that of a store must have been made for this store.
fn own_sidecar(model: &OpenModel, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
    let path = model.source().path().join(name);
    match model.store() {
        Some(store) => Ok(store.added_sidecar(name, most)?),
        None if path.exists() => read_file(&path, most).map(Some),
        None => Ok(None),
    }
}

/// Reads a regular file of at most `most` bytes.
fn read_file(path: &Path, most: u64) -> Result<Vec<u8>> {
    read_regular(path, most).with_context(|| format!("{}: reading failed", path.display()))
}

/// A routing strategy for a model with experts in `rows` layers, with what it needs of the model's files.
pub fn make_router(spec: &RoutingSpec, rows: usize, model: &OpenModel) -> Result<Box<dyn Router>> {
    let (deltas, dial) = (deltas(spec, model)?, dial_table(spec, model)?);
    Ok(spec.make(&StrategyInputs { rows, deltas: deltas.as_deref(), dial: dial.as_ref() })?)
}

/// The calibrated spread of each layer's router logits, if the strategy needs it.
fn deltas(spec: &RoutingSpec, model: &OpenModel) -> Result<Option<Vec<f32>>> {
    if !spec.needs_calibration() {
        return Ok(None);
    }
    needed_calibration(model, "delta=calibrated").map(|calibration| Some(calibration.delta))
}

/// The calibrated losses and settings of the model, if the strategy is `quality`.
fn dial_table(spec: &RoutingSpec, model: &OpenModel) -> Result<Option<DialTable>> {
    if spec.quality_budget().is_none() {
        return Ok(None);
    }
    needed_calibration(model, Setting::Quality).map(|calibration| Some(calibration.table()))
}

/// The calibration of a model, which `needed_by` cannot do without.
fn needed_calibration(model: &OpenModel, needed_by: impl Display) -> Result<QualityCalibration> {
    let store = model.source().path().display();
    let (name, made) = (QualityCalibration::FILE, model.quality_calibration()?);
    made.ok_or_else(|| {
        anyhow!("{store}: has no {name}, which {needed_by} needs; make it with `larder tune -m {store} TEXT`")
    })
}

impl OpenModel {
    /// The calibration of routing strategies, if `larder tune` has written one.
    pub fn quality_calibration(&self) -> Result<Option<QualityCalibration>> {
        let Some(found) = own_sidecar(self, QualityCalibration::FILE, QualityCalibration::BYTES_MAX)? else {
            return Ok(None);
        };
        let (path, blueprint) = (self.source().path().join(QualityCalibration::FILE), &self.blueprint);
        let calibration = QualityCalibration::from_bytes(&found, &blueprint.model_type, &blueprint.geometry);
        calibration.map(Some).map_err(|e| anyhow!("{} {e}; make it anew with `larder tune`", path.display()))
    }

    /// The same where nothing depends on it: a file that cannot be used is a notice.
    pub fn usable_quality_calibration(&self) -> Option<QualityCalibration> {
        self.quality_calibration().unwrap_or_else(|why| {
            self.notices().send(Notice::Model(format!("{why:#}; λ is shown without its cost")));
            None
        })
    }
}
