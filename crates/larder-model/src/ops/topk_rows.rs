//! Operations of chains for attention to rows that an indexer chooses.

use std::ops::Range;

use larder_kernels::AttentionArgs;

use super::{Heads, Rotation, Rows};
use crate::device::KvView;
use crate::error::Result;

/// The queries of an indexer for the tokens of a step: for each token one, or one for each part of the heads of
/// attention. Each makes a list of positions.
#[derive(Clone, Copy, Debug)]
pub struct IndexChoice<'a> {
    /// `[tokens, parts · heads · width]`
    pub queries: Rows,
    /// `[tokens, parts · heads]`: factors on what the heads find; `None` for none.
    pub weights: Option<Rows>,
    /// Lists of each token.
    pub parts: usize,
    /// Heads of a query.
    pub heads: usize,
    /// Factor on the products.
    pub scale: f32,
    /// Whether products below 0 count as 0.
    pub rectified: bool,
    /// The most rows, or blocks of rows, that are chosen.
    pub count: usize,
    /// Rows or blocks among which it chooses.
    pub blocks: IndexBlocks,
    /// `[tokens, parts]`
    pub seen: &'a [SeenRows],
}

/// What an indexer chooses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexBlocks {
    /// Rows, each of which stands for this many positions; positions behind the last row are chosen too.
    OfPositions(usize),
    /// Blocks of rows, by the highest score of a row, where each row stands for a position.
    OfRows {
        /// Rows of a block.
        rows: usize,
        /// The last blocks that come before all others, at least one and at most as many as are chosen; the last one
        /// may be incomplete.
        local: usize,
    },
}

/// What a token sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeenRows {
    /// Rows of the indexer: the first ones.
    pub rows: usize,
    /// Positions, its own included.
    pub positions: usize,
}

impl IndexChoice<'_> {
    /// Positions of each row or block that is chosen.
    pub fn block(&self) -> usize {
        let (IndexBlocks::OfPositions(block) | IndexBlocks::OfRows { rows: block, .. }) = self.blocks;
        block
    }

    /// The most positions of a list: those of the chosen blocks, and of one that is not complete.
    pub fn most(&self) -> usize {
        self.count.saturating_mul(self.block()).saturating_add(self.block() - 1)
    }

    /// How many rows or blocks a list chooses from.
    pub fn candidates(&self, seen: SeenRows) -> usize {
        match self.blocks {
            IndexBlocks::OfPositions(_) => seen.rows,
            IndexBlocks::OfRows { rows, .. } => seen.rows.div_ceil(rows),
        }
    }

    /// How many positions a list has.
    pub fn chosen(&self, seen: SeenRows) -> usize {
        let (candidates, block) = (self.candidates(seen), self.block());
        if candidates <= self.count {
            return seen.positions;
        }
        // A block that is not complete is behind the candidates, or the last of them.
        (self.count * block + seen.positions).saturating_sub(candidates * block)
    }
}

/// How the rows of blocks of tokens become keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockPooling {
    /// Rows of a block.
    pub rate: usize,
    /// Of rows that are values and then logits, values that are [kept](super::Ops::keep), `[rate, channels]`: they are
    /// added to the logits by the place in the block, and values weighted by the softmax. Without them, the key is the
    /// mean of the rows.
    pub places: Option<usize>,
    /// Whether rows with places have twice the channels of a key: those of the block before take part with the first
    /// half, and those of the block with the second.
    pub overlap: bool,
}

impl BlockPooling {
    /// Values of a row for each of a key.
    pub fn values_of_row(&self) -> usize {
        match (self.places, self.overlap) {
            (None, _) => 1,
            (Some(_), false) => 2,
            (Some(_), true) => 4,
        }
    }
}

/// The choice of rows by an indexer, and attention to them. A device keeps the last choice.
pub trait ChoiceOps {
    /// The first part of [`attend_new`](super::Ops::attend_new): norms and rotations of new tokens are computed, and
    /// keys and values written. The result are the queries, `[tokens, heads · key width]`.
    fn begin_heads(&self, heads: &Heads, tasks: &[&AttentionArgs<KvView>]) -> Result<Rows>;

    /// Attention of queries, `[tokens, heads · key width]`, to all rows that each sees, with the values of a bias that
    /// is [kept](super::Ops::keep), if the tasks have one. Tasks come without queries.
    fn attend_all(&self, queries: Rows, tasks: &[&AttentionArgs<KvView>], bias: Option<usize>) -> Result<Rows>;

    /// Norm and rotation of `heads` heads of each row of `x`: the weight of an RMS norm, and what it adds under the
    /// root. May overwrite `x`.
    fn rotate_heads(
        &self,
        x: Rows,
        heads: usize,
        norm: Option<(usize, f64)>,
        rotation: Option<Rotation>,
    ) -> Result<Rows>;

    /// Rows that are those of `x` and then those of `y`.
    fn beside(&self, x: Rows, y: Rows) -> Result<Rows>;

    /// Some columns of `x`.
    fn columns(&self, x: Rows, first: usize, width: usize) -> Result<Rows>;

    /// A row for each of some blocks of rows of each sequence, which are one head: `[blocks, width]`.
    fn pool_blocks(&self, rows: &[(KvView, Range<usize>)], pooling: &BlockPooling) -> Result<Rows>;

    /// Chooses the positions of each list: those of the rows with the highest scores, out of the rows of its sequence,
    /// and those behind the last row. `rows` has for each sequence its rows, one head of them, and its lists. A list is
    /// ascending; of equal scores the earlier row is chosen. Scores are those of [`larder_kernels::index_scores`]. The
    /// lists are kept until the next choice, or the next lists that are [sent](Self::send_choice).
    fn choose_rows(&self, index: &IndexChoice, rows: &[(KvView, usize)]) -> Result<()>;

    /// Attention of queries on the device, `[tokens, heads · key width]`, to the rows of the last choice: `counts` has
    /// the length of each list, of which a token has one, or one for each part of its heads. Tasks come without
    /// queries.
    fn attend_chosen(&self, queries: Rows, tasks: &[&AttentionArgs<KvView>], counts: &[usize]) -> Result<Rows>;

    /// Attention of queries on the device as [`attend_chosen`](Self::attend_chosen), to rows of two sources, whose
    /// pages are one view: of each token to the first `counts` rows, or if they are `listed` to those of the list of
    /// the last choice, which has this length; and behind them to the rows that its task lets it see.
    fn attend_joined(
        &self,
        queries: Rows,
        tasks: &[&AttentionArgs<KvView>],
        counts: &[usize],
        listed: bool,
    ) -> Result<Rows>;

    /// Takes lists that the CPU has chosen as the last choice; none has more than `most` positions.
    fn send_choice(&self, lists: &[&[u32]], most: usize) -> Result<()>;

    /// Waits for the lists of the last choice, which have these lengths.
    fn receive_choice(&self, counts: &[usize]) -> Result<Vec<Vec<u32>>>;
}
