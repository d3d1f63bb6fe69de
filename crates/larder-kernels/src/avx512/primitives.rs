//! The primitives of AVX-512: sixteen rows in the lanes of a register, those of two panels.
//!
//! One instruction multiplies four unsigned with four signed bytes and adds the products to a lane. Signed weights are
//! raised by 128 to be unsigned. What offset weights have is subtracted from the start, by way of the sums of the
//! activations.
#![allow(unsafe_code)]
// The number of a token, a row or a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;

use larder_core::ROW_GROUP;

use super::floats;
use crate::avx2::prefetch;
use crate::simd::blocks::Blocks;
use crate::simd::byte_lanes::ByteLanes;
use crate::simd::token_blocks::TokenBlocks;
use crate::simd::{Simd, Task};

/// Lanes of a register.
const LANES: usize = 2 * ROW_GROUP;

/// Shows that this processor has AVX-512 F, BW, VL and VNNI, and what came before (AVX2, F16C), which is why every
/// block of `unsafe` here is sound that has no other reason.
#[derive(Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// The features that the instructions belong to, and whether the processor has them.
    #[inline]
    pub fn features() -> [(&'static str, bool); 6] {
        [
            ("avx512f", is_x86_feature_detected!("avx512f")),
            ("avx512bw", is_x86_feature_detected!("avx512bw")),
            ("avx512vl", is_x86_feature_detected!("avx512vl")),
            ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
            ("avx2", is_x86_feature_detected!("avx2")),
            ("f16c", is_x86_feature_detected!("f16c")),
        ]
    }

    /// If the processor has the instructions.
    pub fn detect() -> Option<Self> {
        Self::features().iter().all(|(_, has)| *has).then_some(Avx512(()))
    }

    /// Adds the dot products of `len` runs from number `first` on.
    #[inline(always)]
    fn add_dots<const N: usize>(
        self,
        mut sums: [__m512i; N],
        w: &[__m512i; 8],
        first: usize,
        len: usize,
        x: TokenBlocks<N>,
    ) -> [__m512i; N] {
        // SAFETY: see `Avx512`.
        unsafe {
            for k in first..first + len {
                for t in 0..N {
                    sums[t] = _mm512_dpbusd_epi32(sums[t], w[k], _mm512_set1_epi32(x.four(t, k)));
                }
            }
            sums
        }
    }
}

/// Two halves of a register from two places in memory, 32 bytes each.
#[inline(always)]
unsafe fn two(first: *const u8, second: *const u8) -> __m512i {
    // SAFETY: as the caller guarantees.
    unsafe {
        let first = _mm512_castsi256_si512(_mm256_loadu_si256(first.cast()));
        _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(second.cast()))
    }
}

impl Simd for Avx512 {
    const LANES: usize = LANES;
    const REGISTERS: usize = 32;
    const STRIP_TOKENS: usize = 6;
    const STRIP_TOKENS_IN_HALVES: usize = 4;
    type Floats = __m512;

    fn run<T: Task<Self>>(self, task: T) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,f16c")]
        fn compiled<T: Task<Avx512>>(simd: Avx512, task: T) {
            task.run(simd);
        }
        // SAFETY: see `Avx512`.
        unsafe { compiled(self, task) }
    }

    #[inline(always)]
    fn half<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> __m512 {
        // SAFETY: the blocks have the scale, of two bytes, as `Blocks::half` checks.
        unsafe {
            if INTERLEAVED {
                let first = _mm_loadu_si128(blocks.scale_at(i, 0).cast());
                let second = _mm_loadu_si128(blocks.scale_at(i, ROW_GROUP).cast());
                return _mm512_cvtph_ps(_mm256_set_m128i(second, first));
            }
            let mut bits = [0u16; LANES];
            for r in 0..LANES {
                bits[r] = blocks.scale_at(i, r).cast::<u16>().read_unaligned();
            }
            _mm512_cvtph_ps(_mm256_loadu_si256(bits.as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn raw_scale<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> __m512i {
        // SAFETY: the blocks have the scale, as `Blocks::raw_scale` checks.
        unsafe {
            if blocks.scale_bytes() == 2 {
                if INTERLEAVED {
                    let first = _mm_loadu_si128(blocks.scale_at(i, 0).cast());
                    let second = _mm_loadu_si128(blocks.scale_at(i, ROW_GROUP).cast());
                    return _mm512_cvtepu16_epi32(_mm256_set_m128i(second, first));
                }
                let mut bits = [0u16; LANES];
                for r in 0..LANES {
                    bits[r] = blocks.scale_at(i, r).cast::<u16>().read_unaligned();
                }
                return _mm512_cvtepu16_epi32(_mm256_loadu_si256(bits.as_ptr().cast()));
            }
            if INTERLEAVED {
                let first = _mm_loadl_epi64(blocks.scale_at(i, 0).cast());
                let second = _mm_loadl_epi64(blocks.scale_at(i, ROW_GROUP).cast());
                return _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(first, second));
            }
            let mut bits = [0u8; LANES];
            for r in 0..LANES {
                bits[r] = blocks.scale_at(i, r).read();
            }
            _mm512_cvtepu8_epi32(_mm_loadu_si128(bits.as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn run_of_four<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> __m512i {
        // SAFETY: the blocks have the run, as `Blocks::run` checks.
        unsafe {
            if INTERLEAVED {
                return two(blocks.run_at(i, 0), blocks.run_at(i, ROW_GROUP));
            }
            let mut rows = [0u32; LANES];
            for r in 0..LANES {
                rows[r] = blocks.run_at(i, r).cast::<u32>().read_unaligned();
            }
            _mm512_loadu_si512(rows.as_ptr().cast())
        }
    }

    #[inline(always)]
    fn four_runs<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, first: usize) -> [__m512i; 4] {
        // SAFETY: the blocks have four runs there, as `Blocks::runs` checks.
        unsafe {
            let mut runs = [_mm512_setzero_si512(); 4];
            if INTERLEAVED {
                for i in 0..4 {
                    runs[i] = two(blocks.run_at(first + i, 0), blocks.run_at(first + i, ROW_GROUP));
                }
                return runs;
            }
            // Rows i, 4 + i, 8 + i and 12 + i side by side, so that the transposition is within quarters of a register.
            for i in 0..4 {
                let first_half = _mm256_set_m128i(
                    _mm_loadu_si128(blocks.run_at(first, 4 + i).cast()),
                    _mm_loadu_si128(blocks.run_at(first, i).cast()),
                );
                let second_half = _mm256_set_m128i(
                    _mm_loadu_si128(blocks.run_at(first, 12 + i).cast()),
                    _mm_loadu_si128(blocks.run_at(first, 8 + i).cast()),
                );
                runs[i] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first_half), second_half);
            }
            let [a, b, c, d] = runs;
            let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
            let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(ab, cd),
                _mm512_unpackhi_epi64(ab, cd),
                _mm512_unpacklo_epi64(ab_high, cd_high),
                _mm512_unpackhi_epi64(ab_high, cd_high),
            ]
        }
    }

    #[inline(always)]
    fn byte(self, bytes: __m512i, at: usize) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_cvtepi32_ps(self.bits(bytes, -8 * at as i32, 0xff)) }
    }

    #[inline(always)]
    fn signed_byte(self, bytes: __m512i, at: usize) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe {
            let top = _mm512_sllv_epi32(bytes, _mm512_set1_epi32(24 - 8 * at as i32));
            _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top))
        }
    }

    #[inline(always)]
    fn half_of_lanes(self, bytes: __m512i) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bytes)) }
    }

    #[inline(always)]
    fn powers(self, exponents: __m512i) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe {
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(exponents, _mm512_set1_epi32(1)));
            let subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), exponents);
            let is_normal = _mm512_cmpgt_epi32_mask(exponents, _mm512_set1_epi32(1));
            _mm512_castsi512_ps(_mm512_mask_mov_epi32(subnormal, is_normal, normal))
        }
    }

    #[inline(always)]
    fn dots<const MAX: u8, const OFFSET: i16, const PARTS: usize, const N: usize>(
        self,
        w: &[__m512i; 8],
        x: TokenBlocks<N>,
    ) -> [[__m512; N]; PARTS] {
        // SAFETY: see `Avx512`.
        unsafe {
            let mut dots = [[_mm512_setzero_ps(); N]; PARTS];
            for part in 0..PARTS {
                let mut sums = [_mm512_setzero_si512(); N];
                if OFFSET != 0 {
                    for t in 0..N {
                        sums[t] = _mm512_set1_epi32(x.begin::<OFFSET, PARTS>(t, part));
                    }
                }
                let sums = self.add_dots(sums, w, 8 / PARTS * part, 8 / PARTS, x);
                for t in 0..N {
                    dots[part][t] = _mm512_cvtepi32_ps(sums[t]);
                }
            }
            dots
        }
    }

    #[inline(always)]
    fn signed_dots<const PARTS: usize, const N: usize>(
        self,
        w: &[__m512i; 8],
        x: TokenBlocks<N>,
    ) -> [[__m512; N]; PARTS] {
        self.dots::<255, 128, PARTS, N>(w, x)
    }

    #[inline(always)]
    fn store_unsigned<const MAX: u8, const OFFSET: i16>(self, w: &[__m512i; 8], to: &mut [u8]) -> (usize, i32) {
        // SAFETY: see `Avx512`.
        let raise = unsafe { _mm512_set1_epi8((128 - OFFSET).to_le_bytes()[0].cast_signed()) };
        let mut raised = *w;
        for w in &mut raised {
            // SAFETY: see `Avx512`.
            *w = unsafe { _mm512_add_epi8(*w, raise) };
        }
        self.store_signed(&raised, to)
    }

    #[inline(always)]
    fn store_signed(self, w: &[__m512i; 8], to: &mut [u8]) -> (usize, i32) {
        let to = &mut to[..8 * 64];
        for (k, w) in w.iter().enumerate() {
            // SAFETY: see `Avx512`; 64 bytes.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(64 * k).cast(), *w) };
        }
        (0, 128)
    }

    #[inline(always)]
    unsafe fn strip_dots<const FIT: usize, const PARTS: usize, const N: usize>(
        self,
        bytes: *const u8,
        part: usize,
        _: i32,
        x: TokenBlocks<N>,
    ) -> [[__m512; N]; 2] {
        // SAFETY: see `Avx512`; the bytes are there, as the caller guarantees.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); N]; 2];
            for t in 0..N {
                let start = _mm512_set1_epi32(x.begin::<128, PARTS>(t, part));
                (sums[0][t], sums[1][t]) = (start, start);
            }
            for k in 8 / PARTS * part..8 / PARTS * (part + 1) {
                let w =
                    [_mm512_loadu_si512(bytes.add(64 * k).cast()), _mm512_loadu_si512(bytes.add(64 * (8 + k)).cast())];
                for t in 0..N {
                    let x = _mm512_set1_epi32(x.four(t, k));
                    sums[0][t] = _mm512_dpbusd_epi32(sums[0][t], w[0], x);
                    sums[1][t] = _mm512_dpbusd_epi32(sums[1][t], w[1], x);
                }
            }
            let mut dots = [[_mm512_setzero_ps(); N]; 2];
            for t in 0..N {
                dots[0][t] = _mm512_cvtepi32_ps(sums[0][t]);
                dots[1][t] = _mm512_cvtepi32_ps(sums[1][t]);
            }
            dots
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn mul_sub(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn floats_at<const KIND: u8>(self, at: *const u8) -> __m512 {
        // SAFETY: as the caller guarantees.
        unsafe { floats::sixteen::<KIND>(at, 0) }
    }

    #[inline(always)]
    fn store(self, floats: __m512, out: &mut [f32]) {
        let out = &mut out[..LANES];
        // SAFETY: see `Avx512`; sixteen values.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), floats) };
    }

    #[inline(always)]
    fn prefetch(self, bytes: *const u8, len: usize) {
        prefetch(bytes, len);
    }
}
