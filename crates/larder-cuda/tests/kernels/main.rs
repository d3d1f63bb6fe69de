//! The CUDA kernels, run on the CPU by the emulator, give the bits of the CPU kernels.
#![allow(unsafe_code)]

mod elementwise;
mod products;
mod random_data;
mod rows;

use std::fmt::Display;

use larder_cuda::{Argument, Driver, Emulator, GpuError, Launch, Stream};

/// Size of a block of 32 activations: 32 integers, the scale, and sums.
const BLOCK_BYTES: usize = 64;

/// Bytes aligned to 16, as blocks and weights are.
struct Aligned {
    words: Vec<u128>,
    bytes: usize,
}

impl Aligned {
    fn new(bytes: usize) -> Self {
        Aligned { words: vec![0; bytes.div_ceil(16)], bytes }
    }

    fn append(&mut self, bytes: &[u8]) {
        let before = self.bytes;
        self.bytes += bytes.len();
        self.words.resize(self.bytes.div_ceil(16), 0);
        self.bytes_mut()[before..].copy_from_slice(bytes);
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

/// The emulator with `bytes` of memory, or `None` if there is no C++ compiler.
fn emulator(bytes: u64) -> Option<Emulator> {
    match Emulator::new(bytes, 1) {
        Ok(emulator) => Some(emulator),
        Err(GpuError::Missing(what)) => {
            println!("skipped: {what}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// Runs a kernel to its end.
///
/// # Safety
/// The arguments match the kernel's parameters.
unsafe fn launch(emulator: &Emulator, kernel: &'static str, grid: [usize; 2], block: u32, arguments: &[Argument]) {
    // A device takes no launch without blocks.
    if grid.contains(&0) {
        return;
    }
    let end = emulator.create_event().unwrap();
    let grid = grid.map(|blocks| blocks as u32);
    // SAFETY: as the caller guarantees; the kernel is complete when this function returns.
    unsafe { emulator.launch(Stream::Compute, &Launch { kernel, grid, block, arguments }) }.unwrap();
    emulator.record(end, Stream::Compute).unwrap();
    emulator.synchronise(end).unwrap();
}

fn input<T>(from: &[T]) -> Argument {
    Argument::Address(from.as_ptr() as u64)
}

fn output<T>(to: &mut [T]) -> Argument {
    Argument::Address(to.as_mut_ptr() as u64)
}

fn word(count: usize) -> Argument {
    Argument::Word(count as u32)
}

/// Activations, quantised by the kernel.
fn quantise(emulator: &Emulator, x: &[f32]) -> Aligned {
    let blocks = x.len() / 32;
    let mut out = Aligned::new(blocks * BLOCK_BYTES);
    let arguments = [input(x), output(out.bytes_mut()), word(blocks)];
    // SAFETY: `x` has 32 values per block, and `out` has room for the blocks.
    unsafe { launch(emulator, "quantise", [blocks.div_ceil(4), 1], 128, &arguments) };
    out
}

/// Whether bits are equal or both values are NaN, whose bits differ between processors.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn assert_same(got: &[f32], want: &[f32], what: impl Display) {
    assert_eq!(got.len(), want.len(), "{what}");
    let differ = got.iter().zip(want).filter(|(g, w)| !same(**g, **w)).count();
    let first = got.iter().zip(want).position(|(g, w)| !same(*g, *w));
    assert!(
        first.is_none(),
        "{what}: {differ} of {} differ, the first at {first:?}: {:?} instead of {:?}",
        got.len(),
        first.map(|i| got[i]),
        first.map(|i| want[i])
    );
}
