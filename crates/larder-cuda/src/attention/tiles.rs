//! How the queries of an attention are divided into tiles and launches.

use std::ops::Range;

use larder_core::NumberFormat;
use larder_kernels::{AttentionArgs, TILE_POSITIONS};
use larder_model::{FEW_TILES, KvPageShape, KvView, MAX_SCORE_BYTES, TILE_QUERIES, position_tiles};

/// The least queries that are computed in half precision.
const FLASH_QUERIES: usize = 32;
/// Positions that it multiplies at once, which are in one page.
const FLASH_POSITIONS: usize = 16;
/// Alignment of each kind of memory, in bytes.
const ALIGN: usize = 16;
/// The most tiles of a launch: the limit of CUDA for blocks in y.
const MAX_TILES: usize = 65_535;

/// Whether an attention can be computed in half precision, and has as many queries as a prompt: a few drafted tokens
/// are computed as those that are not drafted. `shapes` are those of pages of keys and of values.
pub fn takes_halves(args: &AttentionArgs<KvView>, shapes: [KvPageShape; 2]) -> bool {
    let widths = [args.keys.width, args.values.width];
    // Four values of a row are read at once.
    let is_aligned = |shape: &KvPageShape| shape.kind != NumberFormat::F16 || shape.row_bytes.is_multiple_of(8);
    args.seen.len() >= FLASH_QUERIES
        && args.bias.is_none()
        && shapes[0].positions >= FLASH_POSITIONS
        && shapes[0].kind == shapes[1].kind
        && widths.iter().all(|width| width.is_multiple_of(4))
        && shapes.iter().all(is_aligned)
}

/// The tiles of a task.
#[derive(Clone, Copy, Debug)]
pub struct TaskTiles {
    /// Number of tiles of [`TILE_QUERIES`] queries, over all key heads.
    pub tiles: usize,
    /// The most positions that a tile sees.
    pub span: usize,
    /// Values of a row of values.
    pub width: usize,
    /// Number formats of keys and values.
    pub kinds: [NumberFormat; 2],
    /// Whether it is computed in half precision, without memory for scores.
    pub flash: bool,
}

impl TaskTiles {
    /// Bytes of scores.
    fn score_bytes(&self, tiles: usize) -> usize {
        if self.flash { 0 } else { 4 * TILE_QUERIES * self.span * tiles }
    }

    /// Bytes of the sums of each position tile.
    fn part_bytes(&self, tiles: usize) -> usize {
        if self.flash { 0 } else { 4 * TILE_QUERIES * position_tiles(self.span) * self.width * tiles }
    }

    /// Bytes of scores, factors, sums, and in `parts` sums of each position tile, for a launch with `tiles` tiles of
    /// the task.
    pub fn scratch(&self, tiles: usize, parts: bool) -> [usize; 4] {
        let tiles = if self.flash { 0 } else { tiles };
        let factors = 8 * TILE_QUERIES * position_tiles(self.span) * tiles;
        let of_parts = if parts { self.part_bytes(tiles) } else { 0 };
        [self.score_bytes(tiles), factors, 4 * TILE_QUERIES * tiles, of_parts].map(|b| b.next_multiple_of(ALIGN))
    }
}

/// Consecutive tasks that are launched together, or one task whose tiles are launched in turns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TaskGroup {
    /// Which tasks.
    pub tasks: Range<usize>,
    /// Tiles of a launch.
    pub at_once: usize,
    /// Tiles of all tasks.
    pub tiles: usize,
    /// Whether each position tile has blocks of its own, because few tiles of queries see many positions.
    pub parts: bool,
}

/// Puts tasks together that differ in sequences only, as far as the memory for scores allows.
pub fn groups(all: &[TaskTiles]) -> Vec<TaskGroup> {
    let (mut groups, mut start) = (Vec::new(), 0);
    while start < all.len() {
        let first = &all[start];
        let (mut end, mut tiles, mut bytes) = (start, 0, 0);
        while let Some(task) = all.get(end) {
            let same = task.kinds == first.kinds && task.width == first.width && task.flash == first.flash;
            let fits = tiles + task.tiles <= MAX_TILES && bytes + task.score_bytes(task.tiles) <= MAX_SCORE_BYTES;
            if !same || !fits && end > start {
                break;
            }
            (end, tiles, bytes) = (end + 1, tiles + task.tiles, bytes + task.score_bytes(task.tiles));
            if !fits {
                break;
            }
        }
        let own = &all[start..end];
        let at_once = match end - start {
            1 => (MAX_SCORE_BYTES / (4 * TILE_QUERIES * first.span)).clamp(1, MAX_TILES).min(tiles),
            _ => tiles,
        };
        let part_bytes = own.iter().map(|task| task.part_bytes(task.tiles.min(at_once))).sum::<usize>();
        let is_long = own.iter().any(|task| task.span > TILE_POSITIONS);
        let parts = is_long && at_once <= FEW_TILES && part_bytes <= MAX_SCORE_BYTES;
        groups.push(TaskGroup { tasks: start..end, at_once, tiles, parts });
        start = end;
    }
    groups
}

/// The number of tiles of [`TILE_QUERIES`] queries, over all key heads, and the most positions that one tile spans.
pub fn tiles_and_span(args: &AttentionArgs<KvView>) -> (usize, usize) {
    let group = args.heads / args.kv_heads;
    let pairs = args.seen.len() * group;
    let span = |first: usize| {
        let visible: &[Range<usize>] = &args.seen[first / group..(pairs.min(first + TILE_QUERIES)).div_ceil(group)];
        let start = visible.iter().map(|seen| seen.start).min().expect("a tile has queries");
        visible.iter().map(|seen| seen.end).max().expect("a tile has queries") - start
    };
    let span = (0..pairs).step_by(TILE_QUERIES).map(span).max().expect("there are queries");
    (args.kv_heads * pairs.div_ceil(TILE_QUERIES), span)
}

#[cfg(test)]
mod tests {
    use larder_core::Rng;
    use larder_model::device_attention_bytes;

    use super::*;

    /// Memory plans count enough for any sequence.
    #[test]
    fn scratch_is_within_what_is_planned() {
        let (mut rng, mut full) = (Rng::new(4), 0);
        for _ in 0..2000 {
            let [group, kv_heads, tokens] = [1 + rng.below(16), 1 + rng.below(8), 1 + rng.below(600)];
            let (bits, width) = (6 + rng.below(13), 8 * (1 + rng.below(72)));
            let context = 1 + rng.below(1 << bits);
            let tiles = kv_heads * (tokens * group).div_ceil(TILE_QUERIES);
            let span = 1 + rng.below(context);
            let task = TaskTiles { tiles, span, width, kinds: [NumberFormat::F16; 2], flash: false };
            let groups = groups(&[task]);
            let scratch = groups.iter().map(|group| task.scratch(group.at_once, group.parts).iter().sum::<usize>());
            let planned = device_attention_bytes(group * kv_heads, [tokens, 1], context, width);
            let needed = scratch.max().unwrap();
            assert!(needed <= planned + 4 * ALIGN, "{needed} bytes and {planned} planned of {task:?}");
            full += usize::from(3 * needed > planned);
        }
        assert!(full > 300, "{full} plans are no more than three times what is needed");
    }

    #[test]
    fn tasks_of_one_kind_are_launched_together_while_their_scores_fit() {
        let kinds = [NumberFormat::F16; 2];
        let task = |tiles, span| TaskTiles { tiles, span, width: 64, kinds, flash: false };
        let of = |all: &[TaskTiles]| {
            let mut found = Vec::new();
            for TaskGroup { tasks, at_once, tiles, parts } in groups(all) {
                found.push((tasks, at_once, tiles, parts));
            }
            found
        };
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[task(8, 100), task(8, 600), task(4, 9)]), [(0..3, 20, 20, true)]);
        assert_eq!(of(&[task(8, 100), task(300, 500)]), [(0..2, 308, 308, false)]);
        let flash = TaskTiles { flash: true, ..task(9, 70_000) };
        let other = TaskTiles { kinds: [NumberFormat::F32; 2], ..task(1, 1) };
        assert_eq!(of(&[task(1, 1), flash, flash, other]).len(), 3);
        // 16 MiB of scores: 1024 positions of 1024 tiles.
        assert_eq!(of(&[task(1024, 1024), task(1, 1)]), [(0..1, 1024, 1024, false), (1..2, 1, 1, false)]);
        assert_eq!(of(&[task(1, 1), task(2048, 1024)]), [(0..1, 1, 1, false), (1..2, 1024, 2048, false)]);
        assert_eq!(of(&[task(4, 1 << 20)]), [(0..1, 1, 4, true)], "some tiles at a time");
        assert_eq!(task(2, 600).scratch(2, true), [4 * 4 * 600 * 2, 8 * 4 * 3 * 2, 32, 4 * 4 * 3 * 64 * 2]);
        assert_eq!(flash.scratch(9, true), [0; 4]);
    }
}
