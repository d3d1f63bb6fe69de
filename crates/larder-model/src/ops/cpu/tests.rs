//! Operations compared with candle's, on drawn shapes.

use candle_core::{D, Device, Result, Tensor};
use larder_core::Rng;

use crate::compute::ComputeContext;
use crate::ops::{Activation, GateFunction, Ops, Rotation, Rows};

/// The operations of one shape: their input, and what candle computes with.
struct Case<'a> {
    ops: &'a dyn Ops,
    shape: [usize; 2],
    rng: Rng,
}

impl Case<'_> {
    /// Drawn rows, as tensor and as rows.
    fn rows(&mut self) -> (Tensor, Rows) {
        let values = self.values(self.shape[0] * self.shape[1]);
        let rows = self.ops.send(&values, self.shape[1]).unwrap();
        (Tensor::from_vec(values, (self.shape[0], self.shape[1]), &Device::Cpu).unwrap(), rows)
    }

    /// A drawn value for each column, as tensor and kept.
    fn row(&mut self) -> (Tensor, usize) {
        let values = self.values(self.shape[1]);
        let kept = self.ops.keep(&values).unwrap();
        (Tensor::from_vec(values, self.shape[1], &Device::Cpu).unwrap(), kept)
    }

    fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| (self.rng.unit() * 8.0 - 4.0) as f32).collect()
    }

    /// The rows are what candle computes.
    fn expect(&self, what: &str, rows: Rows, want: Result<Tensor>) {
        let got = &self.ops.download(&[rows]).unwrap()[0];
        let want: Vec<f32> = want.and_then(|want| want.flatten_all()?.to_vec1()).unwrap();
        assert_eq!(got.len(), want.len(), "{what} {:?}", self.shape);
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 2e-5 * want.abs().max(1.0), "{what} {:?}: {got} is {want}", self.shape);
        }
    }
}

/// Each operation that candle has too.
fn compare(case: &mut Case) {
    let ops = case.ops;
    let ((x, of_x), (y, of_y)) = (case.rows(), case.rows());
    case.expect("a sum", ops.add(of_x, of_y, 0.5).unwrap(), &x + (&y * 0.5).unwrap());

    let ((x, of_x), (weight, kept)) = (case.rows(), case.row());
    case.expect("an RMS norm", ops.rms_norm(of_x, kept, 1e-5).unwrap(), candle_nn::ops::rms_norm(&x, &weight, 1e-5));
    let (bias, kept_bias) = case.row();
    let want = candle_nn::ops::layer_norm(&x, &weight, &bias, 1e-5);
    // A row of one value has no variance but what is rounded.
    if case.shape[1] > 1 {
        case.expect("a layer norm", ops.layer_norm(of_x, [kept, kept_bias], 1e-5).unwrap(), want);
    }
    case.expect("columns by factors", ops.scale_columns(of_x, kept).unwrap(), x.broadcast_mul(&weight));
    case.expect("a bias", ops.add_row(of_x, kept).unwrap(), x.broadcast_add(&weight));

    let ((x, of_x), (y, of_y)) = (case.rows(), case.rows());
    let want = candle_nn::ops::silu(&x).and_then(|x| x * &y);
    case.expect("silu", ops.combine(Activation::Silu, of_x, of_y).unwrap(), want);
    let ((x, of_x), (y, of_y)) = (case.rows(), case.rows());
    case.expect("gelu", ops.combine(Activation::Gelu, of_x, of_y).unwrap(), x.gelu_erf().and_then(|x| x * &y));
    let ((x, of_x), (gates, of_gates)) = (case.rows(), case.rows());
    let gated = ops.gate(of_x, of_gates, GateFunction::Sigmoid, case.shape[1]).unwrap();
    case.expect("a gate", gated, candle_nn::ops::sigmoid(&gates).and_then(|gates| x * gates));
    let (x, of_x) = case.rows();
    case.expect("capped values", ops.softcap(of_x, 3.0).unwrap(), (&x / 3.0).and_then(|x| x.tanh()? * 3.0));
}

/// The rotation of heads whose width is that of a row.
fn compare_rotation(case: &mut Case) {
    let [rows, width] = case.shape;
    let cos_sin: Vec<(f32, f32)> = (0..rows * width / 2).map(|i| ((i as f32).cos(), (i as f32).sin())).collect();
    let table = |part: fn(&(f32, f32)) -> f32| {
        Tensor::from_vec(cos_sin.iter().map(part).collect::<Vec<_>>(), (rows, width / 2), &Device::Cpu).unwrap()
    };
    let (cos, sin) = (table(|turn| turn.0), table(|turn| turn.1));
    for interleaved in [false, true] {
        let (x, of_x) = case.rows();
        let heads = x.reshape((1, 1, rows, width)).unwrap();
        let rotation = Rotation { cos_sin: &cos_sin, first: 0, dim: width, interleaved };
        let rotate = if interleaved { candle_nn::rotary_emb::rope_i } else { candle_nn::rotary_emb::rope };
        let rotated = case.ops.rotate_heads(of_x, 1, None, Some(rotation)).unwrap();
        case.expect("a rotation", rotated, rotate(&heads, &cos, &sin));
    }
}

#[test]
fn operations_are_those_of_candle() {
    let compute = ComputeContext::single_threaded();
    for (seed, shape) in [[1, 1], [1, 7], [2, 64], [5, 33], [1, 4096], [17, 130], [64, 1024], [0, 8]].iter().enumerate()
    {
        let mut case = Case { ops: compute.ops(), shape: *shape, rng: Rng::new(seed as u64) };
        compare(&mut case);
        if shape[1].is_multiple_of(2) && shape[0] > 0 {
            compare_rotation(&mut case);
        }
    }
}

#[test]
fn infinities_and_no_numbers_stay_in_their_rows() {
    let compute = ComputeContext::single_threaded();
    let ops = compute.ops();
    let values = [1.0, 2.0, f32::INFINITY, 1.0, f32::NAN, 0.0, 3.0, 4.0];
    let (kept, normed) = (ops.keep(&[1.0, 1.0]).unwrap(), |rows: Rows, kept| ops.rms_norm(rows, kept, 0.0).unwrap());
    let got = ops.download(&[normed(ops.send(&values, 2).unwrap(), kept)]).unwrap()[0].to_vec();
    let want = Tensor::new(&[[1.0f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
    let root = want.sqr().and_then(|x| x.mean_keepdim(D::Minus1)?.sqrt()).unwrap();
    let want: Vec<f32> = want.broadcast_div(&root).and_then(|x| x.flatten_all()?.to_vec1()).unwrap();
    assert_eq!([&got[..2], &got[6..]].concat(), want, "rows beside are not touched");
    assert!(got[2].is_nan() && got[4].is_nan() && got[5].is_nan(), "{got:?}");
}
