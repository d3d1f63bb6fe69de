//! A model on disk: a store, a checkpoint folder, a GGUF file or a name on the hub.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use larder_core::{Blueprint, ExpertLayout, NumberFormat, TensorSpec};
use larder_engine::ImageMarks;
use larder_model::{AllResident, ComputeContext, Decoder, row_cache_bytes, takes_images};
use larder_store::reader::Slot;
use larder_store::{
    Assembler, CONVERSION_STATE, ExpertSource, MANIFEST_FILE, Source, Store, StoreError, StoreErrorKind, WELCOME,
    check_resident, mmproj_beside, open_source_with, read_small,
};
use larder_text::{ChatTemplate, GenerationConfig, Tokenizer, Welcome};

use super::options::ModelOptions;
use super::sources::{TextCodec, blueprint_of, check_ignored, display, generation_of, text_codec_of, tokenizer_config};
use super::{models, mtp, preload};
use crate::notices::{Notice, Notices, PreloadRates};
use crate::vision::{FoundTower, UNKNOWN_TOWER, find_tower, image_marks};

/// The embedding matrix, of which a token reads one row.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Most bytes of a [`WELCOME`] file.
const WELCOME_BYTES: u64 = 16 << 10;

/// The default name of a model: that of its folder or file.
pub fn model_name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

/// Bytes of weights, with their number formats.
pub type FormatBytes = Vec<(NumberFormat, u64)>;

enum ModelForm {
    Store(Arc<Store>),
    /// A checkpoint folder or GGUF file, used directly.
    Source(Box<dyn Source>),
}

/// Room in VRAM for what all values of a matrix are multiplied with, where its format has such a scale: 256 parts of a
/// tensor may have one each, which begins a line of 256 bytes.
const SCALES_BYTES: u64 = 64 << 10;

/// A model on disk with its config. Nothing is loaded yet.
pub struct OpenModel {
    form: ModelForm,
    notices: Notices,
    /// The user's cache folder.
    cache_folder: Option<PathBuf>,
    /// The file with the image tower, if one was named.
    mmproj: Option<PathBuf>,
    /// The file with an image tower beside the GGUF file that a store was made of.
    beside: Option<PathBuf>,
    /// Architecture and sizes, from the config.
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
    /// Opens a store (shards may be missing as long as they are not used), a checkpoint folder, a GGUF file, or a model
    /// by its name on the hub.
    pub fn open(path: &Path, options: &ModelOptions) -> Result<Self> {
        let ModelOptions { models_folder, store_for_gguf, notices, .. } = options;
        let beside = if *store_for_gguf && models::is_gguf(path) { mmproj_beside(path) } else { None };
        let path = match models::hub_name(path) {
            Some(name) => models::fetch_if_missing(&name, models_folder.as_deref(), &options.source(), notices)?,
            None if !path.exists() => return Err(missing(path)),
            None if *store_for_gguf && models::is_gguf(path) => models::store_for_gguf(path, options)?,
            None => path.to_owned(),
        };
        let model = Self::open_path(&path, options)?;
        let (cache_folder, mmproj) = (options.cache_folder.clone(), options.mmproj.clone());
        Ok(OpenModel { cache_folder, mmproj, beside, ..model })
    }

    fn open_path(path: &Path, options: &ModelOptions) -> Result<Self> {
        let notices = options.notices.clone();
        let form = match path.join(MANIFEST_FILE).exists() {
            true => ModelForm::Store(Arc::new(mtp::open_store(path, options.mtp)?.ignoring(&options.ignored_keys))),
            false if path.join(CONVERSION_STATE).exists() => {
                let what = "is a store whose conversion is not finished; run the same `larder convert` again";
                return Err(StoreError::new(StoreErrorKind::Missing, path, what).into());
            }
            false => ModelForm::Source(open_source_with(path, options.source())?),
        };
        let source = form.source();
        check_ignored(source, &options.ignored_keys)?;
        let blueprint = blueprint_of(source)?;
        match &form {
            ModelForm::Store(store) => store.check(&blueprint)?,
            ModelForm::Source(source) => check_resident(source.as_ref(), &blueprint)?,
        }
        if source.tower().is_ok_and(|tower| tower.is_some()) && matches!(find_tower(source, None, &blueprint), Ok(None))
        {
            notices.send(Notice::Model(UNKNOWN_TOWER.to_owned()));
        }
        source.notes().into_iter().for_each(|note| notices.send(Notice::Model(note)));
        if let ModelForm::Store(store) = &form {
            store.drive_notes().into_iter().for_each(|note| notices.send(Notice::Drive(note)));
            let notices = notices.clone();
            store.drive_log().send_to(move |note| notices.send(Notice::Drive(note.to_owned())));
        }
        Ok(OpenModel { form, notices, cache_folder: None, mmproj: None, beside: None, blueprint })
    }

    /// The same model, whose engines send no notices.
    pub fn without_notices(self) -> Self {
        OpenModel { notices: Notices::default(), ..self }
    }

    /// Where notices about this model go.
    pub(crate) fn notices(&self) -> &Notices {
        &self.notices
    }

    /// The user's cache folder, if it may be used.
    pub(crate) fn cache_folder(&self) -> Option<&Path> {
        self.cache_folder.as_deref()
    }

    /// The tokens that stand for images in texts of this model; `None` if there are none.
    pub fn image_marks(&self, tokenizer: &Tokenizer) -> Option<ImageMarks> {
        image_marks(self.source().config(), tokenizer)
    }

    /// The image tower; `None` if the model has none that can encode.
    pub fn tower(&self) -> Result<Option<FoundTower>> {
        let found = find_tower(self.source(), self.mmproj.as_deref(), &self.blueprint)?;
        let beside = self.beside.as_deref().filter(|_| found.is_none());
        match beside.filter(|_| takes_images(self.source().config()).unwrap_or(false)) {
            Some(beside) => find_tower(self.source(), Some(beside), &self.blueprint),
            None => Ok(found),
        }
    }

    /// Whether a file with the image tower was named.
    pub(crate) fn names_tower(&self) -> bool {
        self.mmproj.is_some()
    }

    /// The model's tensors and sidecars.
    pub fn source(&self) -> &dyn Source {
        self.form.source()
    }

    /// The store; `None` for a checkpoint or a GGUF file.
    pub fn store(&self) -> Option<&Arc<Store>> {
        match &self.form {
            ModelForm::Store(store) => Some(store),
            ModelForm::Source(_) => None,
        }
    }

    /// Identifies the content: the hash of a store, or of another source its identity, for which samples of all tensors
    /// are read.
    pub fn identity(&self) -> Result<String> {
        match &self.form {
            ModelForm::Store(store) => Ok(store.hash().to_owned()),
            ModelForm::Source(source) => Ok(larder_store::identity(source.as_ref(), &self.blueprint)?),
        }
    }

    /// The experts, in their stored number formats.
    pub fn experts(&self) -> Result<ModelExperts<'_>> {
        match &self.form {
            ModelForm::Store(store) => Ok(ModelExperts::Store(store)),
            ModelForm::Source(source) => {
                let assembler = Assembler::new(source.as_ref(), &self.blueprint, None)?;
                Ok(ModelExperts::Source(Box::new(assembler)))
            }
        }
    }

    /// Bytes of the resident weights and of all experts.
    pub fn bytes(&self) -> Result<(u64, u64)> {
        let resident: u64 = self.blueprint.resident.iter().map(|t| self.resident_bytes(t)).sum();
        let experts = self.experts()?;
        let experts = experts.as_dyn();
        let geometry = &self.blueprint.geometry;
        let layers = geometry.moe_layers.iter().map(|l| (experts.layout(*l).bytes * geometry.experts) as u64);
        Ok((resident, layers.sum()))
    }

    /// Weights in all: those of the resident tensors and of the matrices of all experts.
    pub fn parameters(&self) -> Result<u64> {
        let elements = |shape: &[usize]| shape.iter().map(|n| *n as u64).product::<u64>();
        let metas =
            self.blueprint.resident.iter().filter_map(|t| Some(self.source().rows(&t.name)?.meta().shape.clone()));
        let geometry = &self.blueprint.geometry;
        let experts = self.experts()?;
        let of_layer = |layer| {
            let matrices = experts.as_dyn().layout(layer).kinds().named().count();
            (matrices * geometry.experts * geometry.hidden * geometry.inter) as u64
        };
        let resident: u64 = metas.map(|shape| elements(&shape)).sum();
        Ok(resident + geometry.moe_layers.iter().map(|layer| of_layer(*layer)).sum::<u64>())
    }

    /// Bytes of the resident weights that every token reads: all of them but the embedding, unless it is the output
    /// head too.
    pub fn resident_bytes_per_token(&self) -> Result<u64> {
        let by_row = self.blueprint.resident.iter().filter(|t| t.by_row).map(|t| self.resident_bytes(t));
        let (resident, _) = self.bytes()?;
        Ok(resident - by_row.sum::<u64>())
    }

    /// The weights that a step multiplies with: the resident ones, and one expert of each MoE row.
    pub fn product_bytes(&self) -> Result<(FormatBytes, Vec<FormatBytes>)> {
        let products = self.blueprint.resident.iter().filter(|t| t.product && !t.by_row);
        let stored = products.filter_map(|t| Some((t, self.source().meta(&t.name)?.kind)));
        let loaded = stored.map(|(t, kind)| (if t.by_head { NumberFormat::F16 } else { kind }, self.resident_bytes(t)));
        let experts = self.experts()?;
        let layers = self.blueprint.geometry.moe_layers.iter().map(|layer| experts.as_dyn().layout(*layer));
        let parts = |layout: &ExpertLayout| layout.matrices().map(|part| (part.kind, part.bytes as u64)).collect();
        Ok((loaded.collect(), layers.map(parts).collect()))
    }

    /// Bytes of the resident matrices that go to a device, and of those that stay in memory: small tensors, and
    /// the embedding even if it is the output head too.
    pub fn resident_on_device(&self) -> Result<(u64, u64)> {
        let (all, _) = self.bytes()?;
        let on_device: u64 = self.device_weights().map(|t| self.resident_bytes(t)).sum();
        let kept = if self.has_own_head() { 0 } else { self.source().meta(EMBEDDING).map_or(0, |m| m.bytes as u64) };
        Ok((on_device, all - on_device + kept))
    }

    /// The most bytes that a device leaves free between its matrices, which it aligns to `align` bytes.
    pub fn padding_on_device(&self, align: u64) -> u64 {
        let of_tensor = |spec: &TensorSpec| match (spec.pieces as u64, self.resident_bytes(spec)) {
            (1, bytes) => bytes.next_multiple_of(align) - bytes,
            // Pieces need not be equal.
            (pieces, _) => pieces * align,
        };
        self.device_weights().map(of_tensor).sum()
    }

    /// Bytes of the embedding of tokens, and of the experts that they decide on, on a device with async steps,
    /// beside the output head; `None` if they do not.
    pub fn embedding_bytes_on_device(&self) -> Option<u64> {
        let bytes =
            || if self.has_own_head() { self.source().meta(EMBEDDING).map(|m| m.bytes as u64) } else { Some(0) };
        let embedding = if self.blueprint.runs_ahead { bytes() } else { None };
        embedding.map(|bytes| bytes + self.blueprint.by_token_bytes as u64)
    }

    /// Room on a device for the scales of these matrices.
    pub fn scale_bytes_on_device(&self) -> u64 {
        let stored = self.device_weights().filter_map(|t| self.source().meta(&t.name));
        stored.filter(|stored| stored.kind.has_matrix_scale()).count() as u64 * SCALES_BYTES
    }

    /// The resident weights that a device keeps.
    fn device_weights(&self) -> impl Iterator<Item = &TensorSpec> {
        self.blueprint.resident.iter().filter(|t| t.on_device && !t.by_row)
    }

    /// Bytes of a resident weight after loading; of a matrix that stays on the SSD, those of its cache.
    fn resident_bytes(&self, spec: &TensorSpec) -> u64 {
        if let Some(rows) = self.source().rows(&spec.name).filter(|_| spec.by_row) {
            return row_cache_bytes(rows.as_ref()) as u64;
        }
        self.source().meta(&spec.name).map_or(0, |stored| spec.loaded_bytes(stored) as u64)
    }

    /// Whether the output head is a matrix of its own, not the embedding.
    fn has_own_head(&self) -> bool {
        self.blueprint.resident.iter().any(|t| t.name == "lm_head.weight")
    }

    /// Loads the decoder with the resident weights.
    pub fn decoder(&self, compute: &Arc<ComputeContext>) -> Result<Decoder> {
        // Each weight is read once: copies in the page cache would take memory that the plan does not count.
        self.source().use_direct_io();
        Decoder::load(self.source().config(), self.source(), compute.clone())
            .with_context(|| display(self.source().path()))
    }

    /// Loads all experts into memory.
    pub fn all_resident(&self, compute: &Arc<ComputeContext>) -> Result<AllResident<Slot>> {
        let (experts, rates) = self.load_experts(compute)?;
        rates.into_iter().for_each(|rates| self.notices.send(Notice::Preloaded(rates)));
        Ok(experts)
    }

    /// As [`all_resident`](Self::all_resident), and how fast a store was.
    pub(crate) fn load_experts(
        &self,
        compute: &Arc<ComputeContext>,
    ) -> Result<(AllResident<Slot>, Option<PreloadRates>)> {
        match &self.form {
            ModelForm::Store(store) => {
                let (experts, rates) = preload::from_store(store, compute, &self.notices)?;
                Ok((experts, Some(rates)))
            }
            ModelForm::Source(_) => {
                let (experts, geometry) = (self.experts()?, &self.blueprint.geometry);
                Ok((preload::from_source(experts.as_dyn(), geometry, compute, &self.notices)?, None))
            }
        }
    }

    /// The tokenizer and the chat template.
    pub fn text_codec(&self) -> Result<TextCodec> {
        let path = self.source().path();
        text_codec_of(self.source())?
            .with_context(|| format!("{}: has no tokenizer.json, which is needed for text", path.display()))
    }

    /// The tokenizer, if the model has one.
    pub(crate) fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        Ok(text_codec_of(self.source())?.map(|codec| codec.tokenizer))
    }

    /// A chat template in place of the model's, with the model's special tokens.
    pub fn other_template(&self, jinja: &[u8]) -> Result<ChatTemplate> {
        ChatTemplate::new(Some(jinja), &tokenizer_config(self.source())?)?.context("the template is empty")
    }

    /// The recommended sampling parameters and the end-of-text tokens.
    pub fn generation(&self) -> Result<GenerationConfig> {
        generation_of(self.source())
    }

    /// A store's invitation to a first message, if it has one.
    pub fn welcome(&self) -> Result<Option<Welcome>> {
        let ModelForm::Store(store) = &self.form else { return Ok(None) };
        let Some(bytes) = read_small(&store.path().join(WELCOME), WELCOME_BYTES)? else { return Ok(None) };
        Welcome::from_bytes(&bytes).map(Some).with_context(|| display(store.path()))
    }
}

/// The error of a path that leads nowhere.
fn missing(path: &Path) -> anyhow::Error {
    let what = "there is no such file, folder or downloaded model; `larder list` shows the models that are here, and `larder pull \
                ORG/NAME` downloads one";
    StoreError::new(StoreErrorKind::Missing, path, what).into()
}

/// The experts of a model, in a store or not.
pub enum ModelExperts<'a> {
    /// Shards of a store.
    Store(&'a Store),
    /// Assembled from a checkpoint's tensors.
    Source(Box<Assembler<'a>>),
}

impl ModelExperts<'_> {
    /// The trait object that readers of experts take.
    pub fn as_dyn(&self) -> &dyn ExpertSource {
        match self {
            ModelExperts::Store(store) => *store,
            ModelExperts::Source(assembler) => assembler.as_ref(),
        }
    }
}
