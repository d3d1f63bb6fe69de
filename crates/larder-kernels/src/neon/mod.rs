//! Kernels for 64-bit Arm processors: with NEON, which all of them have, and with dot products of bytes and matrix
//! products of bytes (i8mm) where available.
//!
//! Matrix products are for strips: they take two rows and two tokens side by side. Single tokens have dot products.
//!
//! They were checked by emulation (`scripts/check/cross.sh test`), and never timed.
#![allow(unsafe_code)]

mod bytes;
mod dots;
mod floats;
mod matrix_products;
mod primitives;
mod quantise;

use std::arch::is_aarch64_feature_detected;

use larder_core::NumberFormat;

use self::dots::{Dot, Sdot, Smull};
use self::matrix_products::Smmla;
use self::primitives::Neon;
use crate::block::{BLOCK, Block};
use crate::formats::q8_0::widen_q8_0;
use crate::kernel_set::{DeltaKernels, KernelSet, StridedRows, StripKernels, Sums, UnavailableSet, Vectors};
use crate::simd::blocks::check;
use crate::simd::delta_rule::{read, step};
use crate::simd::products::products;
use crate::simd::strips::{multiply, unpack};
use crate::simd::weighted_sums::weighted_sums as add_weighted;
use crate::simd::{BF16, F16, F32};
use crate::weights::Panel;

/// The kernels that use matrix products of bytes for strips and dot products of bytes, if this processor has both.
pub fn with_matrix_products() -> Result<KernelSet, UnavailableSet> {
    let name = "neon+i8mm";
    let has = [("dotprod", Sdot::detect().is_some()), ("i8mm", is_aarch64_feature_detected!("i8mm"))];
    Smmla::detect().ok_or_else(|| UnavailableSet::new(name, &has))?;
    Ok(KernelSet { name, strips: Some(strips::<Smmla>()), ..with_dot_products()? })
}

/// The kernels that use dot products of bytes, if this processor has them.
pub fn with_dot_products() -> Result<KernelSet, UnavailableSet> {
    let name = "neon+dotprod";
    Sdot::detect().ok_or_else(|| UnavailableSet::new(name, &[("dotprod", false)]))?;
    Ok(KernelSet { name, blocks: blocks::<Sdot>, strips: Some(strips::<Sdot>()), ..set()? })
}

/// The kernels that every 64-bit Arm processor can run.
pub fn set() -> Result<KernelSet, UnavailableSet> {
    Ok(KernelSet {
        name: "neon",
        blocks: blocks::<Smull>,
        strips: Some(strips::<Smull>()),
        floats,
        weighted_sums,
        delta: DELTA,
        widen_q8_0,
        quantise,
        vectors: Vectors::Common,
    })
}

const DELTA: DeltaKernels = DeltaKernels {
    read: |state, factors| read(Neon(Smull), state, factors),
    step: |state, token| step(Neon(Smull), state, token),
};

fn strips<D: Dot>() -> StripKernels {
    StripKernels {
        least: 2,
        unpack: |panels, blocks, next, strip| unpack(simd::<D>(), panels, blocks, next, strip),
        multiply: |strip, x, first, sums| multiply(simd::<D>(), strip, x, first, sums),
    }
}

fn simd<D: Dot>() -> Neon<D> {
    Neon::detect().expect("the set was chosen because the processor has its instructions")
}

fn blocks<D: Dot>(panels: &[Panel], x: &[&[Block]], out: &mut [Sums]) {
    products(simd::<D>(), panels, x, out);
}

fn floats(panels: &[Panel], x: &[&[f32]], out: &mut [Sums]) {
    check(panels, x.iter().map(|x| x.len()), out);
    for (panel, out) in panels.iter().zip(out.chunks_mut(x.len())) {
        // SAFETY: as above.
        unsafe {
            match panel.kind {
                NumberFormat::F32 => floats::panel::<F32>(panel, x, out),
                NumberFormat::F16 => floats::panel::<F16>(panel, x, out),
                NumberFormat::Bf16 => floats::panel::<BF16>(panel, x, out),
                _ => unreachable!("block formats have kernels of their own"),
            }
        }
    }
}

fn weighted_sums(rows: StridedRows, factors: &[&[f32]], out: &mut [&mut [f32]]) {
    add_weighted(Neon(Smull), rows, factors, out);
}

fn quantise(x: &[f32], out: &mut [Block]) {
    for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
        // SAFETY: every processor of this architecture has NEON.
        *out = unsafe { quantise::block(x) };
    }
}
