//! Products with weights on a device have the bits of those with weights in memory.

use larder_core::{Kind, Order, interleave};
use larder_cuda::{Fault, Gpu};
use larder_kernels::{Inputs, Pool, Product, Weights, products};
use larder_model::{DeviceProduct, DeviceProducts};

use crate::common::{Random, emulator, gpu};

const COLS: usize = 512;

struct Matrix {
    kind: Kind,
    order: Order,
    rows: usize,
    bytes: Vec<u8>,
}

impl Matrix {
    fn new(random: &mut Random, kind: Kind, order: Order, rows: usize) -> Self {
        let mut bytes = vec![0; kind.matrix_bytes(rows, COLS).unwrap()];
        random.weights(kind, &mut bytes);
        if order == Order::Rows8 {
            interleave(kind, rows, COLS, &mut bytes);
        }
        Matrix { kind, order, rows, bytes }
    }

    fn stored(&self) -> Weights<'_> {
        Weights { kind: self.kind, order: self.order, rows: self.rows, cols: COLS, bytes: &self.bytes }
    }
}

/// Computes rounds on the device and on the CPU.
pub fn compare(gpu: &Gpu) {
    let mut random = Random::new(1);
    let device = gpu.products().unwrap();
    let both = [Order::Rows, Order::Rows8];
    let shapes = Kind::ALL.into_iter().flat_map(|kind| both.map(|order| (kind, order)));
    let matrices: Vec<_> =
        shapes.enumerate().map(|(i, (kind, order))| Matrix::new(&mut random, kind, order, [19, 8, 3][i % 3])).collect();
    let kept: Vec<usize> = matrices.iter().map(|m| device.keep(m.stored()).unwrap()).collect();
    for tokens in [1, 12, 2] {
        let mut x = Inputs::new();
        x.fill(&random.floats(tokens * COLS), COLS, true);
        let picks: Vec<Option<Vec<u32>>> = (0..matrices.len())
            .map(|i| (i % 3 > 0).then(|| (0..i % 5).map(|_| random.below(tokens) as u32).collect()))
            .collect();
        let lengths = matrices.iter().zip(&picks).map(|(m, pick)| m.rows * pick.as_ref().map_or(tokens, Vec::len));
        let mut wanted: Vec<Vec<f32>> = lengths.map(|length| vec![f32::NAN; length]).collect();
        let mut found = wanted.clone();
        let mut round = Vec::new();
        for ((matrix, pick), out) in matrices.iter().zip(&picks).zip(&mut wanted) {
            round.push(Product { weights: matrix.stored(), x: &x, pick: pick.as_deref(), out });
        }
        products(&Pool::new(1, false).unwrap(), &mut round);
        let mut round = Vec::new();
        for ((weights, pick), out) in kept.iter().zip(&picks).zip(&mut found) {
            round.push(DeviceProduct { weights: *weights, pick: pick.as_deref(), out });
        }
        device.multiply(&x, &mut round).unwrap();
        let bits = |all: &[Vec<f32>]| all.concat().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(&found) == bits(&wanted), "{tokens} tokens");
    }
}

#[test]
fn rounds_of_all_kinds_give_the_same_bits() {
    let Some(emulator) = emulator(1) else { return };
    compare(&gpu(emulator));
}

#[test]
fn floats_meet_activations_as_they_are() {
    let Some(emulator) = emulator(2) else { return };
    let (mut random, gpu) = (Random::new(2), gpu(emulator));
    let device = gpu.products().unwrap();
    // Longer than several pieces that are copied one after the other.
    const ROWS: usize = 8400;
    let matrix = Matrix::new(&mut random, Kind::F32, Order::Rows, ROWS);
    let weights = device.keep(matrix.stored()).unwrap();
    let mut x = Inputs::new();
    x.fill(&random.floats(COLS), COLS, false);
    let (mut found, mut wanted) = (vec![0.0; ROWS], vec![0.0; ROWS]);
    device.multiply(&x, &mut [DeviceProduct { weights, pick: None, out: &mut found }]).unwrap();
    let product = Product { weights: matrix.stored(), x: &x, pick: None, out: &mut wanted };
    products(&Pool::new(1, false).unwrap(), &mut [product]);
    assert_eq!(found, wanted);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let Some(emulator) = emulator(3) else { return };
    let (mut random, gpu) = (Random::new(3), gpu(emulator));
    let device = gpu.products().unwrap();
    let matrix = Matrix::new(&mut random, Kind::Q8_0, Order::Rows, 8);
    let weights = device.keep(matrix.stored()).unwrap();
    let mut x = Inputs::new();
    x.fill(&random.floats(COLS), COLS, false);
    let multiply = |weights, pick, len: usize| {
        let mut out = vec![0.0; len];
        device.multiply(&x, &mut [DeviceProduct { weights, pick, out: &mut out }]).unwrap_err().to_string()
    };
    assert_eq!(multiply(weights, None, 8), "weights in q8_0 meet activations that are not quantised");
    assert_eq!(multiply(9, None, 8), "the GPU has no matrix 9");
    let shape = "a product with 8 x 512 weights has inputs or outputs of another shape";
    assert_eq!(multiply(weights, None, 9), shape);
    assert_eq!(multiply(weights, Some(&[1]), 8), shape);
    let huge = vec![0; 65 << 20];
    let rows = huge.len() / 4 / COLS;
    let huge = Weights { kind: Kind::F32, order: Order::Rows, rows, cols: COLS, bytes: &huge };
    let error = device.keep(huge).unwrap_err().to_string();
    assert!(error.starts_with("68157440 bytes do not fit into the 6"), "{error}");
}

#[test]
fn what_fails_on_the_device_is_an_error() {
    let mut failed = 0;
    for seed in 0..20 {
        let Some(emulator) = emulator(seed) else { return };
        let (mut random, gpu) = (Random::new(seed), gpu(emulator.failing(Fault::CopyOut, 2)));
        let device = gpu.products().unwrap();
        let matrix = Matrix::new(&mut random, Kind::F16, Order::Rows, 8);
        let weights = device.keep(matrix.stored()).unwrap();
        let mut x = Inputs::new();
        x.fill(&random.floats(COLS), COLS, false);
        let (mut found, mut wanted) = (vec![0.0; 8], vec![0.0; 8]);
        let product = Product { weights: matrix.stored(), x: &x, pick: None, out: &mut wanted };
        products(&Pool::new(1, false).unwrap(), &mut [product]);
        match device.multiply(&x, &mut [DeviceProduct { weights, pick: None, out: &mut found }]) {
            Ok(()) => assert_eq!(found, wanted),
            Err(_) => failed += 1,
        }
    }
    assert!((4..17).contains(&failed), "{failed} of 20 failed");
}
