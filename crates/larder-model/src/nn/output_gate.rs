//! Output gates: factors on what attention yields, made of its input.

use candle_core::{Device, Tensor};
use larder_core::softplus;

use super::activation::{sigmoid, silu};
use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};

/// Where the factor on the output of attention comes from.
pub enum OutputGate {
    /// None.
    None,
    /// A function of a product of its own: `[heads · value_dim, hidden]`, or `[heads, hidden]` for a gate per head.
    Product(Linear, GateFunction),
}

/// The function of an output gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GateFunction {
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `x / (1 + e^-x)`
    Silu,
    /// `ln(1 + e^x)`
    Softplus,
    /// `x`
    Identity,
}

impl GateFunction {
    /// Its value at `x`.
    pub(crate) fn of(self, x: f32) -> f32 {
        match self {
            GateFunction::Sigmoid => sigmoid(x),
            GateFunction::Silu => silu(x),
            GateFunction::Softplus => softplus(x),
            GateFunction::Identity => x,
        }
    }

    /// Its values at each value of a tensor.
    pub(super) fn apply(self, gate: &Tensor) -> Result<Tensor> {
        let values = with_f32(gate, |gate| gate.iter().map(|x| self.of(*x)).collect::<Vec<_>>())?;
        Ok(Tensor::from_vec(values, gate.shape(), &Device::Cpu)?)
    }
}

/// What an output gate is made of, on a device.
#[derive(Clone, Copy)]
pub(super) struct DeviceGate {
    /// `[n, heads · any]`
    pub rows: DeviceRows,
    pub function: GateFunction,
}

impl DeviceGate {
    /// `mixed [n, heads · any]` times the gate, begun on the device.
    pub fn begin(self, mixed: DeviceRows, heads: usize, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        ops.gate(mixed, self.rows, self.function, heads)
    }
}

/// `mixed [n, heads · value_dim]` times `gate [n, heads · value_dim]`, or `[n, heads]` for a gate per head.
pub(super) fn gated(mixed: Tensor, gate: &Tensor, heads: usize) -> Result<Tensor> {
    let (n, width) = mixed.dims2()?;
    let per_head = gate.dim(1)? / heads;
    let out = mixed.reshape((n, heads, width / heads))?.broadcast_mul(&gate.reshape((n, heads, per_head))?)?;
    Ok(out.reshape((n, width))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_gates_are_per_value_or_per_head() {
        let tensor = |values: &[f32], width: usize| {
            Tensor::from_vec(values.to_vec(), (values.len() / width, width), &Device::Cpu).unwrap()
        };
        let mixed = tensor(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 4); // two tokens, two heads of two values
        let rows = |gate: &Tensor| gated(mixed.clone(), gate, 2).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(rows(&tensor(&[1.0, 10.0, 0.5, 2.0], 2)), [[1.0, 2.0, 30.0, 40.0], [2.5, 3.0, 14.0, 16.0]]);
        let each = tensor(&[1.0, 2.0, 1.0, 0.0, 0.0, 1.0, 2.0, 1.0], 4);
        assert_eq!(rows(&each), [[1.0, 4.0, 3.0, 0.0], [0.0, 6.0, 14.0, 8.0]]);
    }

    #[test]
    fn gate_functions_stay_finite_and_exact_far_out() {
        let of = |function: GateFunction| {
            let gate = Tensor::from_vec(vec![0.0f32, 100.0, -100.0], (3, 1), &Device::Cpu).unwrap();
            function.apply(&gate).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let softplus = of(GateFunction::Softplus);
        assert_eq!(softplus[..2], [2.0f32.ln(), 100.0]);
        assert!((0.0..2e-38).contains(&softplus[2]), "{softplus:?}");
        assert_eq!(of(GateFunction::Silu)[..2], [0.0, 100.0]);
        let sigmoid = of(GateFunction::Sigmoid);
        assert_eq!(sigmoid[..2], [0.5, 1.0]);
        assert!((0.0..1e-30).contains(&sigmoid[2]), "{sigmoid:?}");
    }
}
