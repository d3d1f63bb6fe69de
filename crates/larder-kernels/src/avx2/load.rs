//! Loading the same part of eight rows' blocks, whichever order they are in, from one panel or several.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use larder_core::{BlockParts, GROUP, Kind};

use crate::weights::Panel;

/// Where eight rows begin. If they are interleaved (`MIXED`), only the first pointer counts; if there are fewer, the
/// last one stands for those that are missing.
pub struct Rows<const MIXED: bool>([*const u8; GROUP]);

impl<const MIXED: bool> Rows<MIXED> {
    #[inline]
    pub fn of(panel: &Panel) -> Self {
        Rows(std::array::from_fn(|r| panel.bytes[r.min(panel.rows - 1) * panel.row_bytes..].as_ptr()))
    }

    /// The block at `index` of all rows.
    ///
    /// # Safety
    /// The rows have that many blocks of this kind.
    #[inline]
    pub unsafe fn block(&self, kind: Kind, index: usize) -> Eight<'_, MIXED> {
        let parts = BlockParts::of(kind).expect("kernels for blocks get blocks");
        let at = index * kind.block_bytes() * if MIXED { GROUP } else { 1 };
        Eight { rows: &self.0, at, parts }
    }
}

/// One block of each of eight rows, which are the lanes of what is loaded from it.
#[derive(Clone, Copy)]
pub struct Eight<'a, const MIXED: bool> {
    rows: &'a [*const u8; GROUP],
    at: usize,
    parts: BlockParts,
}

impl<const MIXED: bool> Eight<'_, MIXED> {
    /// The f16 number `i` of every block, as f32.
    ///
    /// # Safety
    /// The blocks have it.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub unsafe fn half(self, i: usize) -> __m256 {
        // SAFETY: inside the blocks, as the caller guarantees.
        let bits = unsafe {
            if MIXED {
                _mm_loadu_si128(self.rows[0].add(self.at + 2 * GROUP * i).cast())
            } else {
                let at = self.at + self.parts.halves_at + 2 * i;
                let one = |r: usize| self.rows[r].add(at).cast::<i16>().read_unaligned();
                _mm_setr_epi16(one(0), one(1), one(2), one(3), one(4), one(5), one(6), one(7))
            }
        };
        _mm256_cvtph_ps(bits)
    }

    /// Runs of four bytes: four of them beginning with number `first`.
    ///
    /// # Safety
    /// The blocks have them.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub unsafe fn fours(self, first: usize) -> [__m256i; 4] {
        // SAFETY: inside the blocks, as the caller guarantees.
        unsafe {
            match MIXED {
                true => together(self.rows[0].add(self.at + 2 * GROUP * self.parts.halves + 4 * GROUP * first)),
                false => apart(self.rows, self.at + self.parts.fours_at + 4 * first),
            }
        }
    }

    /// Eight runs of four bytes, as [`fours`](Eight::fours).
    ///
    /// # Safety
    /// The blocks have them.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub unsafe fn eights(self, first: usize) -> [__m256i; 8] {
        // SAFETY: as the caller guarantees.
        let ([a, b, c, d], [e, f, g, h]) = unsafe { (self.fours(first), self.fours(first + 4)) };
        [a, b, c, d, e, f, g, h]
    }
}

#[target_feature(enable = "avx2")]
#[inline]
unsafe fn together(at: *const u8) -> [__m256i; 4] {
    // SAFETY: 128 bytes are there, as the caller guarantees.
    let four = |i: usize| unsafe { _mm256_loadu_si256(at.add(4 * GROUP * i).cast()) };
    [four(0), four(1), four(2), four(3)]
}

#[target_feature(enable = "avx2")]
#[inline]
unsafe fn apart(rows: &[*const u8; GROUP], at: usize) -> [__m256i; 4] {
    // SAFETY: every row has sixteen bytes there, as the caller guarantees.
    let row = |r: usize| unsafe { _mm_loadu_si128(rows[r].add(at).cast()) };
    let (a, b) = (_mm256_set_m128i(row(4), row(0)), _mm256_set_m128i(row(5), row(1)));
    let (c, d) = (_mm256_set_m128i(row(6), row(2)), _mm256_set_m128i(row(7), row(3)));
    let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
    [
        _mm256_unpacklo_epi64(ab, cd),
        _mm256_unpackhi_epi64(ab, cd),
        _mm256_unpacklo_epi64(ab_high, cd_high),
        _mm256_unpackhi_epi64(ab_high, cd_high),
    ]
}

/// Tells the processor that these bytes are wanted soon, which it does not foresee where a row or a page ends.
#[inline]
pub fn fetch(bytes: *const u8, len: usize) {
    for line in (0..len).step_by(64) {
        // SAFETY: nothing is read, so that any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(line).cast()) };
    }
}
