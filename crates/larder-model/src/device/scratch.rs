//! Scratch memory of attention and of chosen experts on a device, beside inputs and outputs: its bounds, from which
//! memory plans count it.

use larder_kernels::TILE_POSITIONS;

/// The most tokens of a step whose experts a device chooses.
pub const CHOICE_TOKENS: usize = 32;
/// Queries of a tile, which read keys and values together. Kernels have the same number.
pub const TILE_QUERIES: usize = 4;
/// Bytes of scores per launch, unless one tile of queries has more. The sums of apart tiles of positions have at most
/// as many.
pub const MAX_SCORE_BYTES: usize = 16 << 20;
/// The most tiles of queries whose position tiles are apart: as many blocks as keep large devices busy.
pub const FEW_TILES: usize = 256;

/// The most tiles of positions that `positions` positions are in, wherever the first one is.
pub fn position_tiles(positions: usize) -> usize {
    positions / TILE_POSITIONS + 2
}

/// The most bytes of scores, factors and sums of attention of `tokens` tokens of some sequences, with this number of
/// query heads, which see up to `positions` positions with values up to `width` wide.
pub fn device_attention_bytes(heads: usize, [tokens, sequences]: [usize; 2], positions: usize, width: usize) -> usize {
    let [tile, position_tiles] = [4 * TILE_QUERIES * positions.max(1), position_tiles(positions)];
    // Those of each key head and sequence are whole tiles.
    let tiles = heads.saturating_mul(tokens.div_ceil(TILE_QUERIES).saturating_add(sequences));
    let scores = tile.max(MAX_SCORE_BYTES).min(tile.saturating_mul(tiles));
    // Fewer positions are seen by more tiles at once, with two tiles of positions more each.
    let factors = (8 * position_tiles + 4) * scores.div_ceil(4 * positions.max(1)) + 20 * TILE_QUERIES * tiles;
    let sums = 4 * TILE_QUERIES * position_tiles * width * tiles.min(FEW_TILES);
    scores + factors + sums.min(MAX_SCORE_BYTES)
}
