//! The kernels, run on a CPU by their emulator, against the kernels for CPUs: the same bits.
#![allow(unsafe_code)]

mod elementwise;
mod products;
mod random_data;

use std::fmt::Display;

use larder_cuda::{Argument, Driver, Emulator, GpuError, Launch, Stream};

/// Of 32 activations: as many integers, the scale, the scale times their sum, and sums.
const BLOCK_BYTES: usize = 48;

/// Bytes that begin at a multiple of 16, as blocks and weights do.
struct Aligned {
    room: Vec<u128>,
    bytes: usize,
}

impl Aligned {
    fn new(bytes: usize) -> Self {
        Aligned { room: vec![0; bytes.div_ceil(16)], bytes }
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.room)[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.room)[..self.bytes]
    }
}

/// The emulator with so much memory, or none where nothing can compile it.
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
/// The arguments are those that the kernel takes.
unsafe fn launch(emulator: &Emulator, kernel: &'static str, grid: [usize; 2], block: u32, arguments: &[Argument]) {
    let over = emulator.create_event().unwrap();
    let grid = grid.map(|blocks| blocks as u32);
    // SAFETY: as the caller guarantees; and nothing is used any more when it is over.
    unsafe { emulator.launch(Stream::Compute, &Launch { kernel, grid, block, arguments }) }.unwrap();
    emulator.record(over, Stream::Compute).unwrap();
    emulator.synchronise(over).unwrap();
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

/// Activations as the kernel makes blocks of them.
fn quantise(emulator: &Emulator, x: &[f32]) -> Aligned {
    let blocks = x.len() / 32;
    let mut out = Aligned::new(blocks * BLOCK_BYTES);
    let arguments = [input(x), output(out.bytes_mut()), word(blocks)];
    // SAFETY: there are so many values, and room for so many blocks.
    unsafe { launch(emulator, "quantise", [blocks.div_ceil(4), 1], 128, &arguments) };
    out
}

/// The same bits, or neither is a number: which bits that has, processors do not agree on.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn assert_same(got: &[f32], want: &[f32], what: impl Display) {
    assert_eq!(got.len(), want.len(), "{what}");
    let differ = got.iter().zip(want).filter(|(g, w)| !same(**g, **w)).count();
    let first = got.iter().zip(want).position(|(g, w)| !same(*g, *w));
    assert!(
        first.is_none(),
        "{what}: {differ} of {} differ, the first at {first:?}: {:?} and not {:?}",
        got.len(),
        first.map(|i| got[i]),
        first.map(|i| want[i])
    );
}
