//! Options of opening a model.

use std::path::PathBuf;

use larder_store::{MtpTensors, SourceOptions};

use crate::notices::Notices;

/// How a model is found and opened.
#[derive(Clone, Default)]
pub struct ModelOptions {
    /// Folder of downloaded models, for names on the Hugging Face hub; without it such names are refused.
    pub models_folder: Option<PathBuf>,
    /// The user's cache folder, where it is noted which content GGUF files have, and which experts of stores that
    /// cannot be written to are hot; without it the samples of such files are read at each start.
    pub cache_folder: Option<PathBuf>,
    /// Make a store beside a GGUF file the first time, so that its experts can be streamed.
    pub store_for_gguf: bool,
    /// Whether the model is used with its layer for multi-token prediction.
    pub mtp: MtpUse,
    /// A file with the image tower, in place of the model's own or of that beside a GGUF file.
    pub mmproj: Option<PathBuf>,
    /// Keys of the config that count as absent, although they are refused because they might change the result.
    pub ignored_keys: Vec<String>,
    /// Receives the notices of opening, starting and running this model.
    pub notices: Notices,
}

impl ModelOptions {
    /// How the source of a model is opened.
    pub(crate) fn source(&self) -> SourceOptions {
        SourceOptions { mtp: self.mtp.tensors(), ignored_keys: self.ignored_keys.clone() }
    }
}

/// Whether a model is used with its layer for multi-token prediction (MTP).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum MtpUse {
    /// Never; a store that has it is as one without it.
    #[default]
    Never,
    /// Where a store has it.
    IfStored,
    /// Always: a model without it is refused.
    Always,
}

impl MtpUse {
    /// Whether the tensors of the layer are read from a checkpoint or a GGUF file, which a conversion may follow.
    fn tensors(self) -> MtpTensors {
        match self {
            MtpUse::Always => MtpTensors::Kept,
            MtpUse::Never | MtpUse::IfStored => MtpTensors::LeftOut,
        }
    }
}
