//! Operations on four bytes of each row.

/// The primitives of an instruction set on bytes: every lane of 32 bits has four bytes of a row.
pub trait ByteLanes: Copy {
    /// Four bytes of each row.
    type Bytes: Copy;
    /// Four signed bytes of each row, in the form in which the set multiplies them.
    type Signed: Copy;

    /// Every lane, an integer of 32 bits, shifted left by `left`, or right if that is negative; of that the bits of
    /// `mask`.
    fn bits(self, bytes: Self::Bytes, left: i32, mask: u32) -> Self::Bytes;

    /// Bitwise or.
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// Bitwise exclusive or.
    fn xor(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// Every byte minus `offset`, modulo 256.
    fn minus(self, bytes: Self::Bytes, offset: u8) -> Self::Bytes;

    /// Bits `4 · k` to `4 · k + 3` of every lane: in each of its bytes the value 16 times the bit.
    fn sixteens(self, bits: Self::Bytes, k: usize) -> Self::Bytes;

    /// Byte `k` (0 to 3) of every lane: in each of its bytes two bits of it, the lowest first.
    fn pairs(self, bytes: Self::Bytes, k: usize) -> Self::Bytes;

    /// Three times every byte, modulo 256.
    fn tripled(self, bytes: Self::Bytes) -> Self::Bytes;

    /// Three times every byte, divided by 256 and rounded down.
    fn digits(self, bytes: Self::Bytes) -> Self::Bytes;

    /// The entries of a table at the indices in the bytes, 0 to 15.
    fn look_up(self, table: &[u8; 16], indices: Self::Bytes) -> Self::Bytes;

    /// As [`look_up`](ByteLanes::look_up), signed.
    fn look_up_signed(self, table: &[i8; 16], indices: Self::Bytes) -> Self::Signed;

    /// The entries of a table at the index that every lane is, modulo `LEN`, which is a power of two.
    fn entries<const LEN: usize>(self, table: &[u32; LEN], indices: Self::Bytes) -> Self::Bytes;

    /// Bytes as signed integers.
    fn signed(self, bytes: Self::Bytes) -> Self::Signed;

    /// Signed bytes, −127 to 127, of which those are negated whose bit is set in the bits `4 · k` to `4 · k + 3` of the
    /// lane of `signs`.
    fn negated(self, bytes: Self::Signed, signs: Self::Bytes, k: usize) -> Self::Signed;
}
