//! Matmuls with weights in main memory.

use larder_kernels::{Product, products};

use super::{State, TASK_VALUES};
use crate::compute::timed;
use crate::device::DeviceProduct;
use crate::error::Result;
use crate::ops::{CpuOps, Few, HostBuffer, Rows};
use crate::weights::PlacedMatrix;

impl CpuOps {
    /// Matmuls of one `x`, in one batch.
    pub(super) fn matmul(&self, x: Rows, weights: &[&PlacedMatrix]) -> Result<Few<Rows>> {
        let mut state = self.lock();
        let mut outs: Few<_> = weights.iter().map(|weights| state.rows.take(x.rows, weights.rows())).collect();
        let State { rows, inputs, .. } = &mut *state;
        let quantise = !self.exact && weights.iter().any(|weights| !weights.kind().is_float());
        let inputs = inputs.fill_on(&self.pool, rows.values(x), x.width, quantise);
        let mut batch: Few<Product> = Few::new();
        let (mut of_device, mut device) = (Vec::new(), None);
        let values = outs.iter().map(HostBuffer::len).sum();
        for (weights, out) in weights.iter().zip(&mut outs) {
            weights.collect(&inputs);
            let out = out.values();
            match (weights.in_memory(), weights.on_device()) {
                (Some(weights), _) => batch.push(Product { weights, x: inputs, pick: None, out }),
                (None, place) => {
                    let (own, weights) = place.expect("the weights are somewhere");
                    device = Some(own);
                    of_device.push(DeviceProduct { weights, pick: None, out });
                }
            }
        }
        timed(&self.clocks.products, || self.shared(values, |pool| products(pool, &mut batch)));
        device.map_or(Ok(()), |device| device.matmul(&inputs, &mut of_device))?;
        drop((batch, of_device));
        Ok(outs.into_iter().map(|out| rows.push(out)).collect())
    }

    /// One matmul per head, of the first values that each head has in `x`.
    pub(super) fn matmul_heads(&self, x: Rows, heads: &[PlacedMatrix]) -> Result<Rows> {
        let mut state = self.lock();
        let (count, step) = (heads.len(), x.width / heads.len());
        let (cols, width) = (heads[0].cols(), heads[0].rows());
        // The inputs of a head lie together, and so do its outputs, `[heads, tokens, values]`.
        let mut of_heads = state.rows.take(count, x.rows * cols);
        let mut by_head = state.rows.take(count, x.rows * width);
        let mut out = state.rows.take(x.rows, count * width);
        let State { rows, inputs, .. } = &mut *state;
        let values = rows.values(x);
        self.run_chunks(&mut of_heads, x.rows * cols, &|head, own| {
            for (row, own) in values.chunks_exact(x.width).zip(own.chunks_exact_mut(cols)) {
                own.copy_from_slice(&row[head * step..][..cols]);
            }
        });
        let inputs = inputs.fill_on(&self.pool, of_heads.values(), cols, !self.exact && !heads[0].kind().is_float());
        let mut batch = Vec::with_capacity(count);
        for (head, (weights, out)) in heads.iter().zip(by_head.values().chunks_exact_mut(x.rows * width)).enumerate() {
            let x = inputs.part(head * x.rows..(head + 1) * x.rows);
            weights.collect(&x);
            match (weights.in_memory(), weights.on_device()) {
                (Some(weights), _) => batch.push(Product { weights, x, pick: None, out }),
                (None, place) => {
                    let (device, weights) = place.expect("the weights are somewhere");
                    device.matmul(&x, &mut [DeviceProduct { weights, pick: None, out }])?;
                }
            }
        }
        let values = count * x.rows * width;
        timed(&self.clocks.products, || self.shared(values, |pool| products(pool, &mut batch)));
        let from = &*by_head.values();
        let some = TASK_VALUES.div_ceil(count * width);
        self.run_chunks(&mut out, some * count * width, &|task, out| {
            for (at, head_row) in out.chunks_exact_mut(width).enumerate() {
                let (token, head) = (task * some + at / count, at % count);
                head_row.copy_from_slice(&from[(head * x.rows + token) * width..][..width]);
            }
        });
        [of_heads, by_head].into_iter().for_each(|taken| rows.give_back(taken));
        Ok(rows.push(out))
    }
}
