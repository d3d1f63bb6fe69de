//! Decoding that runs ahead: the step behind a token begins on a device before the host has the token, which the device draws as well. So
//! the device does not wait while the host reads logits, draws, writes text, and collects the launches of the next step.

use larder_model::{AheadInput, BegunStep, BestLogits, ExpertPath, Logits, ModelError, Tap, TokenDraw};

use crate::decode::TokenChoice;
use crate::session::Session;

/// A token that is in the sequence in place of one that is not known yet.
const UNKNOWN: u32 = 0;

/// How many steps were begun before their token was known, and how many of these were dropped, because the text has another token or
/// ended.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AheadCounts {
    /// Steps begun.
    pub steps: usize,
    /// Steps dropped.
    pub dropped: usize,
}

/// A step that was begun before its token was known.
pub(crate) struct AheadStep {
    step: BegunStep,
    /// The token, as the device has drawn it.
    token: u32,
}

impl AheadStep {
    /// Whether this is its token.
    pub fn has_token(&self, id: u32) -> bool {
        self.token == id
    }
}

/// What the choice of the next tokens reads and draws by, where a device can draw them.
pub(crate) struct AheadChoice {
    best: BestLogits,
    /// For the next token, and for the one behind it.
    draws: [TokenDraw; 2],
}

impl AheadChoice {
    /// What `choice` draws tokens behind `tokens` by; `None` where a device cannot.
    pub fn of(choice: &mut dyn TokenChoice, tokens: &[&[u32]]) -> Option<Self> {
        Some(AheadChoice { best: choice.best(tokens)?, draws: [choice.draw(0)?, choice.draw(1)?] })
    }

    /// The logits that it reads.
    pub fn best(&self) -> &BestLogits {
        &self.best
    }
}

/// The logits of a step, and the step behind it, if that was begun.
pub(crate) type StepAhead = (Logits, Option<AheadStep>);

impl<P: ExpertPath> Session<'_, P> {
    /// Computes the token `id`, or goes on with the step that was begun with it. Meanwhile begins the step behind it, if `goes_on`. `None`
    /// if steps of this kind do not run ahead; then nothing has changed, but for a step that was begun, which is dropped.
    ///
    /// After an error the sequence is as before the token.
    pub(crate) fn step_ahead(
        &mut self,
        id: u32,
        begun: Option<AheadStep>,
        choice: &AheadChoice,
        goes_on: bool,
        tap: &mut dyn Tap,
    ) -> Result<Option<StepAhead>, ModelError> {
        let before = self.tokens().len() - usize::from(begun.is_some());
        let step = match begun {
            Some(begun) if begun.has_token(id) => {
                self.set_last(id);
                Some(begun.step)
            }
            Some(_) => {
                self.drop_ahead();
                None
            }
            None => None,
        };
        let step = match step {
            Some(step) => step,
            None if goes_on && self.runs_ahead(&choice.best) => {
                let input = AheadInput { after: None, best: &choice.best, draw: &choice.draws[0] };
                self.begin(id, input, tap)?
            }
            None => return Ok(None),
        };
        let behind = match goes_on && !step.has_waited() && self.runs_ahead(&choice.best) {
            true => {
                let input = AheadInput { after: Some(&step), best: &choice.best, draw: &choice.draws[1] };
                // The next step meets the same error, if it is one that stays.
                self.begin(UNKNOWN, input, tap).ok()
            }
            false => None,
        };
        let finished = self.finish(step, tap).inspect_err(|_| _ = self.rewind(before))?;
        let Some((logits, token)) = finished else {
            behind.is_some().then(|| self.decoder().drop_steps());
            self.rewind(before);
            return Ok(None);
        };
        Ok(Some((logits, behind.map(|step| AheadStep { step, token }))))
    }

    /// Drops the step of the last token, which was begun before the token was known.
    pub(crate) fn drop_ahead(&mut self) {
        self.decoder().drop_steps();
        self.rewind(self.tokens().len() - 1);
    }
}
