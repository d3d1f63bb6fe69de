// Products with weights in formats with blocks of 256 values; see blocks.cuh.
#include "groups.cuh"

// q4_k and q5_k: a lane has groups 2 * part and 2 * part + 1, the low and the high nibbles of 32 bytes.
struct WithMinima : LargeBlocks {
    static constexpr bool HALVES = false;
    float d, dmin;
    int scale[2], min_of[2];

    template <typename Rows> __device__ void load_scales(const Rows &rows, int b, int part) {
        d = rows.half(b, 0);
        dmin = rows.half(b, 1);
        for (int i = 0; i < 2; i++) load_scale(rows, b, 2 * part + i, scale[i], min_of[i]);
    }

    // The 6-bit scales and minima are packed over three runs of four: the first four groups have the low six bits of
    // two runs, the last four groups the nibbles of the third, with their top bits in the high bits of the others.
    template <typename Rows>
    __device__ static void load_scale(const Rows &rows, int b, int g, int &scale, int &min_of) {
        int at = 8 * (g % 4);
        u32 first = rows.four(b, 0) >> at & 255, second = rows.four(b, 1) >> at & 255, third = rows.four(b, 2) >> at & 255;
        scale = g < 4 ? first & 63 : (third & 15) | first >> 6 << 4;
        min_of = g < 4 ? second & 63 : third >> 4 | second >> 6 << 4;
    }

    // Of one group.
    struct Scale {
        float d, dmin;
        int scale, min_of;

        template <typename Rows> __device__ static Scale of(const Rows &rows, int b, int g) {
            Scale own = {rows.half(b, 0), rows.half(b, 1), 0, 0};
            load_scale(rows, b, g, own.scale, own.min_of);
            return own;
        }

        __device__ float term(int dot, int, const Block &x) const {
            float product = mul_rn((float)(scale * dot), mul_rn(d, x.d));
            return sub_rn(product, mul_rn(mul_rn(dmin, (float)min_of), x.d_sum));
        }

        __device__ float widened(int value, int) const {
            return sub_rn(mul_rn(mul_rn(d, (float)scale), (float)value), mul_rn(dmin, (float)min_of));
        }
    };

    __device__ float term(int i, int dot, const Block &x) const {
        return Scale{d, dmin, scale[i], min_of[i]}.term(dot, 0, x);
    }
};

struct Q4K : WithMinima {
    static constexpr int BYTES = 144;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;
    u32 q[8];

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int g, int piece, u32 (&out)[2]) {
        for (int i = 0; i < 2; i++) out[i] = rows.four(b, 3 + 8 * (g / 2) + 4 * i + piece) >> 4 * (g % 2) & 0x0F0F0F0Fu;
    }

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

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int g, int piece, u32 (&out)[2]) {
        for (int i = 0; i < 2; i++) {
            u32 fifth = rows.four(b, 3 + 4 * i + piece) >> g, nibbles = rows.four(b, 11 + 8 * (g / 2) + 4 * i + piece);
            out[i] = (nibbles >> 4 * (g % 2) & 0x0F0F0F0Fu) | (fifth & 0x01010101u) << 4;
        }
    }

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

// Four low bits of each scale are in the first run, two high ones beside the scale of the scales.
struct Iq4Xs {
    static constexpr int BYTES = 136;
    static constexpr bool HALVES = false;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 2, 0, 4, BYTES>;

    struct Scale : GroupScale {
        template <typename Rows> __device__ static Scale of(const Rows &rows, int b, int g) {
            u32 low = rows.four(b, 0) >> 4 * g & 15, high = rows.bits(b, 1) >> 2 * g & 3;
            return {{rows.half(b, 0), (int)(low | high << 4) - 32}};
        }
    };

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return iq4_levels().four(rows.four(b, 1 + 4 * g + j % 4) >> 4 * (j / 4));
    }
};

// q2_k and q3_k: a lane has groups 2 * part and 2 * part + 1, two pairs of bits of the same 32 bytes. Each half of a group has
// a scale.
struct BitPairs : LargeBlocks {
    static constexpr bool HALVES = true;
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

    // The pairs of bits of the words `piece` and 4 + piece of a group.
    template <typename Rows>
    __device__ static void fragment_of_pairs(const Rows &rows, int b, int g, int piece, int first_run, u32 (&out)[2]) {
        for (int i = 0; i < 2; i++) out[i] = rows.four(b, first_run + 8 * (g / 4) + 4 * i + piece) >> 2 * (g % 4) & 0x03030303u;
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

    struct Scale {
        float d, dmin;
        int scale[2], min_of[2];

        template <typename Rows> __device__ static Scale of(const Rows &rows, int b, int g) {
            u32 packed = rows.four(b, g / 2) >> 16 * (g % 2);
            int first = packed & 15, last = packed >> 8 & 15;
            return {rows.half(b, 0), rows.half(b, 1), {first, last}, {(int)(packed >> 4 & 15), (int)(packed >> 12 & 15)}};
        }

        __device__ float term(int first, int last, const Block &x) const {
            int under = min_of[0] * x.halves[0] + min_of[1] * x.halves[1];
            float product = mul_rn((float)(scale[0] * first + scale[1] * last), mul_rn(d, x.d));
            return sub_rn(product, mul_rn((float)under, mul_rn(dmin, x.d)));
        }

        __device__ float widened(int value, int half) const {
            return sub_rn(mul_rn(mul_rn(d, (float)scale[half]), (float)value), mul_rn(dmin, (float)min_of[half]));
        }
    };

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int g, int piece, u32 (&out)[2]) {
        fragment_of_pairs(rows, b, g, piece, 4, out);
    }

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

    struct Scale : HalfScales {
        template <typename Rows> __device__ static Scale of(const Rows &rows, int b, int g) {
            int scales[2];
            load_scales(rows, b, g, scales);
            return {{rows.half(b, 0), {scales[0], scales[1]}}};
        }
    };

    // Of scale s the low bits are a nibble of byte s % 8, the high ones bits 2 * (s / 4) of byte 8 + s % 4.
    template <typename Rows> __device__ static void load_scales(const Rows &rows, int b, int g, int (&out)[2]) {
        int part = g / 2, from = 16 * (g % 2);
        u32 low = rows.four(b, 24 + part % 2) >> (4 * (part / 2) + from), high = rows.four(b, 26) >> (2 * part + from);
        for (int i = 0; i < 2; i++) out[i] = (int)((low >> 8 * i & 15) | (high >> 8 * i & 3) << 4) - 32;
    }

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int g, int piece, u32 (&out)[2]) {
        fragment_of_pairs(rows, b, g, piece, 8, out);
        for (int i = 0; i < 2; i++) {
            out[i] = below(out[i] | (rows.four(b, 4 * i + piece) >> g & 0x01010101u) << 2, 4);
        }
    }

    template <bool INTERLEAVED> __device__ void load(const Rows<INTERLEAVED> &rows, int b, int part, int) {
        load_pairs(rows, b, part, 8);
        for (int i = 0; i < 8; i++) {
            // Bit g of the first 32 bytes is the third bit of group g.
            u32 third = rows.four(b, i) >> 2 * part;
            q[0][i] |= (third & 0x01010101u) << 2;
            q[1][i] |= (third >> 1 & 0x01010101u) << 2;
        }
        for (int i = 0; i < 2; i++) load_scales(rows, b, 2 * part + i, scale[i]);
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
    static constexpr bool HALVES = true;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 208, 0, BYTES>;

    struct Scale : HalfScales {
        // Group n + 2 * i of a half.
        template <typename Rows> __device__ static Scale of(const Rows &rows, int b, int g) {
            u32 four = rows.four(b, 48 + g / 2) >> 16 * (g % 2);
            return {{rows.half(b, 0), {(signed char)four, (signed char)(four >> 8)}}};
        }
    };

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int g, int piece, u32 (&out)[2]) {
        int half = g / 4, n = g % 2, upper = g % 4 / 2;
        for (int i = 0; i < 2; i++) {
            u32 nibbles = rows.four(b, 8 * (2 * half + n) + 4 * i + piece) >> 4 * upper;
            u32 pairs = rows.four(b, 32 + 8 * half + 4 * i + piece) >> (2 * n + 4 * upper);
            out[i] = below((nibbles & 0x0F0F0F0Fu) | (pairs & 0x03030303u) << 4, 32);
        }
    }

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

// Two bits for each value, too large by one: a group is a pair of bits of 32 bytes.
struct Tq2_0 {
    static constexpr int BYTES = 66;
    static constexpr bool HALVES = false;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 64, 0, BYTES>;
    using Scale = BlockScale;

    template <typename Rows> __device__ static u32 word(const Rows &rows, int b, int g, int j) {
        return below(rows.four(b, 8 * (g / 4) + j) >> 2 * (g % 4) & 0x03030303u, 1);
    }
};

// Five values in each of 48 bytes, and four in each of four: digits to the base of 3, too large by one, of a fraction of 256.
struct Tq1_0 {
    static constexpr int BYTES = 54;
    static constexpr bool HALVES = false;
    template <bool INTERLEAVED> using Rows = Row<INTERLEAVED, 1, 52, 0, BYTES>;
    using Scale = BlockScale;

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
        return below(even | odd << 8, 1);
    }

    // Of two bytes in 16 bits each.
    __device__ static u32 digit_of_halves(u32 bytes, u32 power) {
        u32 rest = bytes * power & 0x00FF00FFu;
        return rest * 3 >> 8 & 0x00FF00FFu;
    }
};

PRODUCTS(q2_k, Q2K)
PRODUCTS(q3_k, Q3K)
PRODUCTS(q4_k, Q4K)
PRODUCTS(q5_k, Q5K)
PRODUCTS(q6_k, Q6K)
PRODUCTS(iq4_xs, LargeGroups<Iq4Xs>)
PRODUCTS(tq2_0, LargeGroups<Tq2_0>)
PRODUCTS(tq1_0, LargeGroups<Tq1_0>)
