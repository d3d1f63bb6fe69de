// Products with weights in block formats, directly on the bytes of slots: all experts of a layer in one launch.
//
// A warp has eight rows. Lane l has row l % 8 and part l / 8 of every step, so that four pieces of eight rows are read
// at once, and are adjacent if the rows are interleaved. Sums of integers are exact in any order; the floats made of
// them are exchanged by shuffles and added in the order of the columns.
//
// Each format has two functions: `load` loads a lane's piece of a step, for any number of tokens; `add` adds the
// products of the four pieces of the lane's row with one token.
#include "common.cuh"

// A lane's row; its first block is at base. INTERLEAVED: base is the address of the row's group of eight.
template <bool INTERLEAVED, int HALVES, int HALVES_AT, int FOURS_AT, int BYTES> struct Row {
    const u8 *base;
    int row;

    // The f16 number i of block b.
    __device__ float half(int b, int i) const {
        if (INTERLEAVED) return half_at(base + (u64)b * BYTES * GROUP + 2 * (GROUP * i + row));
        return half_at(base + (u64)b * BYTES + HALVES_AT + 2 * i);
    }

    // The bits of the f16 number i of block b.
    __device__ u32 bits(int b, int i) const {
        if (INTERLEAVED) return *(const u16 *)(base + (u64)b * BYTES * GROUP + 2 * (GROUP * i + row));
        return *(const u16 *)(base + (u64)b * BYTES + HALVES_AT + 2 * i);
    }

    // Run i of four of the other bytes of block b.
    __device__ u32 four(int b, int i) const {
        u64 offset = (u64)b * BYTES * GROUP + 2 * GROUP * HALVES + 4 * (GROUP * i + row);
        if (INTERLEAVED) return *(const u32 *)(base + offset);
        // Blocks are aligned to two bytes only.
        const u16 *at = (const u16 *)(base + (u64)b * BYTES + FOURS_AT + 4 * i);
        return at[0] | (u32)at[1] << 16;
    }
};

// The term of the lane that has this part of the row.
__device__ inline float from_part(float term, int row, int part) { return __shfl_sync(ALL, term, row + GROUP * part); }

// Formats with blocks of 32 values: a step has four blocks, a lane one. In the last step surplus lanes load the last
// block as well; it is not added again.
struct SmallBlocks {
    static constexpr int VALUES = 32, UNROLL = 4;

    __device__ static int steps(int blocks) { return (blocks + 3) / 4; }
    __device__ static int block(int step, int part, int blocks) { return min(4 * step + part, blocks - 1); }

    __device__ static float add_parts(float sum, float term, int step, int row, int blocks) {
        int left = blocks - 4 * step;
        if (left >= 4) {
            for (int part = 0; part < 4; part++) sum = add_rn(sum, from_part(term, row, part));
        } else {
            for (int part = 0; part < left; part++) sum = add_rn(sum, from_part(term, row, part));
        }
        return sum;
    }
};

struct Q8_0 : SmallBlocks {
    static constexpr int BYTES = 34;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;
    u32 q[8];
    float d;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        for (int i = 0; i < 8; i++) q[i] = rows.four(b, i);
        d = rows.half(b, 0);
    }

    __device__ float add(float sum, const Block *blocks_of_x, int step, int part, int row, int blocks) const {
        const Block x = blocks_of_x[block(step, part, blocks)];
        int dot = 0;
        for (int i = 0; i < 8; i++) dot = __dp4a((int)q[i], x.q[i], dot);
        return add_parts(sum, mul_rn((float)dot, mul_rn(d, x.d)), step, row, blocks);
    }
};

struct Q4_0 : SmallBlocks {
    static constexpr int BYTES = 18;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;
    u32 q[4];
    float d;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        for (int i = 0; i < 4; i++) q[i] = rows.four(b, i);
        d = rows.half(b, 0);
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

// Bit i of four bits, as bit 4 of byte i.
__device__ inline u32 fifth_bits(u32 four) {
    return (four & 1) << 4 | (four & 2) << 11 | (four & 4) << 18 | (four & 8) << 25;
}

// Nibbles with a minimum, and a fifth bit of each value or none.
template <int FIFTHS> struct AboveMinimum : SmallBlocks {
    static constexpr int BYTES = 20 + 4 * FIFTHS;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;
    u32 q[8];
    float d, min_of;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        u32 fifths = FIFTHS ? rows.four(b, 0) : 0;
        for (int i = 0; i < 4; i++) {
            u32 nibbles = rows.four(b, FIFTHS + i);
            q[i] = (nibbles & 0x0F0F0F0Fu) | fifth_bits(fifths >> 4 * i);
            q[4 + i] = (nibbles >> 4 & 0x0F0F0F0Fu) | fifth_bits(fifths >> (16 + 4 * i));
        }
        d = rows.half(b, 0);
        min_of = rows.half(b, 1);
    }

    __device__ float add(float sum, const Block *blocks_of_x, int step, int part, int row, int blocks) const {
        const Block x = blocks_of_x[block(step, part, blocks)];
        int dot = 0;
        for (int i = 0; i < 8; i++) dot = __dp4a((int)q[i], x.q[i], dot);
        float term = add_rn(mul_rn((float)dot, mul_rn(d, x.d)), mul_rn(min_of, x.d_sum));
        return add_parts(sum, term, step, row, blocks);
    }
};

struct Q5_0 : SmallBlocks {
    static constexpr int BYTES = 22;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;
    u32 q[8];
    float d;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        u32 fifths = rows.four(b, 0);
        for (int i = 0; i < 4; i++) {
            u32 nibbles = rows.four(b, 1 + i);
            q[i] = (nibbles & 0x0F0F0F0Fu) | fifth_bits(fifths >> 4 * i);
            q[4 + i] = (nibbles >> 4 & 0x0F0F0F0Fu) | fifth_bits(fifths >> (16 + 4 * i));
        }
        d = rows.half(b, 0);
    }

    __device__ float add(float sum, const Block *blocks_of_x, int step, int part, int row, int blocks) const {
        const Block x = blocks_of_x[block(step, part, blocks)];
        // The stored integers are 16 too large.
        int dot = -2 * x.sum8;
        for (int i = 0; i < 8; i++) dot = __dp4a((int)q[i], x.q[i], dot);
        return add_parts(sum, mul_rn((float)dot, mul_rn(d, x.d)), step, row, blocks);
    }
};

// Sixteen integers, of which each nibble chooses one; as bytes, the first in the lowest.
struct Levels {
    u32 words[4];

    // Those that the low nibbles of four bytes choose.
    __device__ u32 four(u32 nibbles) const {
        nibbles &= 0x0F0F0F0Fu;
        u32 places = nibbles & 0x07070707u;
        // The selector has four bits for each byte of the result.
        u32 selector = (places & 0xF) | (places >> 4 & 0xF0) | (places >> 8 & 0xF00) | (places >> 12 & 0xF000);
        u32 low = __byte_perm(words[0], words[1], selector), high = __byte_perm(words[2], words[3], selector);
        u32 is_high = (nibbles >> 3 & 0x01010101u) * 255;
        return (low & ~is_high) | (high & is_high);
    }
};

// 32 nibbles that choose among sixteen integers, the low ones of 16 bytes first.
struct NibbleLevels : SmallBlocks {
    u32 q[4];
    float d;

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

struct Iq4Nl : NibbleLevels {
    static constexpr int BYTES = 18;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 0, 2, BYTES>;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        for (int i = 0; i < 4; i++) q[i] = rows.four(b, i);
        d = rows.half(b, 0);
    }

    __device__ static Levels levels() {
        // -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
        return {{0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u}};
    }

    __device__ float add(float sum, const Block *x, int step, int part, int row, int blocks) const {
        return add_levels(levels(), sum, x, step, part, row, blocks);
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

struct Mxfp4 : NibbleLevels {
    static constexpr int BYTES = Mxfp4Row<false>::BYTES;
    template <bool INTERLEAVED> using Rows = Mxfp4Row<INTERLEAVED>;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int b = block(step, part, blocks);
        for (int i = 0; i < 4; i++) q[i] = rows.four(b, i);
        // Half of 2^(exponent - 127); the two smallest are subnormal.
        u32 exponent = rows.exponent(b);
        d = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }

    __device__ float add(float sum, const Block *x, int step, int part, int row, int blocks) const {
        // Twice the values of the floats of four bits: 0, 1, 2, 3, 4, 6, 8, 12, and the same below zero.
        const Levels levels = {{0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu}};
        return add_levels(levels, sum, x, step, part, row, blocks);
    }
};

// Formats with blocks of 256 values: a step is one block, with eight groups of 32 values. A lane has two groups that
// share bytes.
struct LargeBlocks {
    static constexpr int VALUES = 256, UNROLL = 2;

    __device__ static int steps(int blocks) { return blocks; }

    // Adds the terms of all groups, of which a lane has two that follow each other.
    __device__ static float add_parts(float sum, const float (&terms)[2], int row) {
        for (int part = 0; part < 4; part++) {
            sum = add_rn(sum, from_part(terms[0], row, part));
            sum = add_rn(sum, from_part(terms[1], row, part));
        }
        return sum;
    }
};

// q4_k and q5_k: a lane has groups 2 * part and 2 * part + 1, the low and the high nibbles of 32 bytes.
struct WithMinima : LargeBlocks {
    float d, dmin;
    int scale[2], min_of[2];

    // The 6-bit scales and minima are packed over three runs of four: the first four groups have the low six bits of
    // two runs, the last four groups the nibbles of the third, with their top bits in the high bits of the others.
    template <typename Rows> __device__ void load_scales(const Rows &rows, int b, int part) {
        d = rows.half(b, 0);
        dmin = rows.half(b, 1);
        u32 packed[3] = {rows.four(b, 0), rows.four(b, 1), rows.four(b, 2)};
        for (int i = 0; i < 2; i++) {
            int group = 2 * part + i, at = 8 * (group % 4);
            u32 first = packed[0] >> at & 255, second = packed[1] >> at & 255, third = packed[2] >> at & 255;
            scale[i] = group < 4 ? first & 63 : (third & 15) | first >> 6 << 4;
            min_of[i] = group < 4 ? second & 63 : third >> 4 | second >> 6 << 4;
        }
    }

    __device__ float term(int i, int dot, const Block &x) const {
        float product = mul_rn((float)(scale[i] * dot), mul_rn(d, x.d));
        return sub_rn(product, mul_rn(mul_rn(dmin, (float)min_of[i]), x.d_sum));
    }
};

struct Q4K : WithMinima {
    static constexpr int BYTES = 144;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;
    u32 q[8];

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int b, int part, int) {
        for (int i = 0; i < 8; i++) q[i] = rows.four(b, 3 + 8 * part + i);
        load_scales(rows, b, part);
    }

    __device__ float add(float sum, const Block *x, int b, int part, int row, int) const {
        float terms[2];
        for (int i = 0; i < 2; i++) {
            const Block block = x[8 * b + 2 * part + i];
            int dot = 0;
            for (int j = 0; j < 8; j++) dot = __dp4a((int)(q[j] >> 4 * i & 0x0F0F0F0Fu), block.q[j], dot);
            terms[i] = term(i, dot, block);
        }
        return add_parts(sum, terms, row);
    }
};

struct Q5K : WithMinima {
    static constexpr int BYTES = 176;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;
    // Four values per word: the first group in q[0], the second in q[1].
    u32 q[2][8];

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int b, int part, int) {
        for (int i = 0; i < 8; i++) {
            // Bit g of the first 32 bytes is the fifth bit of group g.
            u32 fifth = rows.four(b, 3 + i) >> 2 * part, nibbles = rows.four(b, 11 + 8 * part + i);
            q[0][i] = (nibbles & 0x0F0F0F0Fu) | (fifth & 0x01010101u) << 4;
            q[1][i] = (nibbles >> 4 & 0x0F0F0F0Fu) | (fifth >> 1 & 0x01010101u) << 4;
        }
        load_scales(rows, b, part);
    }

    __device__ float add(float sum, const Block *x, int b, int part, int row, int) const {
        float terms[2];
        for (int i = 0; i < 2; i++) {
            const Block block = x[8 * b + 2 * part + i];
            int dot = 0;
            for (int j = 0; j < 8; j++) dot = __dp4a((int)q[i][j], block.q[j], dot);
            terms[i] = term(i, dot, block);
        }
        return add_parts(sum, terms, row);
    }
};

struct Iq4Xs : LargeBlocks {
    static constexpr int BYTES = 136;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;
    u32 q[2][4];
    int scale[2];
    float d;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int b, int part, int) {
        // Four low bits of each scale in the first run, two high ones beside the scale of the scales.
        u32 low = rows.four(b, 0) >> 8 * part, high = rows.bits(b, 1) >> 4 * part;
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < 4; j++) q[i][j] = rows.four(b, 1 + 4 * (2 * part + i) + j);
            scale[i] = (int)((low >> 4 * i & 15) | (high >> 2 * i & 3) << 4) - 32;
        }
        d = rows.half(b, 0);
    }

    __device__ float add(float sum, const Block *x, int b, int part, int row, int) const {
        const Levels levels = Iq4Nl::levels();
        float terms[2];
        for (int i = 0; i < 2; i++) {
            const Block block = x[8 * b + 2 * part + i];
            int dot = 0;
            for (int j = 0; j < 4; j++) {
                dot = __dp4a((int)levels.four(q[i][j]), block.q[j], dot);
                dot = __dp4a((int)levels.four(q[i][j] >> 4), block.q[4 + j], dot);
            }
            terms[i] = mul_rn((float)(scale[i] * dot), mul_rn(d, block.d));
        }
        return add_parts(sum, terms, row);
    }
};

// q2_k and q3_k: a lane has groups 2 * part and 2 * part + 1, two pairs of bits of the same 32 bytes. Each half of a group has
// a scale.
struct BitPairs : LargeBlocks {
    u32 q[2][8];
    int scale[2][2];
    float d;

    template <typename Rows> __device__ void load_pairs(const Rows &rows, int b, int part, int first_run) {
        for (int i = 0; i < 8; i++) {
            u32 pairs = rows.four(b, first_run + 8 * (part / 2) + i) >> 4 * (part % 2);
            q[0][i] = pairs & 0x03030303u;
            q[1][i] = pairs >> 2 & 0x03030303u;
        }
        d = rows.half(b, 0);
    }

    // The sum of products of a group, whose stored integers are too large by an offset.
    __device__ int dot(int i, const Block &x, int offset) const {
        int first = -offset * x.halves[0], last = -offset * x.halves[1];
        for (int j = 0; j < 4; j++) {
            first = __dp4a((int)q[i][j], x.q[j], first);
            last = __dp4a((int)q[i][4 + j], x.q[4 + j], last);
        }
        return scale[i][0] * first + scale[i][1] * last;
    }
};

struct Q2K : BitPairs {
    static constexpr int BYTES = 84;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 80, 0, BYTES>;
    int min_of[2][2];
    float dmin;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int b, int part, int) {
        load_pairs(rows, b, part, 4);
        u32 packed = rows.four(b, part);
        for (int i = 0; i < 4; i++) {
            scale[i / 2][i % 2] = packed >> 8 * i & 15;
            min_of[i / 2][i % 2] = packed >> (8 * i + 4) & 15;
        }
        dmin = rows.half(b, 1);
    }

    __device__ float add(float sum, const Block *x, int b, int part, int row, int) const {
        float terms[2];
        for (int i = 0; i < 2; i++) {
            const Block block = x[8 * b + 2 * part + i];
            int below = min_of[i][0] * block.halves[0] + min_of[i][1] * block.halves[1];
            float product = mul_rn((float)dot(i, block, 0), mul_rn(d, block.d));
            terms[i] = sub_rn(product, mul_rn((float)below, mul_rn(dmin, block.d)));
        }
        return add_parts(sum, terms, row);
    }
};

struct Q3K : BitPairs {
    static constexpr int BYTES = 110;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 108, 0, BYTES>;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int b, int part, int) {
        load_pairs(rows, b, part, 8);
        for (int i = 0; i < 8; i++) {
            // Bit g of the first 32 bytes is the third bit of group g.
            u32 third = rows.four(b, i) >> 2 * part;
            q[0][i] |= (third & 0x01010101u) << 2;
            q[1][i] |= (third >> 1 & 0x01010101u) << 2;
        }
        // Of scale s the low bits are a nibble of byte s % 8, the high ones bits 2 * (s / 4) of byte 8 + s % 4.
        u32 low = rows.four(b, 24 + part % 2) >> 4 * (part / 2), high = rows.four(b, 26) >> 2 * part;
        for (int i = 0; i < 4; i++) {
            scale[i / 2][i % 2] = (int)((low >> 8 * i & 15) | (high >> 8 * i & 3) << 4) - 32;
        }
    }

    __device__ float add(float sum, const Block *x, int b, int part, int row, int) const {
        float terms[2];
        for (int i = 0; i < 2; i++) {
            const Block block = x[8 * b + 2 * part + i];
            terms[i] = mul_rn((float)dot(i, block, 4), mul_rn(d, block.d));
        }
        return add_parts(sum, terms, row);
    }
};

// Each half of a block has four groups. A lane has groups n and n + 2 of a half, n = 0 or 1, which share bytes.
struct Q6K : LargeBlocks {
    static constexpr int BYTES = 210;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 208, 0, BYTES>;
    u32 q[2][8];
    // The scales of the first and of the last 16 values of each group.
    int scale[2][2];
    float d;

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int b, int part, int) {
        int half = part / 2, n = part % 2;
        for (int i = 0; i < 8; i++) {
            // Two more bits of each value: group n of the half has the bit pair n.
            u32 nibbles = rows.four(b, 8 * part + i), pairs = rows.four(b, 32 + 8 * half + i) >> 2 * n;
            q[0][i] = (nibbles & 0x0F0F0F0Fu) | (pairs & 0x03030303u) << 4;
            q[1][i] = (nibbles >> 4 & 0x0F0F0F0Fu) | (pairs >> 4 & 0x03030303u) << 4;
        }
        for (int i = 0; i < 2; i++) {
            u32 four = rows.four(b, 48 + 2 * half + i) >> 16 * n;
            scale[i][0] = (signed char)four;
            scale[i][1] = (signed char)(four >> 8);
        }
        d = rows.half(b, 0);
    }

    __device__ float add(float sum, const Block *x, int b, int part, int row, int) const {
        float terms[2];
        for (int i = 0; i < 2; i++) {
            const Block block = x[8 * b + 4 * (part / 2) + part % 2 + 2 * i];
            // The stored integers are 32 too large.
            int first = -32 * block.halves[0], last = -32 * block.halves[1];
            for (int j = 0; j < 4; j++) {
                first = __dp4a((int)q[i][j], block.q[j], first);
                last = __dp4a((int)q[i][4 + j], block.q[4 + j], last);
            }
            terms[i] = mul_rn((float)(scale[i][0] * first + scale[i][1] * last), mul_rn(d, block.d));
        }
        for (int half = 0; half < 4; half += 2) {
            for (int i = 0; i < 2; i++) {
                sum = add_rn(sum, from_part(terms[i], row, half));
                sum = add_rn(sum, from_part(terms[i], row, half + 1));
            }
        }
        return sum;
    }
};

// Eight rows with TOKENS tokens at a time, so that weights are read once for them.
template <typename Kind, bool INTERLEAVED, int TOKENS>
__device__ void eight_rows(const ProductKernelArgs &p, u32 group) {
    int lane = threadIdx.x % WARP, row = lane % GROUP, part = lane / GROUP, blocks = p.cols / Kind::VALUES;
    // Lanes beyond the last row compute that row as well, and do not store it.
    u32 first = group * GROUP, own = min(first + row, p.rows - 1);
    u64 row_bytes = (u64)blocks * Kind::BYTES;
    typename Kind::template Rows<INTERLEAVED> rows = {p.weights + (INTERLEAVED ? first : own) * row_bytes, row};
    for (u32 from = 0; from < p.tokens; from += TOKENS) {
        float sums[TOKENS];
        const Block *x[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            sums[t] = 0.0f;
            x[t] = (const Block *)p.x + p.x_row(min(from + t, p.tokens - 1)) * (p.cols / BLOCK);
        }
#pragma unroll(TOKENS == 1 ? Kind::UNROLL : 1)
        for (int step = 0; step < Kind::steps(blocks); step++) {
            Kind piece;
            piece.template load<INTERLEAVED>(rows, step, part, blocks);
            for (int t = 0; t < TOKENS; t++) sums[t] = piece.add(sums[t], x[t], step, part, row, blocks);
        }
        for (int t = 0; t < TOKENS; t++) {
            bool wanted = part == 0 && first + row < p.rows && from + t < p.tokens;
            if (wanted) p.out[(u64)(from + t) * p.rows + own] = sums[t];
        }
    }
}

template <typename Kind, int TOKENS>
__device__ void blocks_matmul(const ProductKernelArgs *products, u32 count, u32 groups) {
    u32 group = group_of_warp();
    if (group >= groups) return;
    const ProductKernelArgs &p = *find(products, count, group);
    u32 own = group - p.first_group;
    // The last rows are not interleaved if they are not a whole group.
    if (p.interleaved && (own + 1) * GROUP <= p.rows) eight_rows<Kind, true, TOKENS>(p, own);
    else eight_rows<Kind, false, TOKENS>(p, own);
}

#define MATMUL(name, Kind)                                                                                             \
    extern "C" __global__ void name##_matvec(const ProductKernelArgs *products, u32 count, u32 groups) {               \
        blocks_matmul<Kind, 1>(products, count, groups);                                                               \
    }                                                                                                                  \
    extern "C" __global__ void name##_matmul(const ProductKernelArgs *products, u32 count, u32 groups) {               \
        blocks_matmul<Kind, 8>(products, count, groups);                                                               \
    }

MATMUL(q8_0, Q8_0)
MATMUL(q4_0, Q4_0)
MATMUL(q4_1, AboveMinimum<0>)
MATMUL(q5_0, Q5_0)
MATMUL(q5_1, AboveMinimum<1>)
MATMUL(iq4_nl, Iq4Nl)
MATMUL(mxfp4, Mxfp4)
MATMUL(q2_k, Q2K)
MATMUL(q3_k, Q3K)
MATMUL(q4_k, Q4K)
MATMUL(q5_k, Q5K)
MATMUL(q6_k, Q6K)
MATMUL(iq4_xs, Iq4Xs)
