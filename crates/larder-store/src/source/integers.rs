//! Tensors of 64-bit integers in a checkpoint, presented as floats: [`larder_core::digits`] says how.

use larder_core::{DIGITS, NumberFormat, TensorMeta, TensorsError, digits};

/// Bytes of a stored integer.
const STORED: usize = 8;

/// Bytes of its digits.
const PRESENTED: usize = DIGITS * size_of::<f32>();

/// The meta data of integers of this shape, with the digits as a further dimension; `None` if the size overflows.
pub fn meta(shape: &[usize]) -> Option<TensorMeta> {
    TensorMeta::new(NumberFormat::F32, [shape, &[DIGITS]].concat())
}

/// The range of stored bytes that bytes of the digits are made of: offset and length.
pub fn stored_range(offset: usize, len: usize) -> (usize, usize) {
    let (first, end) = (offset / PRESENTED, (offset + len).div_ceil(PRESENTED));
    (first * STORED, (end - first) * STORED)
}

/// Fills `into` with the digits from byte `offset` on, of stored bytes that `read` reads.
pub fn read(
    offset: usize,
    into: &mut [u8],
    read: impl FnOnce(usize, &mut [u8]) -> Result<(), TensorsError>,
) -> Result<(), TensorsError> {
    let (start, len) = stored_range(offset, into.len());
    let mut stored = vec![0; len];
    read(start, &mut stored)?;
    let integers = stored.as_chunks::<STORED>().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
    let presented: Vec<u8> = integers.flat_map(digits).flat_map(f32::to_le_bytes).collect();
    into.copy_from_slice(&presented[offset % PRESENTED..][..into.len()]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_of_the_digits_can_be_read() {
        let integers = [-2i64, 70_000, 5 << 40];
        let stored: Vec<u8> = integers.iter().flat_map(|i| i.to_le_bytes()).collect();
        let whole: Vec<u8> = integers.into_iter().flat_map(digits).flat_map(f32::to_le_bytes).collect();
        for start in 0..whole.len() {
            for end in start + 1..=whole.len() {
                let mut got = vec![0; end - start];
                let from = |at: usize, into: &mut [u8]| {
                    into.copy_from_slice(&stored[at..][..into.len()]);
                    Ok(())
                };
                read(start, &mut got, from).unwrap();
                assert_eq!(got, whole[start..end], "{start}..{end}");
            }
        }
        assert_eq!(meta(&[3]).unwrap().bytes, whole.len());
    }
}
