//! 64-bit integers in tensors of floats, which is all that stores have: each as four digits of 16 bits, lowest first.

/// Digits of an integer.
pub const DIGITS: usize = 4;

/// The digits of an integer, as floats.
pub fn digits(integer: i64) -> [f32; DIGITS] {
    let bits = integer as u64;
    std::array::from_fn(|digit| f32::from((bits >> (16 * digit)) as u16))
}

/// The integer of these digits; `None` if one of them is none.
pub fn from_digits(digits: [f32; DIGITS]) -> Option<i64> {
    let mut bits = 0u64;
    for (place, digit) in digits.into_iter().enumerate() {
        let whole = digit as u16;
        if f32::from(whole) != digit {
            return None;
        }
        bits |= u64::from(whole) << (16 * place);
    }
    Some(bits as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_keep_every_bit() {
        for integer in [0, 1, -1, 65_535, 65_536, i64::MAX, i64::MIN, 0x0123_4567_89ab_cdef] {
            assert_eq!(from_digits(digits(integer)), Some(integer));
        }
        for digit in [0.5, -1.0, 65_536.0, f32::NAN, f32::INFINITY] {
            assert_eq!(from_digits([1.0, digit, 0.0, 0.0]), None);
        }
    }
}
