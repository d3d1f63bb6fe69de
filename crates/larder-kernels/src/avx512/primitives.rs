//! The primitives of AVX-512: sixteen rows in the lanes of a register, those of two panels.
//!
//! One instruction multiplies four unsigned with four signed bytes and adds the products to a lane. Signed weights are
//! raised by 128 to be unsigned. What offset weights have is subtracted from the start, by way of the sums of the
//! activations. Integer scales are multiplied as floats, which is exact below 2²⁴.
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
    /// If the processor has the instructions.
    pub fn detect() -> Option<Self> {
        let able = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("f16c");
        able.then_some(Avx512(()))
    }

    /// Of each token the sums of both halves of its block, each times a factor.
    #[inline(always)]
    fn halves<const N: usize>(self, factors: __m512i, x: TokenBlocks<N>) -> [__m512i; N] {
        // SAFETY: see `Avx512`.
        unsafe {
            let mut sums = [_mm512_setzero_si512(); N];
            for t in 0..N {
                sums[t] = _mm512_dpwssd_epi32(sums[t], factors, _mm512_set1_epi32(x.halves(t)));
            }
            sums
        }
    }

    /// What the dot products with the halves of a block begin with if the weights are too large by two offsets.
    #[inline(always)]
    fn start<const N: usize>(self, [first, second]: [i16; 2], x: TokenBlocks<N>) -> [__m512i; N] {
        // SAFETY: see `Avx512`.
        unsafe {
            if first == 0 && second == 0 {
                return [_mm512_setzero_si512(); N];
            }
            let factors = i32::from(-second) << 16 | i32::from((-first).cast_unsigned());
            self.halves(_mm512_set1_epi32(factors), x)
        }
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

    #[inline(always)]
    fn floats<const N: usize>(self, integers: [__m512i; N]) -> [__m512; N] {
        // SAFETY: see `Avx512`.
        unsafe {
            let mut floats = [_mm512_setzero_ps(); N];
            for t in 0..N {
                floats[t] = _mm512_cvtepi32_ps(integers[t]);
            }
            floats
        }
    }

    /// The signed byte at index `at` of each lane, as an integer.
    #[inline(always)]
    fn integer(self, bytes: __m512i, at: usize) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe {
            let top = _mm512_sllv_epi32(bytes, _mm512_set1_epi32(24 - 8 * at as i32));
            _mm512_srai_epi32::<24>(top)
        }
    }
}

/// The scales of the two halves of a block of 32.
#[derive(Clone, Copy)]
pub struct HalfScales {
    first: __m512,
    second: __m512,
    /// The first and the second, as the 16-bit halves of each lane.
    both: __m512i,
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
    const TOKENS: usize = 8;
    type Floats = __m512;
    type Scale = __m512;
    type HalfScales = HalfScales;

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
    fn scale(self, bytes: __m512i, at: usize) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_cvtepi32_ps(self.integer(bytes, at)) }
    }

    #[inline(always)]
    fn half_scales(self, bytes: __m512i, at: usize) -> HalfScales {
        // SAFETY: see `Avx512`.
        unsafe {
            let (first, second) = (self.integer(bytes, at), self.integer(bytes, at + 1));
            let both = _mm512_mask_mov_epi16(first, 0xaaaa_aaaa, _mm512_slli_epi32::<16>(second));
            HalfScales { first: _mm512_cvtepi32_ps(first), second: _mm512_cvtepi32_ps(second), both }
        }
    }

    #[inline(always)]
    fn byte(self, bytes: __m512i, at: usize) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_cvtepi32_ps(self.bits(bytes, -8 * at as i32, 0xff)) }
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
    fn dots<const MAX: u8, const OFFSET: i16, const N: usize>(
        self,
        w: &[__m512i; 8],
        x: TokenBlocks<N>,
    ) -> [__m512; N] {
        self.floats(self.add_dots(self.start([OFFSET; 2], x), w, 0, 8, x))
    }

    #[inline(always)]
    fn signed_dots<const N: usize>(self, w: &[__m512i; 8], x: TokenBlocks<N>) -> [__m512; N] {
        self.dots::<255, 128, N>(w, x)
    }

    #[inline(always)]
    fn scaled_dots<const MAX: u8, const N: usize>(
        self,
        w: &[__m512i; 8],
        scale: __m512,
        x: TokenBlocks<N>,
    ) -> [__m512; N] {
        self.times(self.dots::<MAX, 0, N>(w, x), scale)
    }

    #[inline(always)]
    fn signed_scaled_dots<const N: usize>(self, w: &[__m512i; 8], scale: __m512, x: TokenBlocks<N>) -> [__m512; N] {
        self.times(self.signed_dots(w, x), scale)
    }

    #[inline(always)]
    fn half_scaled_dots<const MAX: u8, const OFFSET: i16, const N: usize>(
        self,
        w: &[__m512i; 8],
        scales: HalfScales,
        x: TokenBlocks<N>,
    ) -> [__m512; N] {
        let first = self.add_dots(self.start([OFFSET, 0], x), w, 0, 4, x);
        let second = self.add_dots(self.start([0, OFFSET], x), w, 4, 4, x);
        let mut dots = self.times(self.floats(first), scales.first);
        let second = self.times(self.floats(second), scales.second);
        for t in 0..N {
            dots[t] = self.add(dots[t], second[t]);
        }
        dots
    }

    #[inline(always)]
    fn signed_half_scaled_dots<const N: usize>(
        self,
        w: &[__m512i; 8],
        scales: HalfScales,
        x: TokenBlocks<N>,
    ) -> [__m512; N] {
        self.half_scaled_dots::<255, 128, N>(w, scales, x)
    }

    #[inline(always)]
    fn half_dots<const MAX: u8, const OFFSET: i16, const N: usize>(
        self,
        w: &[__m512i; 8],
        x: TokenBlocks<N>,
    ) -> [[__m512; N]; 2] {
        let first = self.add_dots(self.start([OFFSET, 0], x), w, 0, 4, x);
        let second = self.add_dots(self.start([0, OFFSET], x), w, 4, 4, x);
        [self.floats(first), self.floats(second)]
    }

    #[inline(always)]
    fn scaled_halves<const N: usize>(self, scales: HalfScales, x: TokenBlocks<N>) -> [__m512; N] {
        self.floats(self.halves(scales.both, x))
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_mul_ps(a, b) }
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

impl Avx512 {
    #[inline(always)]
    fn times<const N: usize>(self, mut values: [__m512; N], factor: __m512) -> [__m512; N] {
        for value in &mut values {
            *value = self.mul(*value, factor);
        }
        values
    }
}
