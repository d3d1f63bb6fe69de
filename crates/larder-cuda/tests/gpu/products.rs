//! Products with weights on the device have the bits of products on the CPU.

use std::sync::Arc;

use larder_core::{NumberFormat, RowOrder, interleave};
use larder_cuda::{EmulatorFault, Gpu, GpuError, resident_bytes};
use larder_kernels::{InputBuffer, Product, ThreadPool, WeightMatrix, products};
use larder_model::{DeviceProduct, DeviceProducts};

use crate::common::{MEMORY, Random, emulator, gpu};

const COLS: usize = 512;

struct Matrix {
    kind: NumberFormat,
    order: RowOrder,
    rows: usize,
    scale: f32,
    bytes: Vec<u8>,
}

impl Matrix {
    fn new(random: &mut Random, kind: NumberFormat, order: RowOrder, rows: usize) -> Self {
        let mut bytes = vec![0; kind.matrix_bytes(rows, COLS).unwrap()];
        random.weights(kind, &mut bytes);
        if order == RowOrder::Rows8 {
            interleave(kind, rows, COLS, &mut bytes);
        }
        let scale = if kind.has_matrix_scale() { random.float() } else { 1.0 };
        Matrix { kind, order, rows, scale, bytes }
    }

    fn stored(&self) -> WeightMatrix<'_> {
        WeightMatrix {
            kind: self.kind,
            order: self.order,
            rows: self.rows,
            cols: COLS,
            scale: self.scale,
            bytes: &self.bytes,
        }
    }
}

/// Computes batches of products on the device and on the CPU.
pub fn compare(gpu: &Gpu) {
    let mut random = Random::new(1);
    let device = gpu.products(0).unwrap();
    let both = [RowOrder::Plain, RowOrder::Rows8];
    let shapes = NumberFormat::ALL.into_iter().flat_map(|kind| both.map(|order| (kind, order)));
    let matrices: Vec<_> =
        shapes.enumerate().map(|(i, (kind, order))| Matrix::new(&mut random, kind, order, [19, 8, 3][i % 3])).collect();
    let kept: Vec<usize> = matrices.iter().map(|m| device.upload(m.stored()).unwrap()).collect();
    for tokens in [1, 12, 2, 40] {
        let (mut buffer, activations) = (InputBuffer::new(), random.floats(tokens * COLS));
        let x = buffer.fill(&activations, COLS, true);
        let picks: Vec<Option<Vec<u32>>> = (0..matrices.len())
            .map(|i| (i % 3 > 0).then(|| (0..i % 5).map(|_| random.below(tokens) as u32).collect()))
            .collect();
        let lengths = matrices.iter().zip(&picks).map(|(m, pick)| m.rows * pick.as_ref().map_or(tokens, Vec::len));
        let mut wanted: Vec<Vec<f32>> = lengths.map(|length| vec![f32::NAN; length]).collect();
        let mut found = wanted.clone();
        let mut round = Vec::new();
        for ((matrix, pick), out) in matrices.iter().zip(&picks).zip(&mut wanted) {
            round.push(Product { weights: matrix.stored(), x, pick: pick.as_deref(), out });
        }
        products(&ThreadPool::new(1, false).unwrap(), &mut round);
        let mut round = Vec::new();
        for ((weights, pick), out) in kept.iter().zip(&picks).zip(&mut found) {
            round.push(DeviceProduct { weights: *weights, pick: pick.as_deref(), out });
        }
        device.matmul(&x, &mut round).unwrap();
        let bits = |all: &[Vec<f32>]| all.concat().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(&found) == bits(&wanted), "{tokens} tokens");
    }
}

#[test]
fn batches_of_all_number_formats_give_the_same_bits() {
    let Some(emulator) = emulator(1) else { return };
    compare(&gpu(emulator));
    let Some(emulator) = self::emulator(2) else { return };
    compare(&gpu(emulator.without_tensor_cores()));
}

#[test]
fn float_weights_take_unquantised_activations() {
    let Some(emulator) = emulator(2) else { return };
    let (mut random, gpu) = (Random::new(2), gpu(emulator));
    let device = gpu.products(0).unwrap();
    // Longer than several staged copies.
    const ROWS: usize = 8400;
    let matrix = Matrix::new(&mut random, NumberFormat::F32, RowOrder::Plain, ROWS);
    let weights = device.upload(matrix.stored()).unwrap();
    let (mut buffer, activations) = (InputBuffer::new(), random.floats(COLS));
    let x = buffer.fill(&activations, COLS, false);
    let (mut found, mut wanted) = (vec![0.0; ROWS], vec![0.0; ROWS]);
    device.matmul(&x, &mut [DeviceProduct { weights, pick: None, out: &mut found }]).unwrap();
    let product = Product { weights: matrix.stored(), x, pick: None, out: &mut wanted };
    products(&ThreadPool::new(1, false).unwrap(), &mut [product]);
    assert_eq!(found, wanted);
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let Some(emulator) = emulator(3) else { return };
    let (mut random, gpu) = (Random::new(3), gpu(emulator));
    let device = gpu.products(0).unwrap();
    let matrix = Matrix::new(&mut random, NumberFormat::Q8_0, RowOrder::Plain, 8);
    let weights = device.upload(matrix.stored()).unwrap();
    let (mut buffer, activations) = (InputBuffer::new(), random.floats(COLS));
    let x = buffer.fill(&activations, COLS, false);
    let multiply = |weights, pick, len: usize| {
        let mut out = vec![0.0; len];
        device.matmul(&x, &mut [DeviceProduct { weights, pick, out: &mut out }]).unwrap_err().to_string()
    };
    assert_eq!(multiply(weights, None, 8), "weights in q8_0 need quantised activations");
    assert_eq!(multiply(9, None, 8), "the GPU has no matrix 9");
    let shape = "inputs or outputs do not fit the shape of a product with 8 x 512 weights";
    assert_eq!(multiply(weights, None, 9), shape);
    assert_eq!(multiply(weights, Some(&[1]), 8), shape);
    let huge = vec![0; 65 << 20];
    let rows = huge.len() / 4 / COLS;
    let huge =
        WeightMatrix { kind: NumberFormat::F32, order: RowOrder::Plain, rows, cols: COLS, scale: 1.0, bytes: &huge };
    let error = device.upload(huge).unwrap_err().to_string();
    assert!(error.starts_with("cannot allocate 68157440 bytes of device memory: 65011712 "), "{error}");
}

#[test]
fn a_failure_on_the_device_is_an_error() {
    let mut failed = 0;
    for seed in 0..20 {
        let Some(emulator) = emulator(seed) else { return };
        let (mut random, gpu) = (Random::new(seed), gpu(emulator.with_fault(EmulatorFault::Launch, 6)));
        let device = gpu.products(0).unwrap();
        let matrix = Matrix::new(&mut random, NumberFormat::F16, RowOrder::Plain, 8);
        let weights = device.upload(matrix.stored()).unwrap();
        let (mut buffer, activations) = (InputBuffer::new(), random.floats(COLS));
        let x = buffer.fill(&activations, COLS, false);
        let (mut found, mut wanted) = (vec![0.0; 8], vec![0.0; 8]);
        let product = Product { weights: matrix.stored(), x, pick: None, out: &mut wanted };
        products(&ThreadPool::new(1, false).unwrap(), &mut [product]);
        match device.matmul(&x, &mut [DeviceProduct { weights, pick: None, out: &mut found }]) {
            Ok(()) => assert_eq!(found, wanted),
            Err(_) => failed += 1,
        }
    }
    assert!((4..17).contains(&failed), "{failed} of 20 failed");
}

#[test]
fn matrices_share_the_memory_that_was_allocated_for_them() {
    let Some(emulator) = emulator(4) else { return };
    let emulator = Arc::new(emulator);
    let (mut random, gpu) = (Random::new(4), Gpu::with_driver(emulator.clone()).unwrap());
    let matrices: Vec<_> =
        (1..9).map(|rows| Matrix::new(&mut random, NumberFormat::Q8_0, RowOrder::Plain, rows)).collect();
    let room = resident_bytes(matrices.iter().map(|m| m.bytes.len() as u64));
    assert_eq!(room, (1..9).map(|rows: u64| (rows * 544).div_ceil(256) * 256).sum::<u64>());
    let device = gpu.products(room).unwrap();
    let taken = emulator.allocated_bytes().0;
    assert!(taken >= room, "{taken} of {room} bytes");
    for matrix in &matrices {
        device.upload(matrix.stored()).unwrap();
    }
    assert_eq!(emulator.allocated_bytes().0, taken, "the first allocation was enough");
    // A matrix that was not counted, and another that fits after it.
    device.upload(matrices[0].stored()).unwrap();
    let more = emulator.allocated_bytes().0;
    assert!(more > taken);
    device.upload(matrices[7].stored()).unwrap();
    assert_eq!(emulator.allocated_bytes().0, more);

    let (mut buffer, activations) = (InputBuffer::new(), random.floats(COLS));
    let x = buffer.fill(&activations, COLS, true);
    for (weights, matrix) in matrices.iter().chain([&matrices[0], &matrices[7]]).enumerate() {
        let (mut found, mut wanted) = (vec![0.0; matrix.rows], vec![0.0; matrix.rows]);
        device.matmul(&x, &mut [DeviceProduct { weights, pick: None, out: &mut found }]).unwrap();
        let product = Product { weights: matrix.stored(), x, pick: None, out: &mut wanted };
        products(&ThreadPool::new(1, false).unwrap(), &mut [product]);
        assert_eq!(found, wanted, "matrix {weights}");
    }
    drop(device);
    assert_eq!(emulator.allocated_bytes(), (0, 0));
}

#[test]
fn memory_is_allocated_as_long_as_it_lasts() {
    let Some(emulator) = emulator(5) else { return };
    let gpu = gpu(emulator);
    let error = gpu.products(MEMORY + 1).err().unwrap();
    assert_eq!(error, GpuError::OutOfMemory { bytes: MEMORY + 1, free_bytes: MEMORY });
    let device = gpu.products(MEMORY - (1 << 20)).unwrap();
    let bytes = vec![0; 32 << 10];
    let one = WeightMatrix {
        kind: NumberFormat::F32,
        order: RowOrder::Plain,
        rows: 16,
        cols: COLS,
        scale: 1.0,
        bytes: &bytes,
    };
    let kept = std::iter::from_fn(|| device.upload(one).ok()).count();
    assert!(kept > 2016 && kept <= 2048, "{kept} matrices");
}
