//! Multi-token prediction (MTP): the model's own layer behind its last one drafts tokens from the hidden states of the
//! text.

use larder_model::{ModelError, Tap};

use super::draft_model::{LEAST_PROBABILITY, likeliest};
use super::source::{Draft, DraftSource, TextSoFar};
use crate::sequence::{DRAFT_MAX, OwnLayer};

/// Drafts with the layer for multi-token prediction. For further tokens than the first, the layer reads its own hidden
/// states.
pub struct MtpSource;

impl DraftSource for MtpSource {
    fn at_hand(&mut self, text: TextSoFar, own: Option<&OwnLayer>) -> usize {
        own.filter(|own| own.state.reaches(text.before.len())).map_or(0, |_| DRAFT_MAX)
    }

    fn draft(
        &mut self,
        text: TextSoFar,
        most: usize,
        own: Option<&mut OwnLayer>,
        tap: &mut dyn Tap,
    ) -> Result<Draft, ModelError> {
        let Some(own) = own else { return Ok(Draft::default()) };
        let unseen = own.state.waiting();
        let tokens = drafted(text, most, own, tap);
        own.forget_predicted();
        Ok(Draft { tokens: tokens?, unseen })
    }
}

fn drafted(text: TextSoFar, most: usize, own: &mut OwnLayer, tap: &mut dyn Tap) -> Result<Vec<u32>, ModelError> {
    let mut predicted = own.read(text.before, text.last, tap)?;
    let mut tokens = Vec::with_capacity(most);
    loop {
        let (id, probability) = likeliest(&predicted.logits);
        let is_sure = probability >= LEAST_PROBABILITY;
        if is_sure {
            tokens.push(id);
        }
        if !is_sure || tokens.len() == most {
            return Ok(tokens);
        }
        predicted = own.go_on(id, &predicted, tap)?;
    }
}
