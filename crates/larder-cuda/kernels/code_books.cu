// Products with weights in formats with code books; see groups.cuh. All have blocks of 256 values.
#include "groups.cuh"
#include "code_books.cuh"

// The values of a word whose bit of four is set are negated; none is zero.
__device__ inline u32 negated(u32 values, u32 signs) {
    u32 masks = masks_of(signs);
    return (values ^ masks) + (masks & 0x01010101u);
}

// The signs of eight values: seven bits, and one that makes the number of ones even.
__device__ inline u32 even_signs(u32 seven) {
    seven &= 127;
    return seven | (__popc(seven) & 1) << 7;
}

// Half j % 2 of eight values, whose levels an entry of a code book has.
__device__ inline u32 four_levels(u32 levels, u32 entry, int j) {
    return __byte_perm(levels, 0, entry >> 16 * (j % 2) & 0xFFFF);
}

// iq2_xxs, iq2_xs and iq2_s: levels 8, 25 and 43, in eighths of the scale.
__device__ inline u32 iq2_values(u32 entry, u32 signs, int j) {
    return negated(four_levels(0x002B1908u, entry, j), signs >> 4 * (j % 2));
}

// A PART of an f16 scale, times an odd number for each group.
template <typename Own> struct OddScale : Format<1> {
    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int g) {
        return {{mul_rn(mul_rn(rows.half(b, 0), Own::PART), (float)(2 * Own::scale_of(rows, b, g) + 1))}};
    }
};

// An eighth of an f16 scale, times an odd number for each half of a group.
__device__ inline Format<2>::Scales odd_scales(float scale, u32 first, u32 last) {
    float eighth = mul_rn(scale, 0.125f);
    return {{mul_rn(eighth, (float)(2 * first + 1)), mul_rn(eighth, (float)(2 * last + 1))}};
}

// These numbers are the nibbles of a byte from run FIRST on.
template <int FIRST> struct OddScales : Format<2> {
    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int g) {
        u32 byte = rows.four(b, FIRST + g / 4) >> 8 * (g % 4);
        return odd_scales(rows.half(b, 0), byte & 15, byte >> 4 & 15);
    }
};

// For each group four choices of eight values, and a run with four times seven signs and a scale.
struct Iq2Xxs : OddScale<Iq2Xxs> {
    static constexpr int BYTES = 66;
    static constexpr float PART = 0.125f;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 scale_of(const Rows &rows, int b, int g) {
        return rows.four(b, 2 * g + 1) >> 28;
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        u32 choice = rows.four(b, 2 * g) >> 8 * (j / 2) & 0xFF;
        return iq2_values(IQ2_XXS[choice], even_signs(rows.four(b, 2 * g + 1) >> 7 * (j / 2)), j);
    }
};

// For each choice nine bits, and seven signs.
struct Iq2Xs : OddScales<16> {
    static constexpr int BYTES = 74;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        u32 packed = rows.four(b, 2 * g + j / 4) >> 16 * (j / 2 % 2);
        return iq2_values(IQ2_XS[packed & 511], even_signs(packed >> 9), j);
    }
};

// Eight bits of each choice, then all signs, then two bits of each choice.
struct Iq2S : OddScales<18> {
    static constexpr int BYTES = 82;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        int place = j / 2;
        u32 top = rows.four(b, 16 + g / 4) >> (8 * (g % 4) + 2 * place) & 3;
        u32 choice = (rows.four(b, g) >> 8 * place & 0xFF) | top << 8;
        return iq2_values(IQ2_S[choice], rows.four(b, 8 + g) >> 8 * place, j);
    }
};

// 64 choices of four values, then for each group four times seven signs and a scale.
struct Iq3Xxs : OddScale<Iq3Xxs> {
    static constexpr int BYTES = 98;
    static constexpr float PART = 0.25f;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 scale_of(const Rows &rows, int b, int g) {
        return rows.four(b, 16 + g) >> 28;
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        u32 choice = rows.four(b, 2 * g + j / 4) >> 8 * (j % 4) & 0xFF;
        return negated(IQ3_XXS[choice], even_signs(rows.four(b, 16 + g) >> 7 * (j / 2)) >> 4 * (j % 2));
    }
};

// Eight bits of each of 64 choices, then their ninth bits, then all signs, then the scales.
struct Iq3S : OddScale<Iq3S> {
    static constexpr int BYTES = 110;
    static constexpr float PART = 1.0f;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 scale_of(const Rows &rows, int b, int g) {
        return rows.four(b, 26) >> 4 * g & 15;
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        u32 ninth = rows.four(b, 16 + g / 4) >> (8 * (g % 4) + j) & 1;
        u32 choice = (rows.four(b, 2 * g + j / 4) >> 8 * (j % 4) & 0xFF) | ninth << 8;
        return negated(IQ3_S[choice], rows.four(b, 18 + g) >> 4 * j);
    }
};

// iq1_s and iq1_m: eight times -1, 0 and 1, moved up or down by an eighth.
__device__ inline u32 iq1_values(u32 entry, bool is_down, int j) {
    return four_levels(is_down ? 0x0007FFF7u : 0x000901F9u, entry, j);
}

// Eight bits of each choice, then for each group three more of each, a scale, and whether its values are moved down.
struct Iq1S : OddScale<Iq1S> {
    static constexpr int BYTES = 50;
    static constexpr float PART = 0.125f;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static u32 packed(const Rows &rows, int b, int g) {
        return rows.four(b, 8 + g / 2) >> 16 * (g % 2);
    }

    template <typename Rows> __device__ static u32 scale_of(const Rows &rows, int b, int g) {
        return packed(rows, b, g) >> 12 & 7;
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        int place = j / 2;
        u32 more = packed(rows, b, g), choice = (rows.four(b, g) >> 8 * place & 0xFF) | (more >> 3 * place & 7) << 8;
        return iq1_values(IQ1[choice], more >> 15 & 1, j);
    }
};

// Eight bits of each choice, then a nibble for each: three more, and whether its values are moved down. Then the scales of halves of groups,
// three bits each, and of each 16 bits four of the f16 scale.
struct Iq1M : Format<2> {
    static constexpr int BYTES = 56;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 0, 0, 0, BYTES>;

    template <typename Rows> __device__ static Scales scales(const Rows &rows, int b, int g) {
        u32 first = rows.four(b, 12), last = rows.four(b, 13);
        u32 bits = (first >> 12 & 0x000F) | (first >> 24 & 0x00F0) | (last >> 4 & 0x0F00) | (last >> 16 & 0xF000);
        u32 packed = (g < 4 ? first : last) >> (16 * (g / 2 % 2) + 6 * (g % 2));
        return odd_scales(half_of_bits((u16)bits), packed & 7, packed >> 3 & 7);
    }

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        int place = j / 2;
        u32 nibble = rows.four(b, 8 + g / 2) >> (16 * (g % 2) + 4 * place) & 15;
        u32 choice = (rows.four(b, g) >> 8 * place & 0xFF) | (nibble & 7) << 8;
        return iq1_values(IQ1[choice], nibble >> 3, j);
    }
};

PRODUCTS(iq3_xxs, LargeGroups<Iq3Xxs>)
PRODUCTS(iq3_s, LargeGroups<Iq3S>)
PRODUCTS(iq2_xxs, LargeGroups<Iq2Xxs>)
PRODUCTS(iq2_xs, LargeGroups<Iq2Xs>)
PRODUCTS(iq2_s, LargeGroups<Iq2S>)
PRODUCTS(iq1_s, LargeGroups<Iq1S>)
PRODUCTS(iq1_m, LargeGroups<Iq1M>)
