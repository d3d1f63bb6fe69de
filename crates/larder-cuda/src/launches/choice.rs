//! Arguments of the choice of experts.

use super::pack;

/// An address in a list that depends on the choice, as the kernel reads it.
#[derive(Clone, Copy, Debug)]
pub struct Patch {
    /// Where the address of the expert plus the offset is written.
    pub target: u64,
    /// Of a part within the expert, in bytes.
    pub offset: u64,
}

impl Patch {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 16;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; Patch::BYTES] {
        pack([self.target, self.offset], [])
    }
}

/// The arguments of the choice of experts, as the kernel reads them.
#[derive(Clone, Copy, Debug)]
pub struct ChoiceArgs {
    /// `[tokens, classes]`
    pub logits: u64,
    /// `[experts]`, added to scores for the choice only, or 0.
    pub bias: u64,
    /// `[experts]`, factors on weights, or 0.
    pub scales: u64,
    /// `[experts]`: the address of each expert.
    pub slots: u64,
    /// What the choice computes with.
    pub scratch: u64,
    /// `[tokens, k]`: the experts, if they are known, or 0.
    pub known: u64,
    /// `[tokens, k]`, in page-locked memory: the chosen experts.
    pub chosen: u64,
    /// `[tokens, k]`: the terms of sums, which get the weights.
    pub terms: u64,
    /// `[tokens, k, patches]`
    pub patches: u64,
    /// `[tokens, k, width]`: the outputs of experts.
    pub outputs: u64,
    /// Number of tokens, experts, experts of a token, and patches of an expert.
    pub sizes: [u32; 4],
    /// The gate.
    pub gate: [u32; 10],
    /// Experts, or one more for none.
    pub classes: u32,
    /// Added to the score of the class for no expert.
    pub bias_of_none: f32,
    /// Values of an output.
    pub width: u32,
}

impl ChoiceArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 152;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; ChoiceArgs::BYTES] {
        let ChoiceArgs { logits, bias, scales, slots, scratch, known, chosen, terms, patches, outputs, .. } = self;
        let ChoiceArgs { sizes, gate, classes, bias_of_none, width, .. } = self;
        let mut words = [0; 18];
        words[..4].copy_from_slice(&sizes);
        words[4..14].copy_from_slice(&gate);
        words[14..17].copy_from_slice(&[classes, bias_of_none.to_bits(), width]);
        pack([logits, bias, scales, slots, scratch, known, chosen, terms, patches, outputs], words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_written_as_the_kernel_reads_them() {
        let args = ChoiceArgs {
            logits: 1,
            bias: 2,
            scales: 3,
            slots: 4,
            scratch: 5,
            known: 6,
            chosen: 7,
            terms: 8,
            patches: 9,
            outputs: 10,
            sizes: [11, 12, 13, 14],
            gate: [15, 16, 17, 18, 19, 20, 21, 22, 23, 24],
            classes: 25,
            bias_of_none: 1.0,
            width: 26,
        };
        let words: Vec<u32> = args.to_bytes().as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        assert_eq!(words[..20], (1..11).flat_map(|at| [at, 0]).collect::<Vec<u32>>());
        assert_eq!(words[20..], (11..26).chain([1.0f32.to_bits(), 26, 0]).collect::<Vec<u32>>());
    }
}
