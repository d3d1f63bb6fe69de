//! How the queries of an attention are divided into tiles and launches.

use std::ops::Range;

use larder_core::NumberFormat;
use larder_kernels::{AttentionArgs, TILE_POSITIONS};
use larder_model::DeviceKvView;

use crate::launches::{AttentionKernelArgs, TILE_QUERIES};

/// Bytes of scores per launch, unless one tile of queries has more.
const MAX_SCORE_BYTES: usize = 16 << 20;
/// The least queries that are computed in half precision.
const FLASH_QUERIES: usize = 32;
/// Positions that it multiplies at once, which are in one page.
const FLASH_POSITIONS: usize = 16;
/// The most tiles of queries whose position tiles are apart: as many blocks as keep large devices busy.
const FEW_TILES: usize = 256;
/// The most tiles of a launch: the limit of CUDA for blocks in y.
const MAX_TILES: usize = 65_535;

/// Whether an attention can be computed in half precision, and has as many queries as a prompt: a few drafted tokens are computed as
/// those that are not drafted. Pages have `page` positions.
pub fn takes_halves(args: &AttentionArgs<DeviceKvView>, kinds: [NumberFormat; 2], page: usize) -> bool {
    let widths = [args.keys.width, args.values.width];
    args.seen.len() >= FLASH_QUERIES
        && page >= FLASH_POSITIONS
        && kinds[0] == kinds[1]
        && widths.iter().all(|width| width.is_multiple_of(4))
}

/// The most tiles of one launch if a tile has scores for `span` positions.
pub fn tiles_at_once(span: usize) -> usize {
    (MAX_SCORE_BYTES / (4 * TILE_QUERIES * span)).clamp(1, MAX_TILES)
}

/// The bytes of the sums of each position tile, where few tiles of queries see many positions, so that one launch for each position tile
/// keeps more of a device busy. `None` where a block for each tile of queries adds up all values.
pub fn bytes_of_parts(tiles: usize, span: usize, width: usize) -> Option<usize> {
    let bytes = 4 * TILE_QUERIES * AttentionKernelArgs::tile_stride(span) * width * tiles;
    ((1..=FEW_TILES).contains(&tiles) && span > TILE_POSITIONS && bytes <= MAX_SCORE_BYTES).then_some(bytes)
}

/// The number of tiles of [`TILE_QUERIES`] queries, over all key heads, and the most positions that one tile spans.
pub fn tiles_and_span(args: &AttentionArgs<DeviceKvView>) -> (usize, usize) {
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
