//! AMX: whether this process may use tiles of bytes, and their shapes. Rust has no stable intrinsics for them.
#![allow(unsafe_code)]

use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Shows that this processor multiplies tiles of bytes, and that the system lets this process do so.
#[derive(Clone, Copy)]
pub struct Amx(());

impl Amx {
    /// If both hold, which is found out once.
    pub fn detect() -> Option<Self> {
        static ALLOWED: OnceLock<bool> = OnceLock::new();
        ALLOWED.get_or_init(|| has_tiles() && is_permitted()).then_some(Amx(()))
    }
}

/// Whether the processor has tiles of bytes, and the system saves them.
fn has_tiles() -> bool {
    const TILES_AND_BYTES: u32 = 1 << 24 | 1 << 25;
    const SAVED: u64 = 3 << 17;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & 1 << 27 == 0 {
        return false;
    }
    // SAFETY: the system has enabled the instruction, as the bit that was just tested says.
    __cpuid_count(7, 0).edx & TILES_AND_BYTES == TILES_AND_BYTES && unsafe { enabled_states() } & SAVED == SAVED
}

/// The states of the processor that the system saves.
#[target_feature(enable = "xsave")]
fn enabled_states() -> u64 {
    // SAFETY: register 0 exists wherever the instruction does.
    unsafe { _xgetbv(0) }
}

/// Asks the kernel for the memory in which it saves the tiles of this process' threads.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_PERMISSION: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let result: i64;
    // SAFETY: the call reads and writes no memory of this process.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The shapes of the eight tiles, as the processor loads them.
#[repr(C, align(64))]
pub struct TileShapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileShapes {
    /// Of each tile the rows, at most 16, and their bytes, at most 64.
    pub const fn new(tiles: [(u8, u16); 8]) -> Self {
        let (mut row_bytes, mut rows, mut i) = ([0; 16], [0; 16], 0);
        while i < tiles.len() {
            assert!(tiles[i].0 <= 16 && tiles[i].1 <= 64, "a tile is too large");
            (rows[i], row_bytes[i]) = tiles[i];
            i += 1;
        }
        TileShapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}
