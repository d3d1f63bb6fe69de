//! Encoding of numbers on the wire: four or two bytes each, little-endian.

use half::bf16;

use crate::workers::wire::Format;

/// Bytes per number.
pub fn bytes_per_number(format: Format) -> usize {
    match format {
        Format::Unspecified => 0,
        Format::F32 => 4,
        Format::Bf16 => 2,
    }
}

/// Encodes `values`.
pub fn encode(format: Format, values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * bytes_per_number(format));
    match format {
        Format::Unspecified => {}
        Format::F32 => values.iter().for_each(|v| bytes.extend_from_slice(&v.to_le_bytes())),
        Format::Bf16 => values.iter().for_each(|v| bytes.extend_from_slice(&bf16::from_f32(*v).to_le_bytes())),
    }
    bytes
}

/// Decodes `bytes`; `None` if they are not exactly `count` numbers.
pub fn decode(format: Format, bytes: &[u8], count: usize) -> Option<Vec<f32>> {
    if format == Format::Unspecified || count.checked_mul(bytes_per_number(format)) != Some(bytes.len()) {
        return None;
    }
    Some(match format {
        Format::Bf16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        _ => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip_and_lengths_are_checked() {
        let values = [0.0, -0.0, 1.5, -3.25e-12, f32::INFINITY, 1.0 + f32::EPSILON];
        let bytes = encode(Format::F32, &values);
        let back = decode(Format::F32, &bytes, 6).unwrap();
        assert_eq!(back.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), values.map(f32::to_bits));
        let back = decode(Format::Bf16, &encode(Format::Bf16, &values), 6).unwrap();
        assert_eq!((back[2], back[5], back[1].to_bits()), (1.5, 1.0, (-0.0f32).to_bits()));
        assert!((back[3] / values[3] - 1.0).abs() < 1.0 / 256.0);
        for (count, cut) in [(5, 24), (7, 24), (6, 23), (usize::MAX, 24)] {
            assert_eq!(decode(Format::F32, &bytes[..cut], count), None);
        }
        assert_eq!(decode(Format::Unspecified, &[], 0), None);
    }
}
