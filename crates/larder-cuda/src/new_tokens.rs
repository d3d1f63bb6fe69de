//! The heads of new tokens on the device, which attention begins with.

use larder_kernels::AttentionArgs;
use larder_model::KvView;

use crate::launches::NewHeadsArgs;

/// The heads of new tokens on the device, of all tasks of a batch in order.
pub struct NewTokens<'a> {
    /// Addresses, norms and rotation of the heads; cosines and sines are to be filled in.
    pub heads: NewHeadsArgs,
    /// Values of a token's queries, keys, values and rest; 0 where there are none.
    pub widths: [usize; 4],
    /// `[tokens, dim / 2]`
    pub cos_sin: &'a [(f32, f32)],
    /// `[tokens]`, or empty.
    pub scales: &'a [f32],
    /// Address of the rotated queries, `[tokens, heads, key_width]`.
    pub queries: u64,
    /// Address of the bias of scores by distance, or 0, and its number of values.
    pub bias: (u64, usize),
}

impl NewTokens<'_> {
    /// Turns of a token.
    fn cos_sin_each(&self) -> usize {
        self.heads.dim as usize / 2
    }

    /// Whether a task has such heads.
    pub fn fits(&self, args: &AttentionArgs<KvView>) -> bool {
        let NewHeadsArgs { split, rest_step, rest_first, norm_width, first, dim, .. } = self.heads;
        let [split, rest_step, rest_first] = [split, rest_step, rest_first].map(|n| n as usize);
        let (width, [queries, keys, values, rest]) = (args.keys.width, self.widths);
        let has_rest = rest == args.heads * rest_step && rest_first + width.saturating_sub(split) <= rest_step;
        let is_whole = rest == 0 && split == width;
        let apart = values == args.kv_heads * args.values.width;
        // Values that are not written are the first numbers of keys.
        let in_keys = values == 0 && args.values.pages == args.keys.pages && args.values.width <= width;
        queries == args.heads * split
            && split <= width
            && keys == args.kv_heads * width
            && (has_rest || is_whole)
            && (apart || in_keys)
            && args.bias.map_or(0, |bias| args.heads * (2 * bias.reach + 1)) == self.bias.1
            && norm_width as usize <= width
            && (first + dim) as usize <= width
    }

    /// Bytes of cosines and sines and factors of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> usize {
        (8 * self.cos_sin_each() + if self.scales.is_empty() { 0 } else { 4 }) * tokens
    }

    /// Writes cosines and sines and factors of `tokens` tokens from `first` on.
    pub fn write(&self, first: usize, tokens: usize, bytes: &mut [u8]) {
        let each = self.cos_sin_each();
        let (cos_sin, scales) = bytes.split_at_mut(8 * each * tokens);
        for ((cosine, sine), out) in self.cos_sin[first * each..].iter().zip(cos_sin.as_chunks_mut::<8>().0) {
            *out = bytemuck::cast([*cosine, *sine]);
        }
        if !self.scales.is_empty() {
            scales[..4 * tokens].copy_from_slice(bytemuck::cast_slice(&self.scales[first..][..tokens]));
        }
    }

    /// The arguments for `tokens` tokens from `first` on, whose turns and factors were written to this address.
    pub fn args(&self, first: usize, tokens: usize, cos_sin: u64) -> NewHeadsArgs {
        let NewHeadsArgs { mut rows, mut rest, .. } = self.heads;
        let behind = |at: &mut u64, width: usize| *at += 4 * (first * width) as u64;
        rows.iter_mut().zip(self.widths).for_each(|(at, width)| behind(at, width));
        behind(&mut rest, self.widths[3]);
        let behind_cos_sin = cos_sin + (8 * self.cos_sin_each() * tokens) as u64;
        NewHeadsArgs {
            rows,
            rest,
            cos_sin,
            scales: if self.scales.is_empty() { 0 } else { behind_cos_sin },
            ..self.heads
        }
    }
}
