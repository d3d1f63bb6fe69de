//! Trained weights of either form, checked when they are read.

use std::sync::Arc;

use super::arrays::Arrays;
use super::crosslayer::{self, Crosslayer};
use super::flashmoe::{self, Flashmoe};
use super::{EvictorError, MoeSize, Scorer};

/// The value of `format` in the metadata of weights.
pub const FORMAT: &str = "larder-evictor";
/// The value of `version` in the metadata of weights.
pub const VERSION: &str = "1";
/// The most experts, over all layers, that weights may be for: it bounds the tables.
const EXPERTS_MAX: usize = 1 << 16;

/// Trained weights.
pub struct Evictor {
    size: MoeSize,
    form: Form,
}

enum Form {
    Crosslayer(Arc<crosslayer::CrosslayerWeights>),
    Flashmoe(Arc<flashmoe::FlashmoeWeights>),
}

impl Evictor {
    /// From the content of a file of weights; everything is checked here.
    pub fn from_arrays(arrays: &Arrays) -> Result<Self, EvictorError> {
        expect(arrays, "format", FORMAT)?;
        expect(arrays, "version", VERSION)?;
        let size = size(arrays)?;
        let form = match arrays.text("form")? {
            crosslayer::FORM => Form::Crosslayer(Arc::new(crosslayer::CrosslayerWeights::from_arrays(size, arrays)?)),
            flashmoe::FORM => Form::Flashmoe(Arc::new(flashmoe::FlashmoeWeights::from_arrays(size, arrays)?)),
            other => {
                let wanted = format!("{}' or '{}", crosslayer::FORM, flashmoe::FORM);
                return Err(EvictorError::Unsupported { key: "form", found: other.to_owned(), wanted });
            }
        };
        Ok(Evictor { size, form })
    }

    /// The size of the model that the weights are for.
    pub fn size(&self) -> MoeSize {
        self.size
    }

    /// The name of the network form.
    pub fn form(&self) -> &'static str {
        match self.form {
            Form::Crosslayer(_) => crosslayer::FORM,
            Form::Flashmoe(_) => flashmoe::FORM,
        }
    }

    pub(super) fn scorer(&self) -> Box<dyn Scorer> {
        match &self.form {
            Form::Crosslayer(weights) => Box::new(Crosslayer::new(weights.clone())),
            Form::Flashmoe(weights) => Box::new(Flashmoe::new(weights.clone())),
        }
    }
}

fn expect(arrays: &Arrays, key: &'static str, wanted: &str) -> Result<(), EvictorError> {
    let found = arrays.text(key)?;
    if found != wanted {
        return Err(EvictorError::Unsupported { key, found: found.to_owned(), wanted: wanted.to_owned() });
    }
    Ok(())
}

fn size(arrays: &Arrays) -> Result<MoeSize, EvictorError> {
    let [layers, experts, top_k] = [arrays.count("layers")?, arrays.count("experts")?, arrays.count("top_k")?];
    let all = layers.saturating_mul(experts);
    if all == 0 || all > EXPERTS_MAX || top_k == 0 || top_k > experts {
        return Err(EvictorError::MoeSize { layers, experts, top_k });
    }
    Ok(MoeSize { rows: layers, experts, top_k })
}
