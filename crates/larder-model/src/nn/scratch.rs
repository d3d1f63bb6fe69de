//! What the activations of a part of a layer take.

/// What computing one part of a layer takes per token of the step.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TokenScratch {
    /// The most activations that exist at the same time, in numbers of f32; the part's input and output included.
    pub floats: usize,
    /// Width of the widest input of a matmul, which is copied and quantised.
    pub input: usize,
}

impl TokenScratch {
    /// Enough for either of two parts, which are computed one after the other.
    pub fn max(self, other: Self) -> Self {
        TokenScratch { floats: self.floats.max(other.floats), input: self.input.max(other.input) }
    }
}
