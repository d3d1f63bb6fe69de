//! The memory of one sequence: its KV cache, its recurrent state, and the checkpoints of that.

use crate::NumberFormat;

/// Positions per page of a KV cache, a multiple of eight.
pub const KV_PAGE_TOKENS: usize = 64;

/// When copies of a recurrent state are kept, to which a sequence can be rewound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckpointPolicy {
    /// Tokens from one checkpoint to the next; at least one.
    pub every: usize,
    /// The most of these checkpoints of a sequence; 0 for none.
    pub most: usize,
    /// The most further checkpoints, at positions that are pinned; windows have these as well.
    pub pins: usize,
}

impl Default for CheckpointPolicy {
    fn default() -> Self {
        CheckpointPolicy { every: 256, most: 4, pins: 0 }
    }
}

impl CheckpointPolicy {
    /// The first position after `at` at which a checkpoint is taken; `usize::MAX` if none is.
    pub fn next(&self, at: usize) -> usize {
        if self.most == 0 { usize::MAX } else { (at + 1).next_multiple_of(self.every.max(1)) }
    }

    /// The most checkpoints that a sequence of `tokens` tokens has.
    pub fn count(&self, tokens: usize) -> usize {
        self.most.min(tokens / self.every.max(1))
    }

    /// The one of too many checkpoints at ascending positions that is dropped: never the newest, and of the others the
    /// one whose absence costs least, as a share of the distance back to it. So their distances grow with their age,
    /// and a sequence can be rewound both by little and by much.
    pub fn superfluous(&self, at: &[usize]) -> Option<usize> {
        if at.len() <= self.most {
            return None;
        }
        let end = *at.last()? + self.every;
        let before = |i: usize| if i == 0 { 0 } else { at[i - 1] };
        let cost = |i: usize| (at[i + 1] - before(i)) as f64 / (end - before(i)) as f64;
        let cheapest = (0..at.len() - 1).min_by(|a, b| cost(*a).total_cmp(&cost(*b)));
        Some(cheapest.unwrap_or(0))
    }
}

/// Memory that a sequence needs: KV cache and recurrent state.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct SequenceMemory {
    /// Values of the KV cache for each [`KV_PAGE_TOKENS`] tokens.
    per_page: RowValues,
    /// Values of the KV cache whatever the length of the sequence.
    always: RowValues,
    /// Rows of which only the last positions are kept.
    windows: Vec<WindowRows>,
    /// Values of the widest row of the KV cache.
    pub widest_row: usize,
    /// Bytes of recurrent state, whatever the length of the sequence.
    pub state_bytes: usize,
}

/// Rows of a sliding window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct WindowRows {
    /// Values for each [`KV_PAGE_TOKENS`] tokens.
    per_page: RowValues,
    /// Positions that a token sees.
    window: usize,
    /// Positions that are kept between two steps.
    positions: usize,
}

impl WindowRows {
    /// Bytes in `kind` of a sequence of `tokens` tokens, in steps of up to `step` tokens.
    fn bytes(&self, tokens: usize, step: usize, kind: NumberFormat) -> u64 {
        // The first page and the last are not full.
        let kept = self.positions.saturating_add(step).div_ceil(KV_PAGE_TOKENS).saturating_add(1);
        (tokens.div_ceil(KV_PAGE_TOKENS).min(kept) as u64).saturating_mul(self.per_page.bytes(kind))
    }
}

/// Values of rows of the KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct RowValues {
    plain: usize,
    /// If each row is padded to whole blocks of 32 values, as block formats store it.
    padded: usize,
}

impl RowValues {
    /// `count` rows of `width` values.
    fn new(count: usize, width: usize) -> Self {
        let padded = width.checked_next_multiple_of(NumberFormat::Q8_0.block_len()).unwrap_or(usize::MAX);
        RowValues { plain: count.saturating_mul(width), padded: count.saturating_mul(padded) }
    }

    /// Bytes in `kind`.
    fn bytes(self, kind: NumberFormat) -> u64 {
        let values = if kind.is_float() { self.plain } else { self.padded };
        ((values / kind.block_len()) as u64).saturating_mul(kind.block_bytes() as u64)
    }

    /// The share of one of `parts` parts, in whole blocks where rows are.
    fn divided(self, parts: usize) -> Self {
        let blocks = |values: usize| values.checked_next_multiple_of(NumberFormat::Q8_0.block_len());
        RowValues {
            plain: self.plain.div_ceil(parts),
            padded: blocks(self.padded.div_ceil(parts)).unwrap_or(usize::MAX),
        }
    }

    fn plus(self, other: Self) -> Self {
        RowValues { plain: self.plain.saturating_add(other.plain), padded: self.padded.saturating_add(other.padded) }
    }
}

impl SequenceMemory {
    /// One KV row of `width` values for each of `heads` heads per token.
    pub fn rows(heads: usize, width: usize) -> Self {
        let per_page = RowValues::new(heads.saturating_mul(KV_PAGE_TOKENS), width);
        SequenceMemory { per_page, widest_row: width, ..SequenceMemory::default() }
    }

    /// As [`rows`](Self::rows), one for each `tokens_per_row` tokens.
    pub fn block_rows(heads: usize, width: usize, tokens_per_row: usize) -> Self {
        if tokens_per_row <= 1 {
            return SequenceMemory::rows(heads, width);
        }
        let per_page = RowValues::new(heads.saturating_mul(KV_PAGE_TOKENS), width).divided(tokens_per_row);
        // The last page is not full.
        SequenceMemory { per_page, ..SequenceMemory::kept_rows(heads, width, KV_PAGE_TOKENS) }
    }

    /// As [`block_rows`](Self::block_rows), of which a token reads at most `rows`.
    pub fn chosen_rows(heads: usize, width: usize, tokens_per_row: usize, rows: usize) -> Self {
        let all = SequenceMemory::block_rows(heads, width, tokens_per_row);
        let window = rows.saturating_mul(tokens_per_row.max(1));
        let windows = vec![WindowRows { per_page: all.per_page, window, positions: usize::MAX }];
        SequenceMemory { per_page: RowValues::default(), windows, ..all }
    }

    /// As [`rows`](Self::rows), for at most `count` rows per head at a time.
    pub fn kept_rows(heads: usize, width: usize, count: usize) -> Self {
        let count = count.checked_next_multiple_of(KV_PAGE_TOKENS).unwrap_or(usize::MAX);
        let always = RowValues::new(heads.saturating_mul(count), width);
        SequenceMemory { always, widest_row: width, ..SequenceMemory::default() }
    }

    /// As [`rows`](Self::rows), of which those of the last `positions` positions are kept between two steps, and a
    /// token sees `window`.
    pub fn window_rows(heads: usize, width: usize, [window, positions]: [usize; 2]) -> Self {
        let per_page = RowValues::new(heads.saturating_mul(KV_PAGE_TOKENS), width);
        let windows = vec![WindowRows { per_page, window, positions }];
        SequenceMemory { windows, widest_row: width, ..SequenceMemory::default() }
    }

    /// A recurrent state of `state_bytes` bytes.
    pub fn state(state_bytes: usize) -> Self {
        SequenceMemory { state_bytes, ..SequenceMemory::default() }
    }

    /// Bytes of the KV cache of a sequence of `tokens` tokens, in whole pages, if its rows are in `kind` and no step
    /// has more than `step` of its tokens.
    pub fn kv_bytes(&self, tokens: usize, step: usize, kind: NumberFormat) -> u64 {
        let growing = (tokens.div_ceil(KV_PAGE_TOKENS) as u64).saturating_mul(self.per_page.bytes(kind));
        let windows = self.windows.iter().map(|window| window.bytes(tokens, step, kind)).fold(0, u64::saturating_add);
        growing.saturating_add(self.always.bytes(kind)).saturating_add(windows)
    }

    /// Bytes by which the KV cache grows with each token of a long sequence, if its rows are in `kind`: windows do not
    /// grow.
    pub fn bytes_per_token(&self, kind: NumberFormat) -> u64 {
        let growing = self.windows.iter().filter(|window| window.positions == usize::MAX).map(|window| window.per_page);
        growing.fold(self.per_page, RowValues::plus).bytes(kind) / KV_PAGE_TOKENS as u64
    }

    /// Bytes of the KV cache that the token behind `tokens` tokens reads, in whole pages, if its rows are in `kind`.
    pub fn read_bytes(&self, tokens: usize, kind: NumberFormat) -> u64 {
        let pages = |tokens: usize| tokens.div_ceil(KV_PAGE_TOKENS) as u64;
        let of = |window: &WindowRows| pages(tokens.min(window.window)).saturating_mul(window.per_page.bytes(kind));
        let growing = pages(tokens).saturating_mul(self.per_page.bytes(kind));
        growing.saturating_add(self.always.bytes(kind)).saturating_add(self.windows.iter().map(of).sum())
    }

    /// Bytes of a pinned checkpoint, if its rows are in `kind`: a recurrent state, and the pages of windows.
    pub fn pinned_bytes(&self, kind: NumberFormat) -> u64 {
        let windows = self.windows.iter().filter(|window| window.positions < usize::MAX);
        let pages = |window: &WindowRows| (window.window.div_ceil(KV_PAGE_TOKENS) + 1) as u64;
        let windows = windows.map(|window| pages(window).saturating_mul(window.per_page.bytes(kind)));
        windows.fold(self.always.bytes(kind), u64::saturating_add).saturating_add(self.state_bytes as u64)
    }

    /// The most bytes by which a sequence of `from` tokens that shares all its memory grows when those up to `to` are
    /// computed, of which `pins` are pinned.
    pub fn growth_bytes(
        &self,
        (from, to, pins): (usize, usize, usize),
        kind: NumberFormat,
        checkpoints: &CheckpointPolicy,
    ) -> u64 {
        let pages = (to.div_ceil(KV_PAGE_TOKENS) - from / KV_PAGE_TOKENS) as u64;
        let windows = self.windows.iter().fold(self.per_page, |all, window| all.plus(window.per_page));
        let regular = checkpoints.most.min(to / checkpoints.every.max(1) - from / checkpoints.every.max(1));
        let states = (1 + regular + pins) as u64;
        let rows = pages.saturating_mul(windows.bytes(kind)).saturating_add(self.always.bytes(kind));
        rows.saturating_add(states.saturating_mul(self.state_bytes as u64))
    }

    /// Bytes of the recurrent state of a sequence of `tokens` tokens, with all its regular checkpoints.
    pub fn recurrent_bytes(&self, tokens: usize, checkpoints: &CheckpointPolicy) -> u64 {
        (1 + checkpoints.count(tokens) as u64).saturating_mul(self.state_bytes as u64)
    }
}

impl std::ops::Add for SequenceMemory {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        SequenceMemory {
            per_page: self.per_page.plus(other.per_page),
            always: self.always.plus(other.always),
            windows: [self.windows, other.windows].concat(),
            widest_row: self.widest_row.max(other.widest_row),
            state_bytes: self.state_bytes + other.state_bytes,
        }
    }
}

impl std::iter::Sum for SequenceMemory {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |sum, part| sum + part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_takes_whole_pages_and_its_checkpoints() {
        let memory = SequenceMemory::rows(2, 48);
        assert_eq!(memory.kv_bytes(64, 1, NumberFormat::F16), 64 * 2 * 48 * 2);
        assert_eq!(memory.kv_bytes(65, 1, NumberFormat::F32), 128 * 2 * 48 * 4);
        assert_eq!(memory.kv_bytes(1, 1, NumberFormat::Q8_0), 64 * 2 * 2 * 34, "48 values are two blocks");
        // A row for each four tokens: at most one page is not full.
        let blocks = memory + SequenceMemory::block_rows(2, 48, 4);
        assert_eq!(blocks.kv_bytes(256, 1, NumberFormat::F16), (256 + 64 + 64) * 2 * 48 * 2);
        assert_eq!(SequenceMemory::block_rows(1, 8, 128).kv_bytes(6400, 1, NumberFormat::F32), (50 + 64) * 8 * 4);
        assert_eq!(blocks.bytes_per_token(NumberFormat::F16), (4 + 1) * 2 * 48 * 2 / 4);
        let kept = SequenceMemory::kept_rows(1, 8, 65);
        assert_eq!([1, 1000].map(|tokens| kept.kv_bytes(tokens, 1, NumberFormat::F32)), [128 * 8 * 4; 2]);
        let (window, page) = (SequenceMemory::window_rows(1, 8, [70, 100]), 64 * 8 * 4);
        let pages = |tokens, step| (window.kv_bytes(tokens, step, NumberFormat::F32) / page) as usize;
        assert_eq!([(1, 1), (128, 1), (9999, 1), (9999, 100)].map(|(tokens, step)| pages(tokens, step)), [1, 2, 3, 5]);
        assert_eq!([10, 9999].map(|tokens| window.read_bytes(tokens, NumberFormat::F32) / page), [1, 2]);
        // All rows are kept, of which a token reads those that are chosen for it.
        let (chosen, all) = (SequenceMemory::chosen_rows(1, 8, 1, 70), SequenceMemory::rows(1, 8));
        let bytes = |memory: &SequenceMemory| memory.kv_bytes(9999, 256, NumberFormat::F16);
        assert_eq!((bytes(&chosen), chosen.read_bytes(9999, NumberFormat::F32)), (bytes(&all), 2 * page));
        let (chosen, all) = (SequenceMemory::chosen_rows(1, 8, 4, 64), SequenceMemory::block_rows(1, 8, 4));
        assert_eq!(bytes(&chosen), bytes(&all));
        assert_eq!(chosen.bytes_per_token(NumberFormat::F32), 8 * 4 / 4);
        assert_eq!(window.bytes_per_token(NumberFormat::F32), 0);
        assert_eq!(chosen.read_bytes(9999, NumberFormat::F32), 2 * page, "64 rows, and the page that is not full");
        assert_eq!(chosen.read_bytes(100, NumberFormat::F32), all.read_bytes(100, NumberFormat::F32));
        // Whatever is kept, and however the pages lie.
        for start in 0..64_usize {
            let (first, end) = (start / 64, (start + 100 + 30).div_ceil(64));
            assert!(end - first <= pages(9999, 30));
        }
        let state = SequenceMemory::state(100);
        let bytes = |tokens| state.recurrent_bytes(tokens, &CheckpointPolicy::default());
        assert_eq!([255, 256, 1023, 4000].map(bytes), [100, 200, 400, 500]);
    }

    #[test]
    fn checkpoints_are_dense_near_the_end() {
        let (policy, mut at) = (CheckpointPolicy { every: 10, most: 4, pins: 0 }, Vec::new());
        for position in (10..=1000).step_by(10) {
            at.push(position);
            if let Some(i) = policy.superfluous(&at) {
                at.remove(i);
            }
            assert!(at.len() <= 4 && at.last() == Some(&position));
        }
        assert!(at[3] - at[2] <= 20 && at[0] > 0 && at[0] < 900, "{at:?}");
        assert_eq!(CheckpointPolicy { every: 10, most: 0, pins: 0 }.superfluous(&[10]), Some(0));
        assert_eq!([0, 9, 10, 19].map(|at| policy.next(at)), [10, 10, 20, 20]);
    }
}
