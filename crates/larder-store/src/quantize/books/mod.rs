//! Formats whose values are entries of code books: each entry stands for the magnitudes of four or eight values, beside
//! which their signs are stored, and groups have scales of four bits, odd multiples of a common one.
//!
//! Scales are first estimated as if every combination of levels were an entry. Then, for a few scales near that, the
//! entries with the least error are found exactly, and the common scale is replaced by the best one for them.

mod cells;
mod code_book;
mod search;

use std::sync::LazyLock;

use larder_core::{IQ2_LEVELS, IQ3_S_LEVELS, IQ3_XXS_LEVELS, code_books};

use self::{
    code_book::CodeBook,
    search::{BookFormat, SUPER, Signs},
};

/// What the columns of a block matter, if it is known.
type Importance<'a> = Option<&'a [f32; SUPER]>;

/// Entries of eight values at three levels, in eighths of a scale.
type Octets<const GROUP: usize> = BookFormat<8, 3, 81, GROUP>;
/// Entries of four values at eight levels.
type Quads<const GROUP: usize> = BookFormat<4, 8, 64, GROUP>;

static IQ2_XXS: LazyLock<Octets<32>> = LazyLock::new(|| octets(&code_books::IQ2_XXS, Signs::Even));
static IQ2_XS: LazyLock<Octets<16>> = LazyLock::new(|| octets(&code_books::IQ2_XS, Signs::Even));
static IQ2_S: LazyLock<Octets<16>> = LazyLock::new(|| octets(&code_books::IQ2_S, Signs::Free));
static IQ3_XXS: LazyLock<Quads<32>> = LazyLock::new(|| {
    let book = CodeBook::new(&code_books::IQ3_XXS, IQ3_XXS_LEVELS);
    BookFormat { book, signs: Signs::Even, unit: 0.25 }
});
static IQ3_S: LazyLock<Quads<32>> = LazyLock::new(|| {
    let book = CodeBook::new(&code_books::IQ3_S, IQ3_S_LEVELS);
    BookFormat { book, signs: Signs::Free, unit: 1.0 }
});

fn octets<const GROUP: usize>(packed: &[u16], signs: Signs) -> Octets<GROUP> {
    BookFormat { book: CodeBook::new(packed, IQ2_LEVELS), signs, unit: 0.125 }
}

pub fn iq2_xxs(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 66]) {
    let coded = IQ2_XXS.code(values, importance);
    out[..2].copy_from_slice(&coded.d.to_le_bytes());
    for g in 0..8 {
        let entries = &coded.entries[4 * g..][..4];
        out[2 + 8 * g..][..4].iter_mut().zip(entries).for_each(|(out, entry)| *out = *entry as u8);
        out[6 + 8 * g..][..4].copy_from_slice(&coded.sevens(g).to_le_bytes());
    }
}

pub fn iq2_xs(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 74]) {
    let coded = IQ2_XS.code(values, importance);
    out[..2].copy_from_slice(&coded.d.to_le_bytes());
    for (cell, out) in out[2..66].as_chunks_mut().0.iter_mut().enumerate() {
        *out = (coded.entries[cell] | u16::from(coded.signs[cell] & 127) << 9).to_le_bytes();
    }
    coded.put_scales(&mut out[66..]);
}

pub fn iq2_s(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 82]) {
    let coded = IQ2_S.code(values, importance);
    out[..2].copy_from_slice(&coded.d.to_le_bytes());
    out[66..74].fill(0);
    for (cell, entry) in coded.entries[..32].iter().enumerate() {
        out[2 + cell] = *entry as u8;
        out[66 + cell / 4] |= ((entry >> 8) as u8) << (2 * (cell % 4));
    }
    out[34..66].copy_from_slice(&coded.signs);
    coded.put_scales(&mut out[74..]);
}

pub fn iq3_xxs(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 98]) {
    let coded = IQ3_XXS.code(values, importance);
    out[..2].copy_from_slice(&coded.d.to_le_bytes());
    out[2..66].iter_mut().zip(coded.entries).for_each(|(out, entry)| *out = entry as u8);
    for (g, out) in out[66..].as_chunks_mut().0.iter_mut().enumerate() {
        *out = coded.sevens(g).to_le_bytes();
    }
}

pub fn iq3_s(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 110]) {
    let coded = IQ3_S.code(values, importance);
    out[..2].copy_from_slice(&coded.d.to_le_bytes());
    out[66..74].fill(0);
    for (cell, entry) in coded.entries.iter().enumerate() {
        out[2 + cell] = *entry as u8;
        out[66 + cell / 8] |= ((entry >> 8) as u8) << (cell % 8);
    }
    out[74..106].copy_from_slice(&coded.signs);
    coded.put_scales(&mut out[106..]);
}
