//! Rates are those of the device.

use std::time::Duration;

use larder_core::{ExpertLayout, Kind};
use larder_model::Activation;

use crate::common::{MEMORY, emulator, gpu};

#[test]
fn rates_are_seconds_per_byte() {
    let Some(emulator) = emulator(1) else { return };
    let (latency, launch) = (Duration::ZERO, Duration::from_millis(2));
    let gpu = gpu(emulator.taking(latency, 1e10, launch));
    let layout = ExpertLayout::new(64, 64, [Kind::Q8_0; 3], true).unwrap();
    let rates = gpu.measure(&layout, Activation::Silu, 4).unwrap();
    let near = |rate: f64, wanted: f64| assert!((rate / wanted - 1.0).abs() < 0.01, "{rate} and not {wanted}");
    near(rates.copy_in, 1e-10);
    near(rates.copy_out, 1e-10);
    near(rates.read, 2e-3 / (MEMORY / 8) as f64);
    near(rates.compute, 6.0 * 2e-3 / (4 * layout.bytes) as f64);
    assert_eq!(gpu.facts().unwrap().free_bytes, MEMORY);
    let start = rates.measured(3e-11);
    assert_eq!((start.copy, start.host, start.device), (rates.copy_in, 3e-11, rates.compute));
}

#[test]
fn a_device_without_room_is_measured_with_what_it_has() {
    let Some(emulator) = emulator(1) else { return };
    let layout = ExpertLayout::new(4096, 600, [Kind::F32; 3], false).unwrap();
    let error = gpu(emulator).measure(&layout, Activation::Silu, 8);
    assert!(error.is_ok());
}
