// Products with weights in formats with blocks of 32 to 128 values; see blocks.cuh.
#include "groups.cuh"

// The integers of a block, four in each word.
struct Words : SmallBlocks {
    static constexpr bool HALVES = false;
    using Scale = BlockScale;

    u32 q[8];
    float d;

    // Nibbles, the low ones first, each with a fifth bit from the first run if there are FIFTHS.
    template <int FIFTHS, typename Rows> __device__ void load_nibbles(const Rows &rows, int b) {
        u32 fifths = FIFTHS ? rows.four(b, 0) : 0;
        for (int i = 0; i < 4; i++) {
            u32 nibbles = rows.four(b, FIFTHS + i);
            q[i] = (nibbles & 0x0F0F0F0Fu) | fifth_bits(fifths >> 4 * i);
            q[4 + i] = (nibbles >> 4 & 0x0F0F0F0Fu) | fifth_bits(fifths >> (16 + 4 * i));
        }
        d = rows.half(b, 0);
    }

    // Bit i of four bits, as bit 4 of byte i.
    __device__ static u32 fifth_bits(u32 four) {
        return (four & 1) << 4 | (four & 2) << 11 | (four & 4) << 18 | (four & 8) << 25;
    }

    // As load_nibbles, of the words `piece` and 4 + piece.
    template <int FIFTHS, typename Rows>
    __device__ static void fragment_of_nibbles(const Rows &rows, int b, int piece, u32 (&out)[2]) {
        u32 fifths = FIFTHS ? rows.four(b, 0) : 0, nibbles = rows.four(b, FIFTHS + piece);
        out[0] = (nibbles & 0x0F0F0F0Fu) | fifth_bits(fifths >> 4 * piece);
        out[1] = (nibbles >> 4 & 0x0F0F0F0Fu) | fifth_bits(fifths >> (16 + 4 * piece));
    }

    // The sum of products with a block of activations, to which another is added.
    __device__ int dot(const Block &x, int sum) const {
        for (int i = 0; i < 8; i++) sum = __dp4a((int)q[i], x.q[i], sum);
        return sum;
    }
};

struct Q8_0 : Words {
    static constexpr int BYTES = 34;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int, int piece, u32 (&out)[2]) {
        out[0] = rows.four(b, piece);
        out[1] = rows.four(b, 4 + piece);
    }

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        for (int i = 0; i < 8; i++) q[i] = rows.four(b, i);
        d = rows.half(b, 0);
    }

    __device__ float add(float sum, const Block *blocks_of_x, int step, int part, int row, int blocks) const {
        const Block x = blocks_of_x[block(step, part, blocks)];
        return add_parts(sum, mul_rn((float)dot(x, 0), mul_rn(d, x.d)), step, row, blocks);
    }
};

struct Q5_0 : Words {
    static constexpr int BYTES = 22;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int, int piece, u32 (&out)[2]) {
        fragment_of_nibbles<1>(rows, b, piece, out);
        for (int i = 0; i < 2; i++) out[i] = below(out[i], 16);
    }

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        load_nibbles<1>(rows, block(step, part, blocks));
    }

    __device__ float add(float sum, const Block *blocks_of_x, int step, int part, int row, int blocks) const {
        const Block x = blocks_of_x[block(step, part, blocks)];
        // The stored integers are 16 too large.
        return add_parts(sum, mul_rn((float)dot(x, -2 * x.sum8), mul_rn(d, x.d)), step, row, blocks);
    }
};

// q4_1 and q5_1: integers above a minimum.
template <int FIFTHS> struct AboveMinimum : Words {
    static constexpr int BYTES = 20 + 4 * FIFTHS;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;
    float min_of;

    struct Scale {
        float d, min_of;

        template <typename Rows> __device__ static Scale of(const Rows &rows, int b, int) {
            return {rows.half(b, 0), rows.half(b, 1)};
        }

        __device__ float term(int dot, int, const Block &x) const {
            return add_rn(mul_rn((float)dot, mul_rn(d, x.d)), mul_rn(min_of, x.d_sum));
        }

        __device__ float widened(int value, int) const { return add_rn(mul_rn(d, (float)value), min_of); }
    };

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int, int piece, u32 (&out)[2]) {
        Words::template fragment_of_nibbles<FIFTHS>(rows, b, piece, out);
    }

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        load_nibbles<FIFTHS>(rows, b);
        min_of = rows.half(b, 1);
    }

    __device__ float add(float sum, const Block *blocks_of_x, int step, int part, int row, int blocks) const {
        const Block x = blocks_of_x[block(step, part, blocks)];
        float term = add_rn(mul_rn((float)dot(x, 0), mul_rn(d, x.d)), mul_rn(min_of, x.d_sum));
        return add_parts(sum, term, step, row, blocks);
    }
};

// 32 nibbles as they are stored, the low ones of 16 bytes first.
struct Nibbles : SmallBlocks {
    static constexpr bool HALVES = false;
    u32 q[4];
    float d;

    // Integers that the nibbles choose.
    template <typename Rows>
    __device__ static void fragment_of_levels(const Levels &levels, const Rows &rows, int b, int piece, u32 (&out)[2]) {
        u32 nibbles = rows.four(b, piece);
        out[0] = levels.four(nibbles);
        out[1] = levels.four(nibbles >> 4);
    }

    template <typename Rows> __device__ void load_nibbles(const Rows &rows, int b) {
        for (int i = 0; i < 4; i++) q[i] = rows.four(b, i);
    }

    // Adds the products of integers that the nibbles choose.
    __device__ float add_levels(
        const Levels &levels, float sum, const Block *blocks_of_x, int step, int part, int row, int blocks) const {
        const Block x = blocks_of_x[block(step, part, blocks)];
        int dot = 0;
        for (int i = 0; i < 4; i++) {
            dot = __dp4a((int)levels.four(q[i]), x.q[i], dot);
            dot = __dp4a((int)levels.four(q[i] >> 4), x.q[4 + i], dot);
        }
        return add_parts(sum, mul_rn((float)dot, mul_rn(d, x.d)), step, row, blocks);
    }
};

// q4_0 and iq4_nl: nibbles behind the scale.
struct ScaledNibbles : Nibbles {
    using Scale = BlockScale;
    static constexpr int BYTES = 18;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        load_nibbles(rows, b);
        d = rows.half(b, 0);
    }
};

struct Q4_0 : ScaledNibbles {
    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int, int piece, u32 (&out)[2]) {
        u32 nibbles = rows.four(b, piece);
        out[0] = below(nibbles & 0x0F0F0F0Fu, 8);
        out[1] = below(nibbles >> 4 & 0x0F0F0F0Fu, 8);
    }

    __device__ float add(float sum, const Block *blocks_of_x, int step, int part, int row, int blocks) const {
        const Block x = blocks_of_x[block(step, part, blocks)];
        // The stored integers are 8 too large.
        int dot = -x.sum8;
        for (int i = 0; i < 4; i++) {
            dot = __dp4a((int)(q[i] & 0x0F0F0F0Fu), x.q[i], dot);
            dot = __dp4a((int)(q[i] >> 4 & 0x0F0F0F0Fu), x.q[4 + i], dot);
        }
        return add_parts(sum, mul_rn((float)dot, mul_rn(d, x.d)), step, row, blocks);
    }
};

struct Iq4Nl : ScaledNibbles {
    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int, int piece, u32 (&out)[2]) {
        fragment_of_levels(iq4_levels(), rows, b, piece, out);
    }

    __device__ float add(float sum, const Block *x, int step, int part, int row, int blocks) const {
        return add_levels(iq4_levels(), sum, x, step, part, row, blocks);
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

struct Mxfp4 : Nibbles {
    static constexpr int BYTES = Mxfp4Row<false>::BYTES;
    template <bool INTERLEAVED> using Rows = Mxfp4Row<INTERLEAVED>;

    // Half of 2^(exponent - 127); the two smallest are subnormal.
    __device__ static float scale_of(u32 exponent) {
        return __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }

    struct Scale : BlockScale {
        template <typename Rows> __device__ static Scale of(const Rows &rows, int b, int) {
            return {{scale_of(rows.exponent(b))}};
        }
    };

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int, int piece, u32 (&out)[2]) {
        fragment_of_levels(mxfp4_levels(), rows, b, piece, out);
    }

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        load_nibbles(rows, b);
        d = scale_of(rows.exponent(b));
    }

    __device__ float add(float sum, const Block *x, int step, int part, int row, int blocks) const {
        return add_levels(mxfp4_levels(), sum, x, step, part, row, blocks);
    }
};

// Four groups of sixteen values: their scales, floats of three bits of mantissa, are the first four bytes. Then eight bytes of nibbles for
// each: the low ones are its first eight values.
struct Nvfp4 {
    static constexpr int BYTES = 36;
    static constexpr bool HALVES = true;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 0, 0, 0, BYTES>;

    // Of both halves.
    struct Scale {
        float d[2];

        template <typename Rows> __device__ static Scale of(const Rows &rows, int b, int g) {
            u32 both = rows.four(b, 0) >> 16 * g;
            return {{scale_of(both), scale_of(both >> 8)}};
        }

        // Half of the float in the lowest byte, whose sign is ignored; 0x7F is 0. Its bits are those of an f16 that is smaller by 2^8,
        // also where they are subnormal.
        __device__ static float scale_of(u32 bytes) {
            u32 byte = bytes & 0xFF;
            return byte == 0x7F ? 0.0f : mul_rn(half_of_bits((u16)((byte & 0x7F) << 7)), 128.0f);
        }

        __device__ float term(int first, int last, const Block &x) const {
            return mul_rn(add_rn(mul_rn(d[0], (float)first), mul_rn(d[1], (float)last)), x.d);
        }

        __device__ float widened(int value, int half) const { return mul_rn(d[half], (float)value); }
    };

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return mxfp4_levels().four(rows.four(b, 1 + 4 * g + 2 * (j / 4) + j % 2) >> 4 * (j % 4 / 2));
    }
};

// Two bits for each value, too large by one.
struct Q2_0 {
    static constexpr int BYTES = 18;
    static constexpr bool HALVES = false;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;
    using Scale = BlockScale;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        u32 pairs = rows.four(b, 2 * g + j / 4) >> 8 * (j % 4) & 0xFF;
        u32 two = (pairs | pairs << 12) & 0x000F000Fu;
        return below((two | two << 6) & 0x03030303u, 1);
    }
};

// A bit for each value: 1 if it is set, else -1.
struct Q1_0 {
    static constexpr int BYTES = 18;
    static constexpr bool HALVES = false;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;
    using Scale = BlockScale;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return ~masks_of(rows.four(b, g) >> 4 * j) | 0x01010101u;
    }
};

PRODUCTS(q8_0, Q8_0)
PRODUCTS(q4_0, Q4_0)
PRODUCTS(q4_1, AboveMinimum<0>)
PRODUCTS(q5_0, Q5_0)
PRODUCTS(q5_1, AboveMinimum<1>)
PRODUCTS(iq4_nl, Iq4Nl)
PRODUCTS(mxfp4, Mxfp4)
PRODUCTS(nvfp4, TwoGroups<Nvfp4>)
PRODUCTS(q2_0, TwoGroups<Q2_0>)
PRODUCTS(q1_0, FourGroups<Q1_0>)
