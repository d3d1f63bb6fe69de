//! Settings of sampling, and what can be wrong.

use larder_text::{GenerationConfig, GrammarError};

/// Settings of sampling. The default is greedy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy, with the lowest id among equal logits.
    pub temperature: f32,
    /// Keeps the `top_k` most likely tokens, and those equal to the last of them; 0 keeps all.
    pub top_k: usize,
    /// Keeps the most likely tokens whose probabilities first reach `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least `min_p` times the highest probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that occur in the sequence, once each; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each of its occurrences in the answer; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once from the logit of every token that occurs in the answer; 0 is off.
    pub presence_penalty: f32,
}

impl Default for Sampling {
    /// Greedy, without penalties.
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
        }
    }
}

impl From<&GenerationConfig> for Sampling {
    /// As a model's files recommend: greedy unless `do_sample` is set. Settings that they do not have are off.
    fn from(config: &GenerationConfig) -> Self {
        let off = Sampling::default();
        Sampling {
            temperature: if config.do_sample == Some(true) { config.temperature.unwrap_or(1.0) } else { 0.0 },
            top_k: config.top_k.unwrap_or(off.top_k),
            top_p: config.top_p.unwrap_or(off.top_p),
            min_p: config.min_p.unwrap_or(off.min_p),
            repetition_penalty: config.repetition_penalty.unwrap_or(off.repetition_penalty),
            ..off
        }
    }
}

/// Invalid settings or logits.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// The temperature is negative or not finite.
    #[error("temperature is {0}; it must be 0 or more")]
    Temperature(f32),
    /// top-p is not a probability above 0.
    #[error("top-p is {0}; it must be above 0 and at most 1")]
    TopP(f32),
    /// min-p is not a probability.
    #[error("min-p is {0}; it must be from 0 to 1")]
    MinP(f32),
    /// The repetition penalty is zero, negative or not finite.
    #[error("repetition penalty is {0}; it must be above 0")]
    RepetitionPenalty(f32),
    /// The frequency or presence penalty is not finite.
    #[error("{0} penalty is {1}; it must be a finite number")]
    Penalty(&'static str, f32),
    /// The model computed NaN or infinity.
    #[error("the model's logit for token {id} is {value}; it must be finite")]
    Logit {
        /// Id of the token.
        id: usize,
        /// The logit.
        value: f32,
    },
    /// Every logit is minus infinity, or there are no logits.
    #[error("no token can be sampled: all {0} logits are minus infinity")]
    NoToken(usize),
    /// The text cannot be kept to its grammar.
    #[error("structured output failed: {0}")]
    Grammar(#[from] GrammarError),
}

impl Sampling {
    /// Checks that every setting is in its range.
    pub fn checked(self) -> Result<Self, SamplerError> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(SamplerError::Temperature(self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(SamplerError::TopP(self.top_p));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return Err(SamplerError::MinP(self.min_p));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return Err(SamplerError::RepetitionPenalty(self.repetition_penalty));
        }
        for (name, penalty) in [("frequency", self.frequency_penalty), ("presence", self.presence_penalty)] {
            if !penalty.is_finite() {
                return Err(SamplerError::Penalty(name, penalty));
            }
        }
        Ok(self)
    }
}
