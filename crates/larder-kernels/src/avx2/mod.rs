//! Kernels for processors with AVX2, FMA and F16C.
#![allow(unsafe_code)]

mod bytes;
mod floats;
mod primitives;
mod quantise;

use larder_core::NumberFormat;

pub use self::primitives::{Avx2, prefetch};
use crate::block::{BLOCK, Block};
use crate::kernel_set::{DeltaKernels, KernelSet, StridedRows, StripKernels, Sums, UnavailableSet, Vectors};
use crate::simd::blocks::check;
use crate::simd::delta_rule::{read, step};
use crate::simd::products::products;
use crate::simd::strips::{multiply, unpack};
use crate::simd::weighted_sums::weighted_sums as add_weighted;
use crate::simd::{BF16, F16, F32};
use crate::weights::Panel;

/// The kernels, if this processor can run them.
pub fn set() -> Result<KernelSet, UnavailableSet> {
    of::<false>("avx2")
}

/// The kernels with AVX-VNNI, if this processor can run them.
pub fn with_vnni() -> Result<KernelSet, UnavailableSet> {
    of::<true>("avx2+vnni")
}

fn of<const VNNI: bool>(name: &'static str) -> Result<KernelSet, UnavailableSet> {
    Avx2::<VNNI>::detect().ok_or_else(|| UnavailableSet::new(name, &Avx2::<VNNI>::features()))?;
    let strips = StripKernels {
        least: 2,
        unpack: |panels, blocks, next, strip| unpack(simd::<VNNI>(), panels, blocks, next, strip),
        multiply: |strip, x, first, sums| multiply(simd::<VNNI>(), strip, x, first, sums),
    };
    let blocks = |panels: &[Panel], x: &[&[Block]], out: &mut [Sums]| products(simd::<VNNI>(), panels, x, out);
    Ok(KernelSet {
        name,
        blocks,
        strips: Some(strips),
        floats,
        weighted_sums,
        delta: DELTA,
        widen_q8_0,
        quantise,
        vectors: Vectors::Avx2,
    })
}

const DELTA: DeltaKernels = DeltaKernels {
    read: |state, factors| read(simd::<false>(), state, factors),
    step: |state, token| step(simd::<false>(), state, token),
};

fn simd<const VNNI: bool>() -> Avx2<VNNI> {
    Avx2::detect().expect("the set was chosen because the processor has it")
}

fn floats(panels: &[Panel], x: &[&[f32]], out: &mut [Sums]) {
    check(panels, x.iter().map(|x| x.len()), out);
    for (panel, out) in panels.iter().zip(out.chunks_mut(x.len())) {
        // SAFETY: as above.
        unsafe {
            match panel.kind {
                NumberFormat::F32 => floats::panel::<F32>(*panel, x, out),
                NumberFormat::F16 => floats::panel::<F16>(*panel, x, out),
                NumberFormat::Bf16 => floats::panel::<BF16>(*panel, x, out),
                _ => unreachable!("block formats have kernels of their own"),
            }
        }
    }
}

fn weighted_sums(rows: StridedRows, factors: &[&[f32]], out: &mut [&mut [f32]]) {
    add_weighted(simd::<false>(), rows, factors, out);
}

fn widen_q8_0(row: &[u8], out: &mut [f32]) {
    let (blocks, whole) = (row.as_chunks::<34>().0, out.len() / BLOCK);
    assert!(out.len().div_ceil(BLOCK) <= blocks.len(), "the row is shorter than the output");
    let (body, tail) = out.as_chunks_mut::<BLOCK>();
    for (block, out) in blocks.iter().zip(body) {
        // SAFETY: as above.
        unsafe { floats::widen_q8_0(block, out) };
    }
    crate::formats::q8_0::widen_q8_0(blocks[whole..].as_flattened(), tail);
}

fn quantise(x: &[f32], out: &mut [Block]) {
    for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
        // SAFETY: as above.
        *out = unsafe { quantise::block(x) };
    }
}
