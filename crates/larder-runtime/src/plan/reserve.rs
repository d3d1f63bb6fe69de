//! Memory that a plan leaves unused.

/// Reserve for kernel allocations on behalf of the process and for unforeseen needs.
const RESERVE_BYTES: u64 = 64 << 20;
/// Reserve with a GPU, where slots are page-locked and the driver allocates memory too.
const RESERVE_BYTES_WITH_GPU: u64 = 512 << 20;
/// The reserve is at most this fraction of the available memory, so that small control groups are usable.
pub const RESERVE_DIVISOR: u64 = 8;

/// The reserve of a plan on the CPU with this much memory available.
pub fn reserve_bytes(available: u64) -> u64 {
    bytes(Some(available), false)
}

/// The reserve of a plan.
pub fn bytes(available: Option<u64>, on_gpu: bool) -> u64 {
    let most = if on_gpu { RESERVE_BYTES_WITH_GPU } else { RESERVE_BYTES };
    available.map_or(most, |available| most.min(available / RESERVE_DIVISOR))
}
