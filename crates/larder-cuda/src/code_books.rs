//! The code books as a header of the kernels.

use std::fmt::Write;

use larder_core::{IQ3_S_LEVELS, IQ3_XXS_LEVELS, code_books};

/// The text of `code_books.cuh`.
pub fn header() -> String {
    let mut text = String::new();
    let octets = "eight values: the numbers of their levels, as nibbles";
    table(&mut text, "IQ1", octets, code_books::IQ1.map(nibbles));
    table(&mut text, "IQ2_XXS", octets, code_books::IQ2_XXS.map(nibbles));
    table(&mut text, "IQ2_XS", octets, code_books::IQ2_XS.map(nibbles));
    table(&mut text, "IQ2_S", octets, code_books::IQ2_S.map(nibbles));
    let quads = "four values, as bytes";
    table(&mut text, "IQ3_XXS", quads, code_books::IQ3_XXS.map(|entry| bytes(entry, IQ3_XXS_LEVELS)));
    table(&mut text, "IQ3_S", quads, code_books::IQ3_S.map(|entry| bytes(entry, IQ3_S_LEVELS)));
    text
}

fn table<const N: usize>(text: &mut String, name: &str, entries: &str, values: [u32; N]) {
    let written = writeln!(text, "// Entries of {entries}.\n__device__ const u32 {name}[{N}] = {{");
    written.expect("a string takes what is written");
    for row in values.chunks(8) {
        row.iter().for_each(|value| write!(text, "{value:#x}u,").expect("a string takes what is written"));
        text.push('\n');
    }
    text.push_str("};\n");
}

/// Eight numbers of two bits, as nibbles.
fn nibbles(entry: u16) -> u32 {
    (0..8).map(|i| u32::from(entry >> (2 * i) & 3) << (4 * i)).sum()
}

/// The levels that four numbers of three bits stand for, as bytes.
fn bytes(entry: u16, levels: [i8; 8]) -> u32 {
    (0..4).map(|i| (levels[usize::from(entry >> (3 * i) & 7)] as u32) << (8 * i)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_as_the_kernels_read_them() {
        assert_eq!(nibbles(0b10_01_00_00_00_10_00_01), 0x2100_0201);
        assert_eq!(bytes(0b001_000_111_010, [1, 3, 5, 7, 9, 11, 13, 15]), 0x0301_0f05);
        let text = header();
        assert!(
            text.starts_with("// Entries of eight values: the numbers of their levels, as nibbles.\n"),
            "{text:.200}"
        );
        assert!(text.contains("\n__device__ const u32 IQ3_XXS[256] = {\n"));
        assert_eq!(text.matches("u,").count(), 2048 + 256 + 512 + 1024 + 256 + 512);
    }
}
