//! Measured rates against the emulated times.

use std::time::Duration;

use larder_core::{ExpertLayout, NumberFormat};
use larder_model::Activation;

use crate::common::{MEMORY, emulator, gpu};

#[test]
fn rates_are_seconds_per_byte() {
    let Some(emulator) = emulator(1) else { return };
    let (latency, launch) = (Duration::ZERO, Duration::from_millis(2));
    let gpu = gpu(emulator.with_times(latency, 1e10, launch));
    let layout = ExpertLayout::new(64, 64, [NumberFormat::Q8_0; 3], true).unwrap();
    let rates = gpu.measure(&layout, Activation::Silu, 4).unwrap();
    let near = |rate: f64, wanted: f64| assert!((rate / wanted - 1.0).abs() < 0.01, "{rate} instead of {wanted}");
    near(rates.copy_in, 1e-10);
    near(rates.copy_out, 1e-10);
    near(rates.read, 2e-3 / f64::from(1 << 20));
    // Five kernels, and one that copies their lists.
    near(rates.compute, 6.0 * 2e-3 / (4 * layout.bytes) as f64);
    // What stays is the memory for lists.
    assert!(MEMORY - gpu.info().unwrap().free_bytes <= 128 << 10);
    let start = rates.measured(3e-11);
    assert_eq!((start.copy, start.host, start.device), (rates.copy_in, 3e-11, rates.compute));
}

#[test]
fn a_device_with_little_memory_is_measured_with_smaller_buffers() {
    let Some(emulator) = emulator(1) else { return };
    let layout = ExpertLayout::new(4096, 600, [NumberFormat::F32; 3], false).unwrap();
    let error = gpu(emulator).measure(&layout, Activation::Silu, 8);
    assert!(error.is_ok());
}

#[test]
fn an_idle_device_is_measured_after_it_has_warmed_up() {
    let layout = ExpertLayout::new(64, 64, [NumberFormat::Q8_0; 3], false).unwrap();
    let rates = |warm_up| {
        let emulator = emulator(2)?.with_times(Duration::from_millis(1), 1e10, Duration::from_millis(2));
        Some(gpu(emulator.with_warm_up(warm_up)).measure(&layout, Activation::Silu, 4).unwrap())
    };
    let Some(warm) = rates(Duration::ZERO) else { return };
    let cold = rates(Duration::from_millis(60)).unwrap();
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-3, "{a} instead of {b}");
    near(cold.copy_in, warm.copy_in);
    near(cold.copy_out, warm.copy_out);
    near(cold.read, warm.read);
    near(cold.compute, warm.compute);
}
