//! The loop of AMX.
#![allow(unsafe_code)]

use std::arch::asm;

use super::peak_loop::PeakLoop;
use crate::amx::{Amx, TileShapes};

/// Rows of a tile, and bytes of each.
const ROWS: usize = 16;
const ROW_BYTES: usize = 64;
/// Tiles that are added to; the other two are multiplied.
const SUMS: usize = 6;

static SHAPES: TileShapes = TileShapes::new([(ROWS as u8, ROW_BYTES as u16); 8]);

/// Additions of the products of sixteen with sixteen rows of 64 bytes.
pub fn bytes() -> Option<PeakLoop> {
    Amx::detect()?;
    // SAFETY: the processor has the instructions, and this process may use them, as was just found out.
    let run = |rounds| unsafe { add_bytes(rounds) };
    Some(PeakLoop { instructions: "AMX", operations: 2 * ROWS * ROWS * ROW_BYTES * SUMS, run })
}

/// # Safety
/// [`Amx`] was detected.
unsafe fn add_bytes(rounds: u64) {
    let bytes: [u8; ROWS * ROW_BYTES] = std::array::from_fn(|i| i as u8);
    // SAFETY: as the caller guarantees. The shapes are valid for palette 1, the tiles that are read are as large as
    // `bytes`, and no other code of this thread uses tiles meanwhile.
    unsafe {
        asm!(
            "ldtilecfg [{shapes}]",
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", "tilezero tmm4", "tilezero tmm5",
            "tileloadd tmm6, [{bytes} + {line}]",
            "tileloadd tmm7, [{bytes} + {line}]",
            "2:",
            "tdpbssd tmm0, tmm6, tmm7",
            "tdpbssd tmm1, tmm6, tmm7",
            "tdpbssd tmm2, tmm6, tmm7",
            "tdpbssd tmm3, tmm6, tmm7",
            "tdpbssd tmm4, tmm6, tmm7",
            "tdpbssd tmm5, tmm6, tmm7",
            "dec {rounds}",
            "jnz 2b",
            "tilerelease",
            shapes = in(reg) &raw const SHAPES, bytes = in(reg) bytes.as_ptr(), line = in(reg) ROW_BYTES,
            rounds = inout(reg) rounds.max(1) => _, options(nostack, readonly),
        );
    }
}
