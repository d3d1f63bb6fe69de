//! From what a person calls a model to something that runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_core::{Blueprint, TensorSpec};
use larder_engine::{ChatTemplate, GenerationConfig, Tokenizer, TokenizerConfig};
use larder_model::{AllResident, ComputeContext, Decoder};
use larder_store::reader::Slot;
use larder_store::{
    Assembler, CONVERSION_STATE, ExpertSource, MANIFEST_FILE, Source, Store, StoreError, StoreErrorKind,
    check_resident, open_source,
};
use serde_json::Value;

use crate::{load, models};

/// Where the demo model is in the project.
const DEMO: &str = "models/demo";

/// The embedding, of which a token takes a row.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// The demo model: in the present folder or above it, else above the program itself.
pub fn default_model() -> PathBuf {
    let starts = [std::env::current_dir(), std::env::current_exe()];
    let above = |start: &PathBuf| {
        start.ancestors().map(|folder| folder.join(DEMO)).find(|demo| demo.join(MANIFEST_FILE).exists())
    };
    starts.iter().flatten().find_map(above).unwrap_or_else(|| DEMO.into())
}

/// What a model is called unless somebody says otherwise: its folder's or file's own name.
pub fn model_name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

enum ModelForm {
    Store(Arc<Store>),
    /// A checkpoint folder or GGUF file, used as it is.
    Source(Box<dyn Source>),
}

/// A model on disk, and what its config says.
pub struct OpenModel {
    form: ModelForm,
    /// What the config says.
    pub blueprint: Blueprint,
}

impl ModelForm {
    fn source(&self) -> &dyn Source {
        match self {
            ModelForm::Store(store) => store.as_ref(),
            ModelForm::Source(source) => source.as_ref(),
        }
    }
}

impl OpenModel {
    /// Opens a store, which may lack shards as long as nobody needs them, a checkpoint folder or a GGUF file, or a model by
    /// its name on the hub.
    pub fn open(path: &Path) -> Result<Self> {
        match models::hub_name(path) {
            Some(name) if path != Path::new(DEMO) => Self::open_path(&models::fetch_if_missing(&name)?),
            _ => Self::open_path(path),
        }
    }

    /// As [`Self::open`], to write many tokens: of a GGUF file a store is made beside it unless `without_store`.
    pub fn open_to_run(path: &Path, without_store: bool) -> Result<Self> {
        match without_store || !models::is_gguf(path) {
            true => Self::open(path),
            false => Self::open_path(&models::store_for_gguf(path)?),
        }
    }

    fn open_path(path: &Path) -> Result<Self> {
        let form = match path.join(MANIFEST_FILE).exists() {
            true => ModelForm::Store(Arc::new(Store::open_partial(path)?)),
            false if path.join(CONVERSION_STATE).exists() => {
                let what = "is a store whose conversion has not finished; run the same `larder convert` again";
                return Err(StoreError::new(StoreErrorKind::Missing, path, what).into());
            }
            false if !path.exists() && path == Path::new(DEMO) => {
                let what = "is the demo model, which is not here; name a model with -m";
                return Err(StoreError::new(StoreErrorKind::Missing, path, what).into());
            }
            false => ModelForm::Source(open_source(path)?),
        };
        let source = form.source();
        let blueprint = blueprint_of(source)?;
        match &form {
            ModelForm::Store(store) => store.check(&blueprint)?,
            ModelForm::Source(source) => check_resident(source.as_ref(), &blueprint)?,
        }
        Ok(OpenModel { form, blueprint })
    }

    /// Its files, as named tensors and sidecars.
    pub fn source(&self) -> &dyn Source {
        self.form.source()
    }

    /// The store, if it is one.
    pub fn store(&self) -> Option<&Arc<Store>> {
        match &self.form {
            ModelForm::Store(store) => Some(store),
            ModelForm::Source(_) => None,
        }
    }

    /// Its experts, in the formats in which they are stored.
    pub fn experts(&self) -> Result<ModelExperts<'_>> {
        match &self.form {
            ModelForm::Store(store) => Ok(ModelExperts::Store(store)),
            ModelForm::Source(source) => {
                let assembler = Assembler::new(source.as_ref(), &self.blueprint, None)?;
                Ok(ModelExperts::Source(Box::new(assembler)))
            }
        }
    }

    /// Bytes of its resident weights and of all its experts.
    pub fn bytes(&self) -> Result<(u64, u64)> {
        let resident: u64 = self.blueprint.resident.iter().map(|t| self.resident_bytes(t)).sum();
        let experts = self.experts()?;
        let experts = experts.as_dyn();
        let geometry = &self.blueprint.geometry;
        let layers = geometry.moe_layers.iter().map(|l| (experts.layout(*l).bytes * geometry.experts) as u64);
        Ok((resident, layers.sum()))
    }

    /// Bytes of the resident weights that every token reads: all of them, but of an embedding that is not the head as
    /// well only a row.
    pub fn resident_bytes_per_token(&self) -> Result<u64> {
        let embedding = self.source().meta(EMBEDDING).filter(|_| self.has_own_head());
        let (resident, _) = self.bytes()?;
        Ok(resident - embedding.map_or(0, |m| m.bytes as u64))
    }

    /// Bytes of each resident weight that a device keeps, which products have, and of those that stay in memory: small
    /// ones, and the embedding, also where it is the head as well.
    pub fn resident_on_device(&self) -> Result<(Vec<u64>, u64)> {
        let (all, _) = self.bytes()?;
        let own_head = self.has_own_head();
        let on_device = |t: &&TensorSpec| t.product && (t.name != EMBEDDING || !own_head);
        let on_device: Vec<u64> =
            self.blueprint.resident.iter().filter(on_device).map(|t| self.resident_bytes(t)).collect();
        let kept = if own_head { 0 } else { self.source().meta(EMBEDDING).map_or(0, |m| m.bytes as u64) };
        let in_memory = all - on_device.iter().sum::<u64>() + kept;
        Ok((on_device, in_memory))
    }

    /// Bytes of a resident weight once it is loaded.
    fn resident_bytes(&self, spec: &TensorSpec) -> u64 {
        self.source().meta(&spec.name).map_or(0, |stored| spec.loaded_bytes(stored) as u64)
    }

    /// Whether the head is a matrix of its own, and not the embedding.
    fn has_own_head(&self) -> bool {
        self.blueprint.resident.iter().any(|t| t.name == "lm_head.weight")
    }

    /// The decoder with its resident weights, computing by `compute`.
    pub fn decoder(&self, compute: &Arc<ComputeContext>) -> Result<Decoder> {
        self.source().advise_will_need();
        Decoder::load(self.source().config(), self.source(), compute.clone())
            .with_context(|| display(self.source().path()))
    }

    /// Every expert, read into memory, to be computed by `compute`.
    pub fn all_resident(&self, compute: &Arc<ComputeContext>) -> Result<AllResident<Slot>> {
        match &self.form {
            ModelForm::Store(store) => load::from_store(store, compute),
            ModelForm::Source(_) => load::from_source(self.experts()?.as_dyn(), &self.blueprint.geometry, compute),
        }
    }

    /// The tokenizer and what belongs to it.
    pub fn text_codec(&self) -> Result<TextCodec> {
        let source = self.source();
        let path = source.path();
        let Some(json) = source.sidecar("tokenizer.json")? else {
            bail!("{}: has no tokenizer.json, so it cannot read or write text", path.display());
        };
        let config = match source.sidecar("tokenizer_config.json")? {
            Some(bytes) => TokenizerConfig::from_bytes(&bytes).with_context(|| display(path))?,
            None => TokenizerConfig::default(),
        };
        let jinja = source.sidecar("chat_template.jinja")?;
        Ok(TextCodec {
            tokenizer: Tokenizer::from_bytes(&json, &config).with_context(|| display(path))?,
            template: ChatTemplate::new(jinja.as_deref(), &config).with_context(|| display(path))?,
        })
    }

    /// How the model's makers want it to write, and which tokens end its texts.
    pub fn generation(&self) -> Result<GenerationConfig> {
        let bytes = self.source().sidecar("generation_config.json")?;
        let config: &Value = self.source().config();
        GenerationConfig::from_bytes(bytes.as_deref(), config.to_string().as_bytes())
            .with_context(|| display(self.source().path()))
    }
}

/// What the config of a source says, with the names that the source has for its experts.
pub fn blueprint_of(source: &dyn Source) -> Result<Blueprint> {
    let mut blueprint = larder_model::blueprint(source.config()).with_context(|| display(source.path()))?;
    if let Some(names) = source.expert_names() {
        blueprint.experts = names;
    }
    Ok(blueprint)
}

/// The experts of a model, wherever they are.
pub enum ModelExperts<'a> {
    /// In shards.
    Store(&'a Store),
    /// Put together from a checkpoint's tensors.
    Source(Box<Assembler<'a>>),
}

impl ModelExperts<'_> {
    /// As the seam that readers of experts share.
    pub fn as_dyn(&self) -> &dyn ExpertSource {
        match self {
            ModelExperts::Store(store) => *store,
            ModelExperts::Source(assembler) => assembler.as_ref(),
        }
    }
}

/// What turns text into tokens and back.
pub struct TextCodec {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, if the model has one.
    pub template: Option<ChatTemplate>,
}

fn display(path: &Path) -> String {
    path.display().to_string()
}
