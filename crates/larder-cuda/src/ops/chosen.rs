//! Chains with attention to rows that an indexer chooses.

use larder_kernels::AttentionArgs;
use larder_model::{DeviceChoice, DeviceHeads, DeviceIndex, DeviceKvView, DeviceRows};

use super::GpuOps;
use crate::attention::{ChosenTokens, IndexQueries, Queries};
use crate::error::GpuError;

impl DeviceChoice for GpuOps {
    fn begin_heads(
        &self,
        heads: &DeviceHeads,
        tasks: &[&AttentionArgs<DeviceKvView>],
    ) -> larder_model::Result<DeviceRows> {
        let mut state = self.lock();
        let (new, queries) = state.new_tokens(heads, tasks)?;
        self.attention.begin(tasks, Queries::HeadsOnly(&new))?;
        Ok(queries)
    }

    fn choose_rows(&self, index: &DeviceIndex, rows: &[(DeviceKvView, usize)]) -> larder_model::Result<()> {
        let state = self.lock();
        let weights = index.weights.map_or(Ok(0), |weights| state.at(weights))?;
        let addresses = IndexQueries { queries: state.at(index.queries)?, weights };
        Ok(self.attention.choose(index, addresses, rows)?)
    }

    fn attend_chosen(
        &self,
        queries: DeviceRows,
        tasks: &[&AttentionArgs<DeviceKvView>],
        counts: &[usize],
    ) -> larder_model::Result<DeviceRows> {
        let mut state = self.lock();
        let tokens: usize = tasks.iter().map(|args| args.seen.len()).sum();
        let width = tasks.first().map_or(0, |args| args.heads * args.keys.width);
        let fits =
            [tokens, width] == [queries.rows, queries.width] && tokens > 0 && counts.len().is_multiple_of(tokens);
        if !fits || counts.is_empty() {
            return Err(GpuError::Unsupported(format!("{tokens} tokens do not have queries {queries:?}")).into());
        }
        let tokens = ChosenTokens { queries: state.at(queries)?, counts, parts: counts.len() / tokens };
        let outputs = self.attention.begin(tasks, Queries::Chosen(&tokens))?;
        Ok(state.push_outputs(tasks, outputs))
    }

    fn send_choice(&self, lists: &[&[u32]], most: usize) -> larder_model::Result<()> {
        Ok(self.attention.set_choice(lists, most)?)
    }

    fn receive_choice(&self, counts: &[usize]) -> larder_model::Result<Vec<Vec<u32>>> {
        Ok(self.attention.choice(counts)?)
    }
}
