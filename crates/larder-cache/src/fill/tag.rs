//! Tags of reads: the expert, which half of it, and whether it is a prefetch or of another copy.

use super::halves::Half;

/// The tag of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReadTag {
    /// Number of the expert among all.
    pub number: u64,
    /// No visit has asked for it.
    pub is_prefetch: bool,
    /// It is of another copy, because the bytes of a first one were wrong.
    pub is_copy: bool,
    /// The half that is read; `None` if it is the whole expert.
    pub half: Option<Half>,
}

const PREFETCH: u64 = 1;
const COPY: u64 = 2;
const FRONT: u64 = 4;
const BACK: u64 = 8;
/// Bits below the number of the expert.
const BITS: u32 = 4;

impl ReadTag {
    /// The tag of a wanted expert that is read as a whole.
    pub fn new(number: u64) -> Self {
        ReadTag { number, is_prefetch: false, is_copy: false, half: None }
    }

    /// The name of the read in a timeline.
    pub fn name(self) -> &'static str {
        match (self.is_prefetch, self.is_copy, self.half) {
            (true, ..) => "prefetch",
            (_, true, _) => "read of another copy",
            (_, _, None) => "read",
            (_, _, Some(Half::Front)) => "read of gate and up",
            (_, _, Some(Half::Back)) => "read of down",
        }
    }

    pub fn to_bits(self) -> u64 {
        let half = match self.half {
            None => 0,
            Some(Half::Front) => FRONT,
            Some(Half::Back) => BACK,
        };
        let set = |bit, on| if on { bit } else { 0 };
        self.number << BITS | half | set(PREFETCH, self.is_prefetch) | set(COPY, self.is_copy)
    }

    pub fn from_bits(bits: u64) -> Self {
        let has = |bit| bits & bit != 0;
        let back = has(BACK).then_some(Half::Back);
        let half = if has(FRONT) { Some(Half::Front) } else { back };
        ReadTag { number: bits >> BITS, is_prefetch: has(PREFETCH), is_copy: has(COPY), half }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_the_same_tag() {
        for number in [0, 1, u64::MAX >> BITS] {
            for (is_prefetch, is_copy) in [(false, false), (true, false), (false, true), (true, true)] {
                for half in [None, Some(Half::Front), Some(Half::Back)] {
                    let tag = ReadTag { number, is_prefetch, is_copy, half };
                    assert_eq!(ReadTag::from_bits(tag.to_bits()), tag);
                }
            }
        }
    }
}
