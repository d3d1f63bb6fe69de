//! Tensors of integers, presented as floats: [`larder_core::digits`] says how.

use larder_core::{DIGITS, NumberFormat, TensorMeta, digits};

/// How integers are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoredInteger {
    /// In 32 bits.
    I32,
    /// In 64 bits.
    I64,
}

impl StoredInteger {
    /// Bytes of an integer.
    fn bytes(self) -> usize {
        match self {
            StoredInteger::I32 => 4,
            StoredInteger::I64 => 8,
        }
    }

    /// The integers in these bytes.
    fn integers(self, stored: &[u8]) -> Vec<i64> {
        match self {
            StoredInteger::I32 => stored.as_chunks().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
            StoredInteger::I64 => stored.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        }
    }
}

/// Bytes of its digits.
const PRESENTED: usize = DIGITS * size_of::<f32>();

/// The meta data of integers of this shape, with the digits as a further dimension; `None` if the size overflows.
pub fn meta(shape: &[usize]) -> Option<TensorMeta> {
    TensorMeta::new(NumberFormat::F32, [shape, &[DIGITS]].concat())
}

/// The range of stored bytes that bytes of the digits are made of: offset and length.
pub fn stored_range(stored: StoredInteger, offset: usize, len: usize) -> (usize, usize) {
    let (first, end) = (offset / PRESENTED, (offset + len).div_ceil(PRESENTED));
    (first * stored.bytes(), (end - first) * stored.bytes())
}

/// Fills `into` with the digits from byte `offset` on, of stored bytes that `read` reads.
pub fn read<E>(
    stored: StoredInteger,
    offset: usize,
    into: &mut [u8],
    read: impl FnOnce(usize, &mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (start, len) = stored_range(stored, offset, into.len());
    let mut bytes = vec![0; len];
    read(start, &mut bytes)?;
    let presented: Vec<u8> = stored.integers(&bytes).into_iter().flat_map(digits).flat_map(f32::to_le_bytes).collect();
    into.copy_from_slice(&presented[offset % PRESENTED..][..into.len()]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_of_the_digits_can_be_read() {
        let integers = [-2i64, 70_000, 1 << 30];
        let whole: Vec<u8> = integers.into_iter().flat_map(digits).flat_map(f32::to_le_bytes).collect();
        let wide: Vec<u8> = integers.iter().flat_map(|i| i.to_le_bytes()).collect();
        let narrow: Vec<u8> = integers.iter().flat_map(|i| (*i as i32).to_le_bytes()).collect();
        for (kind, stored) in [(StoredInteger::I64, wide), (StoredInteger::I32, narrow)] {
            for start in 0..whole.len() {
                for end in start + 1..=whole.len() {
                    let mut got = vec![0; end - start];
                    let from = |at: usize, into: &mut [u8]| {
                        into.copy_from_slice(&stored[at..][..into.len()]);
                        Ok::<_, ()>(())
                    };
                    read(kind, start, &mut got, from).unwrap();
                    assert_eq!(got, whole[start..end], "{kind:?} {start}..{end}");
                }
            }
        }
        assert_eq!(meta(&[3]).unwrap().bytes, whole.len());
    }
}
