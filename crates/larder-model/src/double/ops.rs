//! Double of a device that computes chains of operations.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_kernels::{AttentionArgs, AttentionTask, Inputs};

use super::{AttentionDouble, ProductsDouble};
use crate::device::{DeviceAttention, DeviceKvView, DeviceOps, DeviceProduct, DeviceProducts, DeviceRows};
use crate::error::{ModelError, Result};
use crate::nn::rms_row;

/// Double of [`DeviceOps`]: computes each operation at once, with the weights and the KV cache of two other doubles.
pub struct OpsDouble {
    products: Arc<ProductsDouble>,
    attention: Arc<AttentionDouble>,
    state: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    kept: Vec<Vec<f32>>,
    rows: Vec<(DeviceRows, Vec<f32>)>,
    /// The first error of the chain.
    failed: Option<ModelError>,
    received: u64,
}

impl Inner {
    fn push(&mut self, width: usize, values: Vec<f32>) -> DeviceRows {
        let rows = DeviceRows { id: self.rows.len(), rows: values.len() / width, width };
        self.rows.push((rows, values));
        rows
    }

    fn values(&self, rows: DeviceRows) -> &[f32] {
        let (known, values) = &self.rows[rows.id];
        assert_eq!(*known, rows, "rows of this chain");
        values
    }
}

impl OpsDouble {
    /// A device with these weights and this KV cache.
    pub fn new(products: Arc<ProductsDouble>, attention: Arc<AttentionDouble>) -> Self {
        OpsDouble { products, attention, state: Mutex::default() }
    }

    /// Number of chains whose results were received.
    pub fn chains(&self) -> u64 {
        self.lock().received
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a result to the chain; after an error it is not a number.
    fn push(&self, width: usize, mut values: Vec<f32>, computed: Result<()>) -> DeviceRows {
        let mut state = self.lock();
        if let Err(error) = computed {
            values.fill(f32::NAN);
            state.failed.get_or_insert(error);
        }
        state.push(width, values)
    }
}

impl DeviceOps for OpsDouble {
    fn keep(&self, values: &[f32]) -> Result<usize> {
        let mut state = self.lock();
        state.kept.push(values.to_vec());
        Ok(state.kept.len() - 1)
    }

    fn begin(&self) {
        let mut state = self.lock();
        state.rows.clear();
        state.failed = None;
    }

    fn send(&self, values: &[f32], width: usize) -> Result<DeviceRows> {
        Ok(self.lock().push(width, values.to_vec()))
    }

    fn attend(&self, tasks: &[&AttentionArgs<DeviceKvView>]) -> Result<DeviceRows> {
        let outputs = |args: &AttentionArgs<DeviceKvView>| args.seen.len() * args.heads * args.values.width;
        let mut values = vec![0.0; tasks.iter().map(|args| outputs(args)).sum()];
        let mut rest = &mut values[..];
        let mut own = Vec::new();
        for args in tasks {
            let (out, others) = rest.split_at_mut(outputs(args));
            let args = args.with_kv(args.keys.clone(), args.values.clone());
            own.push(AttentionTask { args, out });
            rest = others;
        }
        let computed = self.attention.attend(&mut own);
        Ok(self.push(tasks.first().map_or(1, |args| args.heads * args.values.width), values, computed))
    }

    fn multiply(&self, x: DeviceRows, weights: usize) -> Result<DeviceRows> {
        let (rows, quantised) = self.products.shape(weights);
        let mut inputs = Inputs::new();
        inputs.fill(self.lock().values(x), x.width, quantised);
        let mut out = vec![0.0; x.rows * rows];
        let computed = self.products.multiply(&inputs, &mut [DeviceProduct { weights, pick: None, out: &mut out }]);
        Ok(self.push(rows, out, computed))
    }

    fn add(&self, x: DeviceRows, y: DeviceRows, factor: f32) -> Result<DeviceRows> {
        let mut state = self.lock();
        assert_eq!((x.rows, x.width), (y.rows, y.width));
        let scaled = |v: f32| if factor == 1.0 { v } else { v * factor + 0.0 };
        let sum = state.values(x).iter().zip(state.values(y)).map(|(x, y)| x + scaled(*y)).collect();
        Ok(state.push(x.width, sum))
    }

    fn add_row(&self, x: DeviceRows, row: usize) -> Result<DeviceRows> {
        let mut state = self.lock();
        let sum = state.values(x).iter().zip(state.kept[row].iter().cycle()).map(|(x, y)| x + y).collect();
        Ok(state.push(x.width, sum))
    }

    fn rms_norm(&self, x: DeviceRows, weight: usize, eps: f64) -> Result<DeviceRows> {
        let mut state = self.lock();
        let mut values = state.values(x).to_vec();
        values.chunks_exact_mut(x.width).for_each(|row| rms_row(row, &state.kept[weight], eps));
        Ok(state.push(x.width, values))
    }

    fn receive(&self, wanted: &mut [(DeviceRows, &mut [f32])]) -> Result<()> {
        let mut state = self.lock();
        state.received += 1;
        match state.failed.take() {
            Some(error) => Err(error),
            None => {
                wanted.iter_mut().for_each(|(rows, out)| out.copy_from_slice(state.values(*rows)));
                Ok(())
            }
        }
    }
}
