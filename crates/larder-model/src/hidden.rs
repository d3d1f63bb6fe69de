//! The residual stream between the layers of a pass: in main memory, or on a device whose operations are still running.

use candle_core::{Device, Tensor};

use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::matrix::with_f32;

/// Activations `[tokens, width]` in main memory or on a device.
#[derive(Clone)]
pub enum Hidden {
    /// In main memory.
    Host(Tensor),
    /// Rows of a chain of operations.
    Device(DeviceRows),
}

/// Where activations, or keys and values, are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    /// In main memory.
    Host,
    /// On a device.
    Device,
}

impl Hidden {
    /// The activations in main memory. Waits for a device.
    pub fn on_host(&self, ops: Option<&dyn DeviceOps>) -> Result<Tensor> {
        match (self, ops) {
            (Hidden::Host(x), _) => Ok(x.clone()),
            (Hidden::Device(rows), Some(ops)) => Ok(receive(ops, &[*rows])?.remove(0)),
            (Hidden::Device(_), None) => unreachable!("there are rows on a device only where there is one"),
        }
    }

    /// The activations on a device.
    pub fn on_device(&self, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        match self {
            Hidden::Host(x) => {
                let width = x.dim(1)?;
                with_f32(x, |x| ops.send(x, width))?
            }
            Hidden::Device(rows) => Ok(*rows),
        }
    }
}

/// Waits for a chain, and copies rows back.
pub(crate) fn receive(ops: &dyn DeviceOps, wanted: &[DeviceRows]) -> Result<Vec<Tensor>> {
    let mut values: Vec<Vec<f32>> = wanted.iter().map(|rows| vec![0.0; rows.rows * rows.width]).collect();
    ops.receive(&mut wanted.iter().copied().zip(values.iter_mut().map(|values| &mut values[..])).collect::<Vec<_>>())?;
    let tensor =
        |(rows, values): (&DeviceRows, _)| Ok(Tensor::from_vec(values, (rows.rows, rows.width), &Device::Cpu)?);
    wanted.iter().zip(values).map(tensor).collect()
}
