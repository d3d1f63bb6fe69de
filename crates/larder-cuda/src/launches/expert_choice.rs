//! Arguments of the choice of experts.

use super::pack;

/// A list of products or of biases whose entries depend on the choice, one for each expert, as the kernel reads it.
#[derive(Clone, Copy, Default, Debug)]
pub struct ExpertList {
    /// Address of the entry of the first expert.
    pub entries: u64,
    /// Of a part within the expert, in bytes.
    pub offset: u64,
    /// Inputs of the first row.
    pub x: u64,
    /// Outputs of the first row.
    pub out: u64,
    /// By row: its row in the inputs; or 0.
    pub picks: u64,
    /// Bytes from an entry to the next.
    pub stride: u32,
    /// Bytes from the inputs of a row to those of the next; 0 with picks.
    pub x_step: u32,
    /// Bytes from the outputs of a row to those of the next.
    pub out_step: u32,
    /// Whether it is of biases.
    pub is_bias: bool,
}

impl ExpertList {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 56;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; ExpertList::BYTES] {
        let ExpertList { entries, offset, x, out, picks, stride, x_step, out_step, is_bias } = self;
        pack([entries, offset, x, out, picks], [stride, x_step, out_step, is_bias.into()])
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
    /// `[lists]`: an [`ExpertList`] each.
    pub lists: u64,
    /// `[rows, width]`: the outputs of experts.
    pub outputs: u64,
    /// `[2, tokens, k]`: what the grouping by experts computes with, if that is more than a block has memory for.
    pub places: u64,
    /// `[tokens · k]`: by row its row in the inputs, which the choice writes.
    pub picks: u64,
    /// Number of tokens, experts, experts of a token, and lists.
    pub sizes: [u32; 4],
    /// The gate.
    pub gate: [u32; 10],
    /// Experts, or one more for none.
    pub classes: u32,
    /// Added to the score of the class for no expert.
    pub bias_of_none: f32,
    /// Values of an output.
    pub width: u32,
    /// Places that have the same row of inputs.
    pub share: u32,
    /// Entries of each list.
    pub entries: u32,
}

impl ChoiceArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 176;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; ChoiceArgs::BYTES] {
        let ChoiceArgs { logits, bias, scales, slots, scratch, known, chosen, terms, lists, outputs, .. } = self;
        let ChoiceArgs { places, picks, sizes, gate, classes, bias_of_none, width, share, entries, .. } = self;
        let mut words = [0; 20];
        words[..4].copy_from_slice(&sizes);
        words[4..14].copy_from_slice(&gate);
        words[14..19].copy_from_slice(&[classes, bias_of_none.to_bits(), width, share, entries]);
        pack([logits, bias, scales, slots, scratch, known, chosen, terms, lists, outputs, places, picks], words)
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
            lists: 9,
            outputs: 10,
            places: 11,
            picks: 12,
            sizes: [13, 14, 15, 16],
            gate: [17, 18, 19, 20, 21, 22, 23, 24, 25, 26],
            classes: 27,
            bias_of_none: 1.0,
            width: 28,
            share: 29,
            entries: 30,
        };
        let words: Vec<u32> = args.to_bytes().as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        assert_eq!(words[..24], (1..13).flat_map(|at| [at, 0]).collect::<Vec<u32>>());
        assert_eq!(words[24..], (13..28).chain([1.0f32.to_bits(), 28, 29, 30, 0]).collect::<Vec<u32>>());
    }
}
