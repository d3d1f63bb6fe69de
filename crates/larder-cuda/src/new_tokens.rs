//! The heads of new tokens on the device, which attention begins with.

use larder_kernels::AttentionArgs;
use larder_model::DeviceKvView;

use crate::launches::NewHeadsArgs;

/// The heads of new tokens on the device, of all tasks of a batch in order.
pub struct NewTokens<'a> {
    /// Addresses, norms and rotation of the heads; the turns are to be filled in.
    pub heads: NewHeadsArgs,
    /// Values of a token's queries, keys, values and rest; 0 where there are none.
    pub widths: [usize; 4],
    /// `[tokens, dim / 2]`
    pub turns: &'a [(f32, f32)],
    /// Address of the rotated queries, `[tokens, heads, key_width]`.
    pub queries: u64,
}

impl NewTokens<'_> {
    /// Turns of a token.
    pub fn turns_each(&self) -> usize {
        self.heads.dim as usize / 2
    }

    /// Whether a task has such heads.
    pub fn fits(&self, args: &AttentionArgs<DeviceKvView>) -> bool {
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
            && norm_width as usize <= width
            && (first + dim) as usize <= width
    }

    /// The arguments for the tokens from `first` on, with the address of their turns.
    pub fn args(&self, first: usize, turns: u64) -> NewHeadsArgs {
        let NewHeadsArgs { mut rows, mut rest, .. } = self.heads;
        let behind = |at: &mut u64, width: usize| *at += 4 * (first * width) as u64;
        rows.iter_mut().zip(self.widths).for_each(|(at, width)| behind(at, width));
        behind(&mut rest, self.widths[3]);
        NewHeadsArgs { rows, rest, turns, ..self.heads }
    }
}
