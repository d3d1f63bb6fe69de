//! Output gates: factors on what attention yields, made of its input.

use crate::error::Result;
use crate::ops::{GateFunction, Ops, Rows};
use crate::weights::Linear;

/// Where the factor on the output of attention comes from.
pub enum OutputGate {
    /// None.
    None,
    /// A function of a matmul of its own: `[heads · value_dim, hidden]`, or `[heads, hidden]` for a gate per head.
    Product(Linear, GateFunction),
}

/// What an output gate is made of.
#[derive(Clone, Copy)]
pub(super) struct GateRows {
    /// `[n, heads · any]`
    pub rows: Rows,
    pub function: GateFunction,
}

impl GateRows {
    /// `mixed [n, heads · any]` times the gate.
    pub fn apply(self, mixed: Rows, heads: usize, ops: &dyn Ops) -> Result<Rows> {
        ops.gate(mixed, self.rows, self.function, heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::ComputeContext;

    #[test]
    fn output_gates_are_per_value_or_per_head() {
        let compute = ComputeContext::single_threaded();
        let ops = compute.ops();
        let gated = |gate: &[f32], width: usize| {
            let mixed = ops.send(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 4).unwrap(); // two tokens, two heads of two values
            let gate = GateRows { rows: ops.send(gate, width).unwrap(), function: GateFunction::Identity };
            ops.download(&[gate.apply(mixed, 2, ops).unwrap()]).unwrap()[0].to_vec()
        };
        assert_eq!(gated(&[1.0, 10.0, 0.5, 2.0], 2), [1.0, 2.0, 30.0, 40.0, 2.5, 3.0, 14.0, 16.0]);
        assert_eq!(gated(&[1.0, 2.0, 1.0, 0.0, 0.0, 1.0, 2.0, 1.0], 4), [1.0, 4.0, 3.0, 0.0, 0.0, 6.0, 14.0, 8.0]);
    }

    #[test]
    fn gate_functions_stay_finite_and_exact_far_out() {
        let of = |function: GateFunction| [0.0, 100.0, -100.0].map(|x| function.of(x));
        let softplus = of(GateFunction::Softplus);
        assert_eq!(softplus[..2], [2.0f32.ln(), 100.0]);
        assert!((0.0..2e-38).contains(&softplus[2]), "{softplus:?}");
        assert_eq!(of(GateFunction::Silu)[..2], [0.0, 100.0]);
        let sigmoid = of(GateFunction::Sigmoid);
        assert_eq!(sigmoid[..2], [0.5, 1.0]);
        assert!((0.0..1e-30).contains(&sigmoid[2]), "{sigmoid:?}");
    }
}
