//! Files of pictures that become images of a prompt.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use larder_engine::{ImageMarks, Picture, Sight};
use larder_runtime::{OpenModel, PictureFile, TextCodec, VisionOptions, VisionUse, blindness, tokens_of_picture};

/// How images stand in the prompts of a model, which sees; refused if it does not.
pub fn marks(model: &OpenModel, text: &TextCodec, tower: VisionUse) -> Result<ImageMarks> {
    let sees = tower != VisionUse::Off && matches!(model.tower(), Ok(Some(_)));
    let marks = model.image_marks(&text.tokenizer).filter(|_| sees);
    marks.ok_or_else(|| anyhow!(blindness(model, tower)))
}

/// Tokens that the images of these files have together, and the bytes of what the tower makes of them.
pub fn sizes(model: &OpenModel, files: &[(&Path, PictureFile)], options: &VisionOptions) -> Result<(usize, u64)> {
    let Some(tower) = model.tower()? else { bail!(blindness(model, options.tower)) };
    let tokens = files.iter().map(|(path, file)| {
        tokens_of_picture(&tower, file, options.image_tokens).with_context(|| path.display().to_string())
    });
    let tokens = tokens.sum::<Result<usize>>()?;
    Ok((tokens, (tokens as u64).saturating_mul(tower.token_bytes)))
}

/// The picture in a file, encoded.
pub fn encode(sight: &dyn Sight, path: &Path, file: &PictureFile) -> Result<Picture> {
    sight.encode(file).with_context(|| path.display().to_string())
}
