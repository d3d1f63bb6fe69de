// Products with weights in formats with blocks of 32 to 128 values; see blocks.cuh.
#include "groups.cuh"

// Four bits, bit i as bit 4 of byte i.
__device__ inline u32 fifth_bits(u32 four) {
    return (four & 1) << 4 | (four & 2) << 11 | (four & 4) << 18 | (four & 8) << 25;
}

// Word j of a block of nibbles, the low ones of 16 bytes first, each with a fifth bit from the first run if there are FIFTHS.
template <int FIFTHS, typename Rows> __device__ u32 nibbles_of(const Rows &rows, int b, int j) {
    u32 nibbles = rows.four(b, FIFTHS + j % 4) >> 4 * (j / 4) & 0x0F0F0F0Fu;
    return FIFTHS ? nibbles | fifth_bits(rows.four(b, 0) >> 4 * j) : nibbles;
}

struct Q8_0 : BlockScale {
    static constexpr int BYTES = 34;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int, int j) { return rows.four(b, j); }
};

// q4_0 and q5_0.
template <int FIFTHS> struct AroundZero : BlockScale {
    static constexpr int BYTES = 18 + 4 * FIFTHS, OFFSET = FIFTHS ? 16 : 8;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int, int j) {
        return nibbles_of<FIFTHS>(rows, b, j);
    }
};

// q4_1 and q5_1: integers above a minimum.
template <int FIFTHS> struct AboveMinimum : Format<1, true> {
    static constexpr int BYTES = 20 + 4 * FIFTHS;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;

    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int) {
        return {{rows.half(b, 0)}, {rows.half(b, 1)}};
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int, int j) {
        return nibbles_of<FIFTHS>(rows, b, j);
    }
};

struct Iq4Nl : BlockScale {
    static constexpr int BYTES = 18;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int, int j) {
        return iq4_levels().four(nibbles_of<0>(rows, b, j));
    }
};

// A row of mxfp4, whose blocks are a byte and 16 bytes, so that nothing in a plain row is aligned.
template <bool INTERLEAVED> struct Mxfp4Row {
    static constexpr int BYTES = 17;
    const u8 *base;
    int row;

    // The byte of block b that is the exponent of its scale.
    __device__ u32 exponent(int b) const { return INTERLEAVED ? base[(u64)b * BYTES * GROUP + row] : base[(u64)b * BYTES]; }

    // Run i of four of the other bytes of block b.
    __device__ u32 four(int b, int i) const {
        if (INTERLEAVED) return *(const u32 *)(base + (u64)b * BYTES * GROUP + GROUP + 4 * (GROUP * i + row));
        const u8 *at = base + (u64)b * BYTES + 1 + 4 * i;
        return at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
    }
};

struct Mxfp4 : Format<1> {
    static constexpr int BYTES = Mxfp4Row<false>::BYTES;
    template <bool INTERLEAVED> using Rows = Mxfp4Row<INTERLEAVED>;

    // Half of 2^(exponent - 127); the two smallest are subnormal.
    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int) {
        u32 exponent = rows.exponent(b);
        return {{__uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23)}};
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int, int j) {
        return mxfp4_levels().four(nibbles_of<0>(rows, b, j));
    }
};

// Four groups of sixteen values: their scales, floats of three bits of mantissa, are the first four bytes. Then eight bytes of nibbles for
// each: the low ones are its first eight values.
struct Nvfp4 : Format<2> {
    static constexpr int BYTES = 36;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 0, 0, 0, BYTES>;

    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int g) {
        u32 both = rows.four(b, 0) >> 16 * g;
        return {{scale_of(both), scale_of(both >> 8)}};
    }

    // Half of the float in the lowest byte, whose sign is ignored; 0x7F is 0. Its bits are those of an f16 that is smaller by 2^8,
    // also where they are subnormal.
    __device__ static float scale_of(u32 bytes) {
        u32 byte = bytes & 0xFF;
        return byte == 0x7F ? 0.0f : mul_rn(half_of_bits((u16)((byte & 0x7F) << 7)), 128.0f);
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return mxfp4_levels().four(rows.four(b, 1 + 4 * g + 2 * (j / 4) + j % 2) >> 4 * (j % 4 / 2));
    }
};

// Two bits for each value.
struct Q2_0 : BlockScale {
    static constexpr int BYTES = 18, OFFSET = 1;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        u32 pairs = rows.four(b, 2 * g + j / 4) >> 8 * (j % 4) & 0xFF;
        u32 two = (pairs | pairs << 12) & 0x000F000Fu;
        return (two | two << 6) & 0x03030303u;
    }
};

// A bit for each value: 1 if it is set, else -1.
struct Q1_0 : BlockScale {
    static constexpr int BYTES = 18;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return ~masks_of(rows.four(b, g) >> 4 * j) | 0x01010101u;
    }
};

PRODUCTS(q8_0, OneGroup<Q8_0>)
PRODUCTS(q4_0, OneGroup<AroundZero<0>>)
PRODUCTS(q4_1, OneGroup<AboveMinimum<0>>)
PRODUCTS(q5_0, OneGroup<AroundZero<1>>)
PRODUCTS(q5_1, OneGroup<AboveMinimum<1>>)
PRODUCTS(iq4_nl, OneGroup<Iq4Nl>)
PRODUCTS(mxfp4, OneGroup<Mxfp4>)
PRODUCTS(nvfp4, TwoGroups<Nvfp4>)
PRODUCTS(q2_0, TwoGroups<Q2_0>)
PRODUCTS(q1_0, FourGroups<Q1_0>)
