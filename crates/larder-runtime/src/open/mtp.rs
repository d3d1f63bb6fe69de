//! Whether a model is used with its layer for multi-token prediction.

use std::path::Path;

use anyhow::{Result, bail};
use larder_model::mtp_layers;
use larder_store::{MtpTensors, Source, Store};

use super::options::MtpUse;
use crate::notices::Setting;

/// Opens the store at `path`, of which shards may be missing, with or without the layer.
pub(crate) fn open_store(path: &Path, mtp: MtpUse) -> Result<Store> {
    let store = Store::open_partial(path)?;
    match (mtp, store.manifest().mtp()) {
        (MtpUse::Never, _) => Ok(store.without_mtp()),
        (MtpUse::Always, MtpTensors::LeftOut) => refuse(&store),
        _ => Ok(store),
    }
}

/// Refuses a store without the layer.
fn refuse(store: &Store) -> Result<Store> {
    let (path, setting) = (store.path().display(), Setting::Speculate);
    if mtp_layers(store.config()) > 0 {
        bail!(
            "{path}: was converted without its layer for multi-token prediction, which {setting} mtp needs; convert it again with \
             `larder convert --mtp`"
        );
    }
    bail!(
        "{path}: has no layer for multi-token prediction, which {setting} mtp needs; if its source has one, convert that again with \
         `larder convert --mtp`"
    )
}
