//! The indexers of sparse attention, which choose the rows that a query attends to.

mod attention_indexer;
mod block_indexer;
mod block_keys;
mod head_indexer;
mod index_choice;
mod lightning;
mod selection;

pub use attention_indexer::AttentionIndexer;
pub use block_indexer::{BlockIndexer, BlockIndexerShape, IndexProducts};
pub(super) use block_keys::BlockKeys;
pub use head_indexer::{HeadIndexer, HeadIndexerShape};
pub(super) use index_choice::{choose, head_rotation};
pub use lightning::{Indexer, IndexerShape};
pub use selection::ChoiceShape;
