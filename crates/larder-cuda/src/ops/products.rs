//! Products of rows of a chain with resident weights, whose lists are kept on the device.

use std::sync::Arc;

use larder_model::Rows;

use super::State;
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES};
use crate::launch_queue::LaunchQueue;
use crate::launches::{ProductBatch, word};

/// The most lists of products that are kept on the device.
const MAX_LISTS: usize = 4096;
/// The most tokens of a step whose lists are kept, as for many sequences. Prompts are of many lengths, and their lists
/// seldom come again.
const KEPT_TOKENS: usize = 64;

/// What a list of products depends on. Results are at the same addresses in every other token, and so lists are written
/// twice.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct ListKey {
    /// With the address of each result.
    weights: Vec<(usize, u64)>,
    x: u64,
    tokens: usize,
}

impl State {
    /// Computes the products of a batch, whose weights have one number format; results are `[tokens, rows]` each.
    pub(super) fn matmul(
        &mut self,
        queue: &Arc<LaunchQueue>,
        x: Rows,
        ids: &[usize],
        batch: &mut ProductBatch,
    ) -> Result<Vec<Rows>> {
        let x_at = if batch.takes_blocks() { self.quantised(x)? } else { self.at(x)? };
        let (mut results, mut weights) = (Vec::with_capacity(ids.len()), Vec::with_capacity(ids.len()));
        for (product, id) in batch.products_mut().iter_mut().zip(ids) {
            let (rows, out) = self.result(x.rows, product.rows as usize)?;
            (product.x, product.out, product.tokens) = (x_at, out, word(x.rows)?);
            results.push(rows);
            weights.push((*id, out));
        }
        self.launch_products(queue, batch, ListKey { weights, x: x_at, tokens: x.rows })?;
        Ok(results)
    }

    /// Computes a product for each head of `x`, of one shape.
    pub(super) fn matmul_heads(
        &mut self,
        queue: &Arc<LaunchQueue>,
        x: Rows,
        ids: &[usize],
        batch: &mut ProductBatch,
    ) -> Result<Rows> {
        let (step, width) = (x.width / ids.len(), batch.products().iter().map(|p| p.rows as usize).sum());
        let blocks = batch.takes_blocks();
        let (x_at, head_bytes) =
            if blocks { (self.quantised(x)?, step / BLOCK * BLOCK_BYTES) } else { (self.at(x)?, 4 * step) };
        if blocks && !step.is_multiple_of(BLOCK) {
            return Err(GpuError::Unsupported(format!("heads of {step} values are not whole blocks of {BLOCK}")));
        }
        let (result, out) = self.result(x.rows, width)?;
        let (mut before, mut weights) = (0, Vec::with_capacity(ids.len()));
        for (head, (product, id)) in batch.products_mut().iter_mut().zip(ids).enumerate() {
            (product.x, product.out) = (x_at + (head * head_bytes) as u64, out + 4 * before);
            (product.x_stride, product.out_stride, product.tokens) = (word(x.width)?, word(width)?, word(x.rows)?);
            before += u64::from(product.rows);
            weights.push((*id, product.out));
        }
        self.launch_products(queue, batch, ListKey { weights, x: x_at, tokens: x.rows })?;
        Ok(result)
    }

    /// Launches products, whose list is written when it comes for the first time, or in a step of many tokens.
    fn launch_products(&mut self, queue: &Arc<LaunchQueue>, batch: &ProductBatch, key: ListKey) -> Result<()> {
        let failures = queue.failures();
        if std::mem::replace(&mut self.failures, failures) != failures {
            // Copies of lists to the device may have been lost.
            self.lists.clear();
        }
        if key.tokens > KEPT_TOKENS {
            let list = queue.stage(batch.bytes(), |_, out| {
                batch.write(out);
                Ok(())
            })?;
            return self.launches.products(batch, list);
        }
        if !self.lists.contains_key(&key) {
            let mut bytes = vec![0; batch.bytes()];
            batch.write(&mut bytes);
            if self.lists.len() == MAX_LISTS {
                self.lists.clear();
            }
            let list = self.keep(queue, &bytes)?;
            self.lists.insert(key.clone(), list);
        }
        self.launches.products(batch, self.lists[&key].at())
    }
}
