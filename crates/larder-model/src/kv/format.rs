//! The number formats of KV caches.

use larder_core::NumberFormat;
use larder_kernels::{narrow, quantise_row};

/// Number format of the keys and values in a KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvFormat {
    /// As computed.
    F32,
    /// Rounded to half the bytes.
    F16,
    /// Rounded to eight bits in blocks of 32, each with a scale; rows are padded to whole blocks. Attention is that of
    /// the rounded values in f32.
    Q8_0,
}

impl KvFormat {
    /// Bytes of a row of `width` values.
    pub fn row_bytes(self, width: usize) -> usize {
        width.div_ceil(self.kind().block_len()) * self.kind().block_bytes()
    }

    /// Writes one row.
    pub(super) fn store(self, values: &[f32], row: &mut [u8]) {
        match self {
            KvFormat::Q8_0 => quantise_row(values, row),
            KvFormat::F32 | KvFormat::F16 => narrow(self.kind(), values, row),
        }
    }

    /// The number format of one number.
    pub fn kind(self) -> NumberFormat {
        match self {
            KvFormat::F32 => NumberFormat::F32,
            KvFormat::F16 => NumberFormat::F16,
            KvFormat::Q8_0 => NumberFormat::Q8_0,
        }
    }
}
