//! Options of loading.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use larder_engine::Speculation;
use larder_policy::routing::{RoutingSpec, parse_quality};
use serde_json::{Map, Value};

use crate::settings::{SettingPart, renamed};
use crate::{EngineSettings, ModelOptions, Notices, Options};

/// The parts of an engine whose settings can be given.
const PARTS: u16 = SettingPart::Context.bit()
    | SettingPart::CacheSize.bit()
    | SettingPart::Cache.bit()
    | SettingPart::Routing.bit()
    | SettingPart::Measurement.bit()
    | SettingPart::Speculation.bit()
    | SettingPart::Reading.bit()
    | SettingPart::Compute.bit()
    | SettingPart::Kernels.bit()
    | SettingPart::Device.bit()
    | SettingPart::Vision.bit();

/// How a model is loaded: [settings](crate::settings::SETTINGS) by their names, and two folders. What is left out is as
/// for the command `larder run`.
#[derive(Clone)]
pub struct LoadOptions {
    /// Folder of downloaded models, for models by name; `models` in JSON.
    pub models: Option<PathBuf>,
    /// The user's cache folder, where the content of GGUF files is noted; `cache-folder` in JSON.
    pub cache_folder: Option<PathBuf>,
    /// All other options.
    pub settings: EngineSettings,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions { models: None, cache_folder: None, settings: EngineSettings::taking(PARTS) }
    }
}

impl LoadOptions {
    /// Parses a JSON object; no text is one without fields.
    pub fn from_json(json: &str) -> Result<Self> {
        let mut options = LoadOptions::default();
        let fields: Map<String, Value> = super::parse(json, "load")?;
        fields.iter().try_for_each(|(name, value)| options.set(name, value)).context("options to load")?;
        if options.settings.options.speculation == Speculation::Draft || options.settings.draft.is_some() {
            bail!("speculate: a draft model is for the command alone; use off, lookup, mtp or auto");
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, value: &Value) -> Result<()> {
        let Some(text) = text_of(value) else { return Ok(()) };
        let text = text.with_context(|| name.to_owned())?;
        match name {
            "models" => self.models = Some(text.into()),
            "cache-folder" => self.cache_folder = Some(text.into()),
            _ => self
                .settings
                .set(name, &text)
                .map_err(|why| anyhow!(moved(name, &text).unwrap_or_else(|| why.to_string())))?,
        }
        Ok(())
    }

    /// How the model is opened, with a receiver of notices.
    pub(crate) fn opening(&self, notices: Notices) -> ModelOptions {
        let (models_folder, cache_folder) = (self.models.clone(), self.cache_folder.clone());
        let (store_for_gguf, mtp) = (self.settings.store_for_gguf, self.settings.mtp());
        let mmproj = self.settings.mmproj.clone();
        ModelOptions { models_folder, cache_folder, store_for_gguf, mtp, mmproj, notices, ..ModelOptions::default() }
    }

    /// The options of the engine.
    pub(crate) fn engine(&self) -> Options {
        self.settings.options(self.settings.options.context)
    }
}

/// What an option of an earlier version is now.
pub(super) fn moved(name: &str, value: &str) -> Option<String> {
    let row = renamed(name)?;
    Some(format!("{name} is now {}: {:?}", row.new, row.value_of(value)))
}

/// A value as it would be typed; `None` for null.
fn text_of(value: &Value) -> Option<Result<String>> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(Ok(text.clone())),
        Value::Bool(_) | Value::Number(_) => Some(Ok(value.to_string())),
        _ => Some(Err(anyhow!("must be a text, a number, true or false"))),
    }
}

/// A routing strategy by its name, or the one that keeps to a budget of output loss.
pub(crate) fn routing_of(routing: Option<&str>, quality: Option<&str>) -> Result<RoutingSpec> {
    match (quality, routing) {
        (Some(_), Some(_)) => bail!("quality and routing cannot be given together"),
        (Some(quality), None) => parse_quality(quality).map_err(|e| anyhow!("quality {e}")),
        (None, Some(routing)) => routing.parse().context("routing"),
        (None, None) => Ok(RoutingSpec::default()),
    }
}
