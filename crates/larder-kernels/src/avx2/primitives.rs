//! The primitives of AVX2: eight rows in the lanes of a register.
//!
//! One instruction multiplies unsigned with signed bytes and adds pairs, so signed weights either have an offset, which
//! is subtracted by way of the sums of the activations, or pass their sign to the activations. Sums of pairs stay in 16
//! bits as long as they cannot overflow. With AVX-VNNI one instruction multiplies four of them and adds the products.
#![allow(unsafe_code)]
// The number of a token, a row or a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use std::arch::asm;
use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;

use larder_core::ROW_GROUP;

use super::floats;
use crate::simd::blocks::Blocks;
use crate::simd::byte_lanes::ByteLanes;
use crate::simd::strips::SomeTokens;
use crate::simd::token_blocks::TokenBlocks;
use crate::simd::{Simd, Task};

/// Shows that this processor has AVX2, FMA and F16C, and AVX-VNNI if `VNNI`, which is why every block of `unsafe` here
/// is sound that has no other reason.
#[derive(Clone, Copy)]
pub struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    /// The features that the instructions belong to, and whether the processor has them or they are not used.
    #[inline]
    pub fn features() -> [(&'static str, bool); 4] {
        [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("f16c", is_x86_feature_detected!("f16c")),
            ("avxvnni", !VNNI || is_x86_feature_detected!("avxvnni")),
        ]
    }

    /// If the processor has the instructions.
    pub fn detect() -> Option<Self> {
        Self::features().iter().all(|(_, has)| *has).then_some(Avx2(()))
    }

    /// Sums of pairs of products of `len` runs from number `first` on, in 16 bits.
    #[inline(always)]
    fn pairs<const N: usize>(self, w: &[__m256i; 8], first: usize, len: usize, x: TokenBlocks<N>) -> [__m256i; N] {
        // SAFETY: see `Avx2`.
        unsafe {
            let mut pairs = [_mm256_setzero_si256(); N];
            for k in first..first + len {
                for t in 0..N {
                    let products = _mm256_maddubs_epi16(w[k], _mm256_set1_epi32(x.four(t, k)));
                    pairs[t] = _mm256_add_epi16(pairs[t], products);
                    if N > 1 {
                        pairs[t] = in_turn(pairs[t]);
                    }
                }
            }
            pairs
        }
    }

    /// The dot products of `len` runs from number `first` on, whose bytes are at most `MAX`.
    #[inline(always)]
    fn unsigned<const MAX: u8, const N: usize>(
        self,
        w: &[__m256i; 8],
        first: usize,
        len: usize,
        x: TokenBlocks<N>,
    ) -> [__m256i; N] {
        let fit = fitting(MAX).min(len);
        // SAFETY: see `Avx2`.
        unsafe {
            let mut sums = [_mm256_setzero_si256(); N];
            if VNNI {
                for k in first..first + len {
                    for t in 0..N {
                        sums[t] = _mm256_dpbusd_avx_epi32(sums[t], w[k], _mm256_set1_epi32(x.four(t, k)));
                    }
                }
                return sums;
            }
            let mut k = first;
            while k < first + len {
                let pairs = self.pairs(w, k, fit, x);
                for t in 0..N {
                    sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs[t], _mm256_set1_epi16(1)));
                }
                k += fit;
            }
            sums
        }
    }

    /// The dot products of `len` runs of signed weights from number `first` on.
    #[inline(always)]
    fn signed_sums<const N: usize>(
        self,
        w: &[__m256i; 8],
        first: usize,
        len: usize,
        x: TokenBlocks<N>,
    ) -> [__m256i; N] {
        // SAFETY: see `Avx2`.
        unsafe {
            let mut dots = [_mm256_setzero_si256(); N];
            for k in first..first + len {
                let size = _mm256_abs_epi8(w[k]);
                for t in 0..N {
                    // 2 · 128 · 127 fits 16 bits, and twice as much does not.
                    let x = _mm256_sign_epi8(_mm256_set1_epi32(x.four(t, k)), w[k]);
                    if VNNI {
                        dots[t] = _mm256_dpbusd_avx_epi32(dots[t], size, x);
                        continue;
                    }
                    let pairs = _mm256_maddubs_epi16(size, x);
                    dots[t] = _mm256_add_epi32(dots[t], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                }
            }
            dots
        }
    }

    /// Stores runs of bytes, each byte larger by `raise`.
    #[inline(always)]
    fn store_runs(self, w: &[__m256i; 8], raise: i16, to: &mut [u8]) {
        let to = &mut to[..8 * 32];
        for (k, w) in w.iter().enumerate() {
            // SAFETY: see `Avx2`; 32 bytes.
            unsafe {
                let raised = _mm256_add_epi8(*w, _mm256_set1_epi8(raise.to_le_bytes()[0].cast_signed()));
                _mm256_storeu_si256(to.as_mut_ptr().add(32 * k).cast(), raised);
            }
        }
    }

    /// The bytes at these indices of every lane.
    #[inline(always)]
    pub fn arrange(self, bytes: __m256i, [a, b, c, d]: [i32; 4]) -> __m256i {
        // SAFETY: see `Avx2`.
        unsafe {
            let lane =
                _mm256_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c, 0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c);
            let places = _mm256_set1_epi32(a | b << 8 | c << 16 | d << 24);
            _mm256_shuffle_epi8(bytes, _mm256_add_epi8(places, lane))
        }
    }
}

/// Keeps the compiler from reordering the steps of several sums so that one sum comes after the other: in turns, the
/// processor always has an instruction that does not wait for a result.
#[target_feature(enable = "avx2")]
#[inline]
fn in_turn(mut sum: __m256i) -> __m256i {
    if !cfg!(miri) {
        // SAFETY: the assembly has no instructions.
        unsafe { asm!("/* {} */", inout(ymm_reg) sum, options(nomem, nostack, preserves_flags)) };
    }
    sum
}

/// The index that yields a zero byte.
pub const NONE: i32 = 0x80;

/// Runs of bytes of at most `max` whose products with activations, added in pairs, fit 16 bits: a power of two.
const fn fitting(max: u8) -> usize {
    match i16::MAX as usize / (2 * 127 * max as usize) {
        8.. => 8,
        4..8 => 4,
        2..4 => 2,
        _ => 1,
    }
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    const LANES: usize = ROW_GROUP;
    const REGISTERS: usize = 16;
    const STRIP_TOKENS: usize = 3;
    const STRIP_TOKENS_IN_HALVES: usize = 3;
    type Floats = __m256;

    fn run<T: Task<Self>>(self, task: T) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<S, T: Task<S>>(simd: S, task: T) {
            task.run(simd);
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn with_vnni<S, T: Task<S>>(simd: S, task: T) {
            task.run(simd);
        }
        // SAFETY: see `Avx2`.
        unsafe { if const { VNNI } { with_vnni(self, task) } else { compiled(self, task) } }
    }

    #[inline(always)]
    fn half<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> __m256 {
        // SAFETY: the blocks have the scale, of two bytes, as `Blocks::half` checks.
        unsafe {
            let mut bits = [0u16; ROW_GROUP];
            if INTERLEAVED {
                bits = blocks.scale_at(i, 0).cast::<[u16; ROW_GROUP]>().read_unaligned();
            } else {
                for r in 0..ROW_GROUP {
                    bits[r] = blocks.scale_at(i, r).cast::<u16>().read_unaligned();
                }
            }
            _mm256_cvtph_ps(_mm_loadu_si128(bits.as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn raw_scale<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> __m256i {
        // SAFETY: the blocks have the scale, as `Blocks::raw_scale` checks.
        unsafe {
            if blocks.scale_bytes() == 2 {
                if INTERLEAVED {
                    return _mm256_cvtepu16_epi32(_mm_loadu_si128(blocks.scale_at(i, 0).cast()));
                }
                let mut wide = [0; ROW_GROUP];
                for r in 0..ROW_GROUP {
                    wide[r] = u32::from(blocks.scale_at(i, r).cast::<u16>().read_unaligned());
                }
                return _mm256_loadu_si256(wide.as_ptr().cast());
            }
            if INTERLEAVED {
                return _mm256_cvtepu8_epi32(_mm_loadl_epi64(blocks.scale_at(i, 0).cast()));
            }
            let mut wide = [0; ROW_GROUP];
            for r in 0..ROW_GROUP {
                wide[r] = u32::from(blocks.scale_at(i, r).read());
            }
            _mm256_loadu_si256(wide.as_ptr().cast())
        }
    }

    #[inline(always)]
    fn run_of_four<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> __m256i {
        // SAFETY: the blocks have the run, as `Blocks::run` checks.
        unsafe {
            if INTERLEAVED {
                return _mm256_loadu_si256(blocks.run_at(i, 0).cast());
            }
            let mut rows = [0u32; ROW_GROUP];
            for r in 0..ROW_GROUP {
                rows[r] = blocks.run_at(i, r).cast::<u32>().read_unaligned();
            }
            _mm256_loadu_si256(rows.as_ptr().cast())
        }
    }

    #[inline(always)]
    fn four_runs<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, first: usize) -> [__m256i; 4] {
        // SAFETY: the blocks have four runs there, as `Blocks::runs` checks.
        unsafe {
            if INTERLEAVED {
                let at = blocks.run_at(first, 0).cast::<__m256i>();
                let mut runs = [_mm256_setzero_si256(); 4];
                for (i, run) in runs.iter_mut().enumerate() {
                    *run = _mm256_loadu_si256(at.wrapping_add(i));
                }
                return runs;
            }
            let mut rows = [_mm_setzero_si128(); ROW_GROUP];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = _mm_loadu_si128(blocks.run_at(first, r).cast());
            }
            let (a, b) = (_mm256_set_m128i(rows[4], rows[0]), _mm256_set_m128i(rows[5], rows[1]));
            let (c, d) = (_mm256_set_m128i(rows[6], rows[2]), _mm256_set_m128i(rows[7], rows[3]));
            let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
            let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
            [
                _mm256_unpacklo_epi64(ab, cd),
                _mm256_unpackhi_epi64(ab, cd),
                _mm256_unpacklo_epi64(ab_high, cd_high),
                _mm256_unpackhi_epi64(ab_high, cd_high),
            ]
        }
    }

    #[inline(always)]
    fn byte(self, bytes: __m256i, at: usize) -> __m256 {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_cvtepi32_ps(self.arrange(bytes, [at as i32, NONE, NONE, NONE])) }
    }

    #[inline(always)]
    fn signed_byte(self, bytes: __m256i, at: usize) -> __m256 {
        // SAFETY: see `Avx2`. The byte goes to the top of the lane; the shift right extends its sign.
        unsafe {
            let top = self.arrange(bytes, [NONE, NONE, NONE, at as i32]);
            _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top))
        }
    }

    #[inline(always)]
    fn half_of_lanes(self, bytes: __m256i) -> __m256 {
        // SAFETY: see `Avx2`. The lower halves of the lanes of each half of the register, side by side.
        unsafe {
            let halves = _mm256_packus_epi32(self.bits(bytes, 0, 0xffff), _mm256_setzero_si256());
            let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
            _mm256_cvtph_ps(_mm_unpacklo_epi64(low, high))
        }
    }

    #[inline(always)]
    fn powers(self, exponents: __m256i) -> __m256 {
        // SAFETY: see `Avx2`.
        unsafe {
            let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)));
            let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), exponents);
            let is_normal = _mm256_cmpgt_epi32(exponents, _mm256_set1_epi32(1));
            _mm256_castsi256_ps(_mm256_blendv_epi8(subnormal, normal, is_normal))
        }
    }

    #[inline(always)]
    fn dots<const MAX: u8, const OFFSET: i16, const PARTS: usize, const N: usize>(
        self,
        w: &[__m256i; 8],
        x: TokenBlocks<N>,
    ) -> [[__m256; N]; PARTS] {
        // SAFETY: see `Avx2`.
        unsafe {
            let mut dots = [[_mm256_setzero_ps(); N]; PARTS];
            for part in 0..PARTS {
                let mut sums = self.unsigned::<MAX, N>(w, 8 / PARTS * part, 8 / PARTS, x);
                for t in 0..N {
                    if OFFSET != 0 {
                        let start = _mm256_set1_epi32(x.begin::<OFFSET, PARTS>(t, part));
                        sums[t] = _mm256_add_epi32(sums[t], start);
                    }
                    dots[part][t] = _mm256_cvtepi32_ps(sums[t]);
                }
            }
            dots
        }
    }

    #[inline(always)]
    fn signed_dots<const PARTS: usize, const N: usize>(
        self,
        w: &[__m256i; 8],
        x: TokenBlocks<N>,
    ) -> [[__m256; N]; PARTS] {
        // SAFETY: see `Avx2`.
        unsafe {
            let mut dots = [[_mm256_setzero_ps(); N]; PARTS];
            for part in 0..PARTS {
                let sums = self.signed_sums(w, 8 / PARTS * part, 8 / PARTS, x);
                for t in 0..N {
                    dots[part][t] = _mm256_cvtepi32_ps(sums[t]);
                }
            }
            dots
        }
    }

    #[inline(always)]
    fn store_unsigned<const MAX: u8, const OFFSET: i16>(self, w: &[__m256i; 8], to: &mut [u8]) -> (usize, i32) {
        self.store_runs(w, if VNNI { 128 - OFFSET } else { 0 }, to);
        if VNNI { (0, 128) } else { (fitting(MAX), OFFSET.into()) }
    }

    #[inline(always)]
    fn store_signed(self, w: &[__m256i; 8], to: &mut [u8]) -> (usize, i32) {
        self.store_runs(w, if VNNI { 128 } else { 0 }, to);
        (0, if VNNI { 128 } else { 0 })
    }

    #[inline(always)]
    unsafe fn strip_dots<const FIT: usize, const PARTS: usize, const N: usize>(
        self,
        bytes: *const u8,
        part: usize,
        offset: i32,
        x: TokenBlocks<N>,
    ) -> [[__m256; N]; 2] {
        // SAFETY: see `Avx2`; the bytes are there, as the caller guarantees.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); N]; 2];
            for t in 0..N {
                let start = _mm256_set1_epi32(match FIT {
                    _ if VNNI => x.begin::<128, PARTS>(t, part),
                    0 => 0,
                    _ => x.begin_at::<PARTS>(t, part, offset),
                });
                (sums[0][t], sums[1][t]) = (start, start);
            }
            let (mut pairs, ones) = ([[_mm256_setzero_si256(); N]; 2], _mm256_set1_epi16(1));
            let first = 8 / PARTS * part;
            for k in first..first + 8 / PARTS {
                let starts = FIT == 0 || (k - first).is_multiple_of(FIT);
                let ends = FIT == 0 || k + 1 == first + 8 / PARTS || (k + 1 - first).is_multiple_of(FIT);
                if VNNI {
                    let w = [
                        _mm256_loadu_si256(bytes.add(32 * k).cast()),
                        _mm256_loadu_si256(bytes.add(32 * (8 + k)).cast()),
                    ];
                    for t in 0..N {
                        let x = _mm256_set1_epi32(x.four(t, k));
                        sums[0][t] = _mm256_dpbusd_avx_epi32(sums[0][t], w[0], x);
                        sums[1][t] = _mm256_dpbusd_avx_epi32(sums[1][t], w[1], x);
                    }
                    continue;
                }
                for v in 0..2 {
                    let w = _mm256_loadu_si256(bytes.add(32 * (8 * v + k)).cast());
                    let size = if FIT == 0 { _mm256_abs_epi8(w) } else { w };
                    for t in 0..N {
                        let mut x = _mm256_set1_epi32(x.four(t, k));
                        if FIT == 0 {
                            x = _mm256_sign_epi8(x, w);
                        }
                        let products = _mm256_maddubs_epi16(size, x);
                        pairs[v][t] = if starts { products } else { _mm256_add_epi16(pairs[v][t], products) };
                        if ends {
                            sums[v][t] = _mm256_add_epi32(sums[v][t], _mm256_madd_epi16(pairs[v][t], ones));
                        }
                    }
                }
            }
            let mut dots = [[_mm256_setzero_ps(); N]; 2];
            for t in 0..N {
                dots[0][t] = _mm256_cvtepi32_ps(sums[0][t]);
                dots[1][t] = _mm256_cvtepi32_ps(sums[1][t]);
            }
            dots
        }
    }

    fn strip_task(self, fit: usize, task: SomeTokens) {
        if const { VNNI } || fit == 0 {
            task.by_form::<Self, 0>(self);
        } else if fit == 8 {
            task.by_form::<Self, 8>(self);
        } else {
            task.by_form::<Self, 2>(self);
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn mul_sub(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn floats_at<const KIND: u8>(self, at: *const u8) -> __m256 {
        // SAFETY: as the caller guarantees.
        unsafe { floats::eight::<KIND>(at, 0) }
    }

    #[inline(always)]
    fn store(self, floats: __m256, out: &mut [f32]) {
        let out = &mut out[..ROW_GROUP];
        // SAFETY: see `Avx2`; eight values.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), floats) };
    }

    #[inline(always)]
    fn prefetch(self, bytes: *const u8, len: usize) {
        prefetch(bytes, len);
    }
}

/// Prefetches bytes into the second-level cache; the hardware prefetcher does not cross the end of a row or a page.
/// Into the first level large blocks come at a lower rate, probably because it has fewer buffers for lines on their
/// way.
///
/// As assembly that may write memory, so that it stays between the loads before and behind it: the compiler would move
/// all the prefetches of a large block to its end.
#[inline(always)]
pub fn prefetch(bytes: *const u8, len: usize) {
    for line in (0..len).step_by(64) {
        let at = bytes.wrapping_add(line);
        // SAFETY: a prefetch reads nothing, so any address will do.
        unsafe { asm!("prefetcht1 [{}]", in(reg) at, options(nostack, preserves_flags)) };
    }
}
