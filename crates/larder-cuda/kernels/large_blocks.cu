// Products with weights in formats with blocks of 256 values; see blocks.cuh.
#include "groups.cuh"

// Word j of group g, whose nibbles are the low or the high ones of 32 bytes, those from run FIRST on for two groups.
template <int FIRST, typename Rows> __device__ u32 nibbles_of_pair(const Rows &rows, int b, int g, int j) {
    return rows.four(b, FIRST + 8 * (g / 2) + j) >> 4 * (g % 2) & 0x0F0F0F0Fu;
}

// Word j of group g, which is a pair of bits of 32 bytes, those from run FIRST on for four groups.
template <int FIRST, typename Rows> __device__ u32 bit_pairs_of(const Rows &rows, int b, int g, int j) {
    return rows.four(b, FIRST + 8 * (g / 4) + j) >> 2 * (g % 4) & 0x03030303u;
}

// Word j of group g, which is a bit of 32 bytes, those from run FIRST on.
template <int FIRST, typename Rows> __device__ u32 bits_of(const Rows &rows, int b, int g, int j) {
    return rows.four(b, FIRST + j) >> g & 0x01010101u;
}

// q4_k and q5_k: integers above a minimum.
template <int BYTES_OF_BLOCK> struct WithMinima : Format<1, true> {
    static constexpr int BYTES = BYTES_OF_BLOCK;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;

    // The 6-bit scales and minima are packed over three runs of four: the first four groups have the low six bits of
    // two runs, the last four groups the nibbles of the third, with their top bits in the high bits of the others.
    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int g) {
        int at = 8 * (g % 4);
        u32 first = rows.four(b, 0) >> at & 255, second = rows.four(b, 1) >> at & 255, third = rows.four(b, 2) >> at & 255;
        u32 scale = g < 4 ? first & 63 : (third & 15) | first >> 6 << 4;
        u32 min_of = g < 4 ? second & 63 : third >> 4 | second >> 6 << 4;
        return {{mul_rn(rows.half(b, 0), (float)scale)}, {-mul_rn(rows.half(b, 1), (float)min_of)}};
    }
};

struct Q4K : WithMinima<144> {
    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return nibbles_of_pair<3>(rows, b, g, j);
    }
};

// With a fifth bit of each integer.
struct Q5K : WithMinima<176> {
    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return nibbles_of_pair<11>(rows, b, g, j) | bits_of<3>(rows, b, g, j) << 4;
    }
};

// Four low bits of each scale are in the first run, two high ones beside the scale of the scales.
struct Iq4Xs : Format<1> {
    static constexpr int BYTES = 136;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;

    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int g) {
        u32 low = rows.four(b, 0) >> 4 * g & 15, high = rows.bits(b, 1) >> 2 * g & 3;
        return {{mul_rn(rows.half(b, 0), (float)((int)(low | high << 4) - 32))}};
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return iq4_levels().four(rows.four(b, 1 + 4 * g + j % 4) >> 4 * (j / 4));
    }
};

// A byte for each half of a group: its scale, and its minimum in the high bits.
struct Q2K : Format<2, true> {
    static constexpr int BYTES = 84;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 80, 0, BYTES>;

    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int g) {
        u32 packed = rows.four(b, g / 2) >> 16 * (g % 2);
        float d = rows.half(b, 0), dmin = rows.half(b, 1);
        auto times = [packed](float factor, int at) { return mul_rn(factor, (float)(packed >> at & 15)); };
        return {{times(d, 0), times(d, 8)}, {-times(dmin, 4), -times(dmin, 12)}};
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return bit_pairs_of<4>(rows, b, g, j);
    }
};

// With a third bit of each integer.
struct Q3K : Format<2> {
    static constexpr int BYTES = 110, OFFSET = 4;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 108, 0, BYTES>;

    // Of scale s the low bits are a nibble of byte s % 8, the high ones bits 2 * (s / 4) of byte 8 + s % 4.
    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int g) {
        int part = g / 2, from = 16 * (g % 2);
        u32 low = rows.four(b, 24 + part % 2) >> (4 * (part / 2) + from), high = rows.four(b, 26) >> (2 * part + from);
        float d = rows.half(b, 0);
        auto scale = [=](int at) { return mul_rn(d, (float)((int)((low >> at & 15) | (high >> at & 3) << 4) - 32)); };
        return {{scale(0), scale(8)}};
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return bit_pairs_of<8>(rows, b, g, j) | bits_of<0>(rows, b, g, j) << 2;
    }
};

// Each half of a block has four groups, of which groups n and n + 2 have the nibbles of the same bytes. Two more bits of each value are a pair
// of bits.
struct Q6K : Format<2> {
    static constexpr int BYTES = 210, OFFSET = 32, APART = 2;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 208, 0, BYTES>;

    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int g) {
        u32 two = rows.four(b, 48 + g / 2) >> 16 * (g % 2);
        float d = rows.half(b, 0);
        return {{mul_rn(d, (float)(signed char)two), mul_rn(d, (float)(signed char)(two >> 8))}};
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        u32 nibbles = rows.four(b, 8 * (g / 4 * 2 + g % 2) + j) >> 4 * (g % 4 / 2);
        return (nibbles & 0x0F0F0F0Fu) | bit_pairs_of<32>(rows, b, g, j) << 4;
    }
};

// Two bits for each value.
struct Tq2_0 : BlockScale {
    static constexpr int BYTES = 66, OFFSET = 1;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 64, 0, BYTES>;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return bit_pairs_of<0>(rows, b, g, j);
    }
};

// Five values in each of 48 bytes, and four in each of four: digits to the base of 3 of a fraction of 256.
struct Tq1_0 : BlockScale {
    static constexpr int BYTES = 54, OFFSET = 1;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 52, 0, BYTES>;

    // Digits of 32 bytes, five times, of 16 bytes, five times, and of four bytes, four times.
    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        int at = 8 * g + j;
        if (at < 40) return digits(rows.four(b, at % 8), at / 8);
        if (at < 60) return digits(rows.four(b, 8 + at % 4), (at - 40) / 4);
        return digits(rows.four(b, 12), at - 60);
    }

    // Digit n of each byte.
    __device__ static u32 digits(u32 bytes, int n) {
        u32 power = n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
        u32 even = digit_of_halves(bytes & 0x00FF00FFu, power), odd = digit_of_halves(bytes >> 8 & 0x00FF00FFu, power);
        return even | odd << 8;
    }

    // Of two bytes in 16 bits each.
    __device__ static u32 digit_of_halves(u32 bytes, u32 power) {
        u32 rest = bytes * power & 0x00FF00FFu;
        return rest * 3 >> 8 & 0x00FF00FFu;
    }
};

PRODUCTS(q2_k, LargeGroups<Q2K>)
PRODUCTS(q3_k, LargeGroups<Q3K>)
PRODUCTS(q4_k, LargeGroups<Q4K>)
PRODUCTS(q5_k, LargeGroups<Q5K>)
PRODUCTS(q6_k, LargeGroups<Q6K>)
PRODUCTS(iq4_xs, LargeGroups<Iq4Xs>)
PRODUCTS(tq2_0, LargeGroups<Tq2_0>)
PRODUCTS(tq1_0, LargeGroups<Tq1_0>)
