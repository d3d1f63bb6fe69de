//! Where the tokens of a step come from.

/// Where a token of a step comes from.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TokenOrigin {
    /// Number of its sequence, for traces.
    pub sequence: u64,
    /// Prompt or generated text.
    pub phase: TokenPhase,
}

/// The phase in which a token is computed. Routing strategies may treat the two differently.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum TokenPhase {
    /// A token of a prompt.
    #[default]
    Prefill,
    /// A token that the model generated, or that is evaluated as if it had been.
    Decode,
}
