//! Each operation on rows by itself, on every backend: the bits of the CPU, for drawn shapes and for values at the ends
//! of what f32 has.

use std::sync::Arc;

use larder_cuda::Gpu;
use larder_model::{
    Activation, ComputeContext, GateFunction, GateOrder, NormGate, Ops, Rotation, Rows, ScaledSides, StreamGate,
    StreamMix,
};

use crate::common::{Random, emulator, gpu};

/// Rows; the operations of a step without rows are not begun.
const ROWS: [usize; 5] = [1, 2, 3, 17, 65];
/// Values of a row, of a part of it where an operation has parts.
const WIDTHS: [usize; 9] = [1, 2, 7, 31, 32, 33, 64, 257, 1000];
/// Inputs of a case.
const INPUTS: usize = 3;
/// Parts of a row.
const PARTS: usize = 4;

/// Drawn values, and what a backend has of them.
struct Case<'a> {
    ops: &'a dyn Ops,
    rows: usize,
    width: usize,
    /// Each has room for `PARTS` times the width.
    values: &'a [Vec<f32>; INPUTS],
}

impl Case<'_> {
    /// The rows of an input, of this many parts.
    fn x(&self, input: usize, parts: usize) -> Rows {
        let width = parts * self.width;
        self.ops.send(&self.values[input][..self.rows * width], width).unwrap()
    }

    /// Values of an input that do not change, for this many parts.
    fn kept(&self, input: usize, parts: usize) -> usize {
        self.ops.keep(&self.values[input][..parts * self.width]).unwrap()
    }

    fn gate(&self, function: GateFunction, parts: usize) -> Rows {
        let gates = self.ops.send(&self.values[1][..self.rows * PARTS * parts], PARTS * parts).unwrap();
        self.ops.gate(self.x(0, PARTS), gates, function, PARTS).unwrap()
    }

    fn norm_gate(&self, order: GateOrder, function: GateFunction) -> Rows {
        let parts = if order == GateOrder::NormFirst { 1 } else { PARTS };
        let norm = NormGate { weight: self.kept(2, parts), width: self.width, eps: 1e-6, function, order };
        self.ops.norm_gate(self.x(0, PARTS), self.x(1, PARTS), &norm).unwrap()
    }

    fn rotated(&self, dim: usize, interleaved: bool) -> Rows {
        let cos_sin: Vec<_> = (0..self.rows * dim / 2).map(|i| ((i as f32).cos(), (i as f32).sin())).collect();
        let rotation = Some(Rotation { cos_sin: &cos_sin, first: self.width - dim, dim, interleaved });
        self.ops.rotate_heads(self.x(0, PARTS), PARTS, Some((self.kept(2, 1), 1e-6)), rotation).unwrap()
    }
}

type Operation = (&'static str, fn(&Case) -> Rows);

/// Those whose result follows from rows and values that do not change.
const OPERATIONS: &[Operation] = &[
    ("silu · up", |c| c.ops.combine(Activation::Silu, c.x(0, 1), c.x(1, 1)).unwrap()),
    ("gelu · up", |c| c.ops.combine(Activation::Gelu, c.x(0, 1), c.x(1, 1)).unwrap()),
    ("tanh gelu · up", |c| c.ops.combine(Activation::GeluTanh, c.x(0, 1), c.x(1, 1)).unwrap()),
    ("clamped swiglu", |c| {
        let act = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        c.ops.combine(act, c.x(0, 1), c.x(1, 1)).unwrap()
    }),
    ("clamped silu", |c| c.ops.combine(Activation::ClampedSilu { limit: 10.0 }, c.x(0, 1), c.x(1, 1)).unwrap()),
    ("relu", |c| c.ops.activate(Activation::Relu, c.x(0, 1)).unwrap()),
    ("relu²", |c| c.ops.activate(Activation::Relu2, c.x(0, 1)).unwrap()),
    ("silu", |c| c.ops.activate(Activation::Silu, c.x(0, 1)).unwrap()),
    ("softcap", |c| c.ops.softcap(c.x(0, 1), 30.0).unwrap()),
    ("sigmoid gate of a head", |c| c.gate(GateFunction::Sigmoid, 1)),
    ("silu gate of a head", |c| c.gate(GateFunction::Silu, 1)),
    ("softplus gate of a head", |c| c.gate(GateFunction::Softplus, 1)),
    ("sigmoid gate of a value", |c| c.gate(GateFunction::Sigmoid, c.width)),
    ("norm, then silu gate", |c| c.norm_gate(GateOrder::NormFirst, GateFunction::Silu)),
    ("norm, then sigmoid gate", |c| c.norm_gate(GateOrder::NormFirst, GateFunction::Sigmoid)),
    ("silu gate, then norm", |c| c.norm_gate(GateOrder::GateFirst, GateFunction::Silu)),
    ("scale", |c| c.ops.scale(c.x(0, 1), -0.37).unwrap()),
    ("scale by 0", |c| c.ops.scale(c.x(0, 1), 0.0).unwrap()),
    ("scale columns", |c| c.ops.scale_columns(c.x(0, 1), c.kept(2, 1)).unwrap()),
    ("add", |c| c.ops.add(c.x(0, 1), c.x(1, 1), 1.0).unwrap()),
    ("add a multiple", |c| c.ops.add(c.x(0, 1), c.x(1, 1), 0.22).unwrap()),
    ("sum of add and norm", |c| c.ops.add_norm(c.x(0, 1), c.x(1, 1), 0.5, c.kept(2, 1), 1e-5).unwrap()[0]),
    ("norm of add and norm", |c| c.ops.add_norm(c.x(0, 1), c.x(1, 1), 1.0, c.kept(2, 1), 1e-5).unwrap()[1]),
    ("add row", |c| c.ops.add_row(c.x(0, 1), c.kept(2, 1)).unwrap()),
    ("rms norm", |c| c.ops.rms_norm(c.x(0, 1), c.kept(2, 1), 1e-6).unwrap()),
    ("layer norm", |c| c.ops.layer_norm(c.x(0, 1), [c.kept(2, 1), c.kept(1, 1)], 1e-5).unwrap()),
    ("rms norms of parts", |c| c.ops.rms_groups(c.x(0, PARTS), PARTS, Some(c.kept(2, PARTS)), 1e-6).unwrap()),
    ("rms norms without weights", |c| c.ops.rms_groups(c.x(0, PARTS), PARTS, None, 1e-6).unwrap()),
    ("rotation of halves", |c| c.rotated(c.width / 2 * 2, false)),
    ("rotation of pairs", |c| c.rotated(c.width / 4 * 2, true)),
    ("beside", |c| c.ops.beside(c.x(0, 1), c.x(1, 2)).unwrap()),
    ("columns", |c| c.ops.columns(c.x(0, PARTS), c.width, 2 * c.width).unwrap()),
    ("slice", |c| c.ops.scale(c.ops.slice(c.x(0, 1), c.rows / 2, c.rows - c.rows / 2).unwrap(), 2.0).unwrap()),
    ("mean of streams", |c| c.ops.read_streams(c.x(0, PARTS), PARTS, None).unwrap()),
    ("sum of streams", |c| {
        let weights = c.ops.send(&c.values[1][..c.rows * PARTS], PARTS).unwrap();
        c.ops.read_streams(c.x(0, PARTS), PARTS, Some(weights)).unwrap()
    }),
    ("streams, weighted", |c| {
        let weights = c.ops.send(&c.values[2][..c.rows * PARTS], PARTS).unwrap();
        c.ops.write_streams(c.x(0, PARTS), c.x(1, 1), (weights, StreamMix::Weights)).unwrap()
    }),
    ("streams, mixed", |c| {
        let width = StreamMix::Matrix.width(PARTS);
        let values: Vec<f32> = c.values[2].iter().cycle().take(c.rows * width).copied().collect();
        let mix = (c.ops.send(&values, width).unwrap(), StreamMix::Matrix);
        c.ops.write_streams(c.x(0, PARTS), c.x(1, 1), mix).unwrap()
    }),
    ("scaled sides", |c| {
        let sides = ScaledSides { y: [c.kept(2, 1), c.kept(1, 1)], stream: [c.kept(1, 1), c.kept(0, 1)] };
        c.ops.add_scaled_sides(c.x(0, 1), c.x(1, 1), &sides).unwrap()
    }),
    ("gates of keys", |c| c.ops.gate_by_keys([c.x(0, PARTS), c.x(1, PARTS), c.x(2, 1)], PARTS).unwrap()),
    ("silu gates of streams", |c| c.ops.stream_gates(c.x(0, PARTS), PARTS, StreamGate::Silu).unwrap()),
    ("sigmoid gates of streams", |c| c.ops.stream_gates(c.x(0, PARTS), PARTS, StreamGate::TwiceSigmoid).unwrap()),
    ("gated mean", |c| c.ops.gated_mean(c.x(0, PARTS), c.x(1, PARTS), PARTS).unwrap()),
];

/// Values at an end of what f32 has, where functions turn, or plain.
const ENDS: [f32; 20] = [
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    -f32::MIN_POSITIVE,
    1e-45,
    -1e-40,
    0.0,
    -0.0,
    1e-20,
    1e20,
    -1e19,
    88.8,
    -88.8,
    -104.0,
    20.0,
    1.0,
    -0.5,
];

/// Bits, among which all that are no number are equal: processors differ in which they make.
fn bits(ops: &dyn Ops, rows: Rows) -> Vec<u32> {
    let of = |value: &f32| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
    ops.download(&[rows]).unwrap()[0].iter().map(of).collect()
}

fn compare(gpu: &Gpu, kind: &str, mut draw: impl FnMut(&mut Random) -> f32) {
    let (cpu, mut random) = (ComputeContext::new(2, false).unwrap(), Random::new(23));
    let device = gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap();
    let mut wrong = Vec::new();
    for (rows, width) in ROWS.into_iter().flat_map(|rows| WIDTHS.map(|width| (rows, width))) {
        let values: [Vec<f32>; INPUTS] =
            std::array::from_fn(|_| (0..rows * PARTS * width).map(|_| draw(&mut random)).collect());
        for (name, operation) in OPERATIONS {
            let [expected, found] = [cpu.ops(), &device as &dyn Ops].map(|ops| {
                let result = operation(&Case { ops, rows, width, values: &values });
                let bits = (result.rows, result.width, bits(ops, result));
                ops.begin_layer();
                ops.retain(&[]);
                bits
            });
            if expected != found {
                let place = expected.2.iter().zip(&found.2).position(|(a, b)| a != b);
                let pair = place.map(|i| (f32::from_bits(expected.2[i]), f32::from_bits(found.2[i])));
                wrong.push(format!("{name} of {rows} rows of {width} {kind} values: at {place:?} {pair:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong[..wrong.len().min(30)].join("\n"));
}

#[test]
fn each_operation_has_the_bits_of_the_cpu() {
    let Some(emulator) = emulator(3) else { return };
    compare(&gpu(emulator), "plain", |random| 3.0 * random.float());
}

#[test]
fn each_operation_has_the_bits_of_the_cpu_at_the_ends_of_numbers() {
    let Some(emulator) = emulator(4) else { return };
    let gpu = gpu(emulator);
    compare(&gpu, "extreme", |random| ENDS[random.below(ENDS.len())]);
    // One alone among plain ones, which a sum over a row still notices.
    compare(&gpu, "seldom extreme", |random| match random.below(50) {
        0 => ENDS[random.below(ENDS.len())],
        _ => random.float(),
    });
}
