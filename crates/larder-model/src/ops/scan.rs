//! The recurrences of state-space layers (Mamba): a state whose rows decay, take in a token, and are read.

use std::ops::Range;

use larder_kernels::{Arithmetic, ThreadPool, exp, widest};

use crate::ops::{ScanHeads, StateParts};

/// Sums of a read row that are kept apart, as part of the definition: fast, and more exact than one.
const LANES: usize = 8;

/// Channels of Mamba 1 that one task computes.
const TASK_CHANNELS: usize = 64;

/// Lets a row of the state decay, adds a token's `input · b`, and reads the row with `c`. Lanes are copied and stored
/// as a whole, so that they become a vector.
#[inline(always)]
fn take_in(row: &mut [f32], decay: f32, input: f32, b: &[f32], c: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (rows, rest) = row.as_chunks_mut::<LANES>();
    let ((bs, b_rest), (cs, c_rest)) = (b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    for ((row, b), c) in rows.iter_mut().zip(bs).zip(cs) {
        let (mut m, b, c) = (*row, *b, *c);
        for i in 0..LANES {
            m[i] = m[i] * decay + input * b[i];
        }
        for i in 0..LANES {
            sums[i] += m[i] * c[i];
        }
        *row = m;
    }
    for (((m, b), c), sum) in rest.iter_mut().zip(b_rest).zip(c_rest).zip(&mut sums) {
        *m = *m * decay + input * b;
        *sum += *m * c;
    }
    sums.iter().sum()
}

/// What the recurrence of Mamba 2 reads of consecutive tokens of one sequence.
pub(crate) struct ScanTokens<'a> {
    /// `[tokens, channels]`: `x`, `B` and `C`, after the convolution.
    pub convolved: &'a [f32],
    /// `[tokens, heads]`: steps of time.
    pub steps: &'a [f32],
    /// `[heads]`: the logarithm of a decay per step.
    pub rates: &'a [f32],
    /// `[heads]`
    pub skips: &'a [f32],
}

impl ScanHeads {
    /// Takes in tokens with the state `[heads, head_dim, state]`, and writes what is read from it:
    /// `out [tokens, heads, head_dim]`.
    pub(crate) fn advance(&self, tokens: &ScanTokens, state: &mut [f32], out: &mut [f32], threads: &ThreadPool) {
        let (count, state_len) = (tokens.steps.len() / self.heads, self.head_dim * self.state);
        let heads = StateParts { state, state_len, out, width: self.head_dim };
        heads.advance(count, threads, |head, state, read| widest(HeadScan { heads: self, head, tokens, state, read }));
    }
}

/// The recurrence of one head.
struct HeadScan<'a> {
    heads: &'a ScanHeads,
    head: usize,
    tokens: &'a ScanTokens<'a>,
    /// `[head_dim, state]`
    state: &'a mut [f32],
    /// `[tokens, head_dim]`
    read: &'a mut [f32],
}

impl Arithmetic for HeadScan<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let HeadScan { heads: all, head, tokens, state, read } = self;
        let ScanHeads { heads, head_dim, groups, state: width } = *all;
        let (group, rate, skip) = (head / (heads / groups), tokens.rates[head], tokens.skips[head]);
        let rows = tokens.convolved.chunks_exact(all.channels()).zip(tokens.steps.chunks_exact(heads));
        for ((token, steps), read) in rows.zip(read.chunks_exact_mut(head_dim)) {
            let (x, both) = token.split_at(heads * head_dim);
            let (b, c) = both.split_at(groups * width);
            let (b, c) = (&b[group * width..][..width], &c[group * width..][..width]);
            let step = steps[head];
            let decay = exp(step * rate);
            let rows = state.chunks_exact_mut(width).zip(&x[head * head_dim..][..head_dim]);
            for ((row, x), y) in rows.zip(read) {
                *y = take_in(row, decay, step * x, b, c) + skip * x;
            }
        }
    }
}

/// What the recurrence of Mamba 1 reads of the tokens of a step.
pub(crate) struct ChannelTokens<'a> {
    /// `[tokens, channels]`, after the convolution.
    pub x: &'a [f32],
    /// `[tokens, channels]`: steps of time.
    pub steps: &'a [f32],
    /// `[tokens, width]`
    pub b: &'a [f32],
    /// `[tokens, width]`
    pub c: &'a [f32],
    /// `[channels, width]`: the logarithm of a decay per step.
    pub decays: &'a [f32],
    /// `[channels]`
    pub skips: &'a [f32],
    /// Number of channels.
    pub channels: usize,
    /// Values of a row of the state.
    pub width: usize,
}

impl ChannelTokens<'_> {
    /// Takes in the tokens `rows` with the state `[channels, width]` of their sequence, and writes what is read from
    /// it: `out [rows, channels]`.
    pub(crate) fn advance(&self, rows: Range<usize>, state: &mut [f32], out: &mut [f32], threads: &ThreadPool) {
        let parts = StateParts { state, state_len: TASK_CHANNELS * self.width, out, width: TASK_CHANNELS };
        parts.advance(rows.len(), threads, |task, state, read| {
            let first = task * TASK_CHANNELS;
            widest(SomeChannels { tokens: self, rows: rows.clone(), first, state, read });
        });
    }
}

/// The recurrence of some channels.
struct SomeChannels<'a> {
    tokens: &'a ChannelTokens<'a>,
    rows: Range<usize>,
    /// The first channel.
    first: usize,
    /// `[channels, width]`
    state: &'a mut [f32],
    /// `[rows, channels]`
    read: &'a mut [f32],
}

impl Arithmetic for SomeChannels<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let SomeChannels { tokens, rows, first, state, read } = self;
        let ChannelTokens { x, steps, b, c, decays, skips, channels: all, width } = *tokens;
        let channels = state.len() / width;
        for (row, read) in rows.zip(read.chunks_exact_mut(channels)) {
            let (at, b, c) = (row * all + first, &b[row * width..][..width], &c[row * width..][..width]);
            let tokens = x[at..].iter().zip(&steps[at..]);
            let rates = decays[first * width..].chunks_exact(width).zip(&skips[first..]);
            for (((m, (x, step)), (decays, skip)), y) in state.chunks_exact_mut(width).zip(tokens).zip(rates).zip(read)
            {
                m.iter_mut().zip(decays).for_each(|(m, rate)| *m *= exp(step * rate));
                *y = take_in(m, 1.0, step * x, b, c) + skip * x;
            }
        }
    }
}
