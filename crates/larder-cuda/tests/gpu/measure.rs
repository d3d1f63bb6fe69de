//! Rates are those of the device.

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
    let near = |rate: f64, wanted: f64| assert!((rate / wanted - 1.0).abs() < 0.01, "{rate} and not {wanted}");
    near(rates.copy_in, 1e-10);
    near(rates.copy_out, 1e-10);
    near(rates.read, 2e-3 / (MEMORY / 8) as f64);
    // Six kernels, and one that brings their lists.
    near(rates.compute, 7.0 * 2e-3 / (4 * layout.bytes) as f64);
    assert_eq!(gpu.info().unwrap().free_bytes, MEMORY);
    let start = rates.measured(3e-11);
    assert_eq!((start.copy, start.host, start.device), (rates.copy_in, 3e-11, rates.compute));
}

#[test]
fn a_device_without_room_is_measured_with_what_it_has() {
    let Some(emulator) = emulator(1) else { return };
    let layout = ExpertLayout::new(4096, 600, [NumberFormat::F32; 3], false).unwrap();
    let error = gpu(emulator).measure(&layout, Activation::Silu, 8);
    assert!(error.is_ok());
}

#[test]
fn a_device_that_idled_is_measured_when_it_is_awake() {
    let layout = ExpertLayout::new(64, 64, [NumberFormat::Q8_0; 3], false).unwrap();
    let rates = |waking| {
        let emulator = emulator(2)?.with_times(Duration::from_millis(1), 1e10, Duration::from_millis(2));
        Some(gpu(emulator.with_warm_up(waking)).measure(&layout, Activation::Silu, 4).unwrap())
    };
    let Some(awake) = rates(Duration::ZERO) else { return };
    let asleep = rates(Duration::from_millis(60)).unwrap();
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-3, "{a} and not {b}");
    near(asleep.copy_in, awake.copy_in);
    near(asleep.copy_out, awake.copy_out);
    near(asleep.read, awake.read);
    near(asleep.compute, awake.compute);
}
