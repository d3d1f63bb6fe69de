//! The eyes of an engine.

use std::sync::Arc;

use anyhow::Result;
use larder_engine::Sight;
use larder_text::Tokenizer;

use super::InferenceEngine;
use crate::notices::{Setting, sentence};
use crate::open::OpenModel;
use crate::options::VisionUse;
use crate::vision::seeing_models;

impl InferenceEngine {
    /// The eyes of this engine, which turn pictures into images of prompts; `None` if the model does not see, or shall
    /// not ([`blindness`] says why). It is made once for an engine: the memory plan has one tower. The tower is loaded
    /// now if that is asked for, else with the first picture.
    pub fn sight(&self, model: &OpenModel, tokenizer: &Tokenizer) -> Result<Option<Arc<dyn Sight>>> {
        if self.options.vision.tower == VisionUse::Off || !self.decoder.takes_images() {
            return Ok(None);
        }
        self.open_sight(model, tokenizer)
    }

    #[cfg(feature = "vision")]
    fn open_sight(&self, model: &OpenModel, tokenizer: &Tokenizer) -> Result<Option<Arc<dyn Sight>>> {
        use crate::vision::{ModelSight, image_marks};

        let tower = match model.tower() {
            Ok(tower) => tower,
            // A text needs no tower.
            Err(_) if !model.names_tower() => None,
            Err(error) => return Err(error),
        };
        let (Some(tower), Some(marks)) = (tower, image_marks(model.source().config(), tokenizer)) else {
            return Ok(None);
        };
        let options = &self.options.vision;
        let (images, pool) = ((self.images.clone(), marks), self.compute.pool.clone());
        let sight = ModelSight::new(tower, pool, images, options.image_tokens, model.notices().clone());
        if options.tower == VisionUse::Preload {
            sight.load()?;
        }
        Ok(Some(Arc::new(sight)))
    }

    #[cfg(not(feature = "vision"))]
    fn open_sight(&self, _model: &OpenModel, _tokenizer: &Tokenizer) -> Result<Option<Arc<dyn Sight>>> {
        Ok(None)
    }
}

/// Why images are refused where there is no sight, as a sentence without its full stop.
pub fn blindness(model: &OpenModel, tower: VisionUse) -> String {
    if tower == VisionUse::Off {
        return format!("images are refused with {}; leave that out", Setting::Vision.with("off"));
    }
    if !larder_model::takes_images(model.source().config()).unwrap_or(false) {
        return format!("this model takes no images; models that see are those of type {}", seeing_models());
    }
    if let Err(error) = model.tower() {
        return sentence(&error);
    }
    let remedy = match model.store() {
        Some(_) => {
            format!("add that of its source with `larder store add-vision SOURCE {}`", model.source().path().display())
        }
        None => "put its mmproj file beside it".to_owned(),
    };
    let mmproj = Setting::Mmproj;
    format!(
        "the image tower of this model is not here, without which it takes no images; {remedy}, or use {mmproj} FILE"
    )
}
