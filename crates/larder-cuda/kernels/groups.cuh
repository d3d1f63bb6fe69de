// Kinds of formats: which groups of 32 integers a lane has, and in which order their products are added.
#pragma once
#include "tensor.cuh"

// The integers of a group, four in each word, and their scales.
template <typename Format> struct Group {
    u32 q[8];
    typename Format::Scales scales;

    template <typename Rows> __device__ void load(const Rows &rows, int b, int g) {
#pragma unroll
        for (int j = 0; j < 8; j++) q[j] = Format::word(rows, b, g, j);
        scales = Format::scales(rows, b, g);
    }

    // The product with a block of activations, without their scale.
    __device__ float term(const Block x) const {
        // Less what the integers are too large by.
        int first = Format::OFFSET * (Format::HALVES ? x.raised_halves[0] : x.raised) >> 7;
        int last = Format::HALVES ? Format::OFFSET * x.raised_halves[1] >> 7 : 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            first = __dp4a((int)q[j], x.q[j], first);
            last = __dp4a((int)q[4 + j], x.q[4 + j], last);
        }
        return scales.term(first, last, x);
    }
};

// With blocks of 256 values: a step is one block, with eight groups. A lane has two, which share bytes.
template <typename Format> struct LargeGroups : Format {
    static constexpr int VALUES = 256, UNROLL = 2, APART = Format::APART;
    Group<Format> groups[2];

    __device__ static int steps(int blocks) { return blocks; }
    // The number of a lane's group i within the block, of bits that do not overlap: so compilers see which bytes both groups share.
    __device__ static int place(int part, int i) { return part / APART * 2 * APART | part % APART | APART * i; }

    template <bool INTERLEAVED>
    __device__ void load(const typename Format::template Rows<INTERLEAVED> &rows, int b, int part, int) {
#pragma unroll
        for (int i = 0; i < 2; i++) groups[i].load(rows, b, place(part, i));
    }

    __device__ float add(float sum, const Block *x, int b, int part, int row, int) const {
        float terms[2];
        x += 8 * b;
#pragma unroll
        for (int i = 0; i < 2; i++) terms[i] = groups[i].term(x[place(part, i)]);
#pragma unroll
        for (int g = 0; g < 8; g++) {
            int i = g / APART % 2, other = g / APART / 2 * APART + g % APART;
            sum = fma_rn(from_part(terms[i], row, other), x[g].d, sum);
        }
        return sum;
    }
};

// With blocks of COUNT groups, one, two or four: a step has four groups, a lane one. In the last step surplus lanes load the last group as
// well; it is not added again.
template <typename Format, int COUNT> struct SmallGroups : Format {
    static constexpr int VALUES = 32 * COUNT, UNROLL = 4;
    Group<Format> group;

    __device__ static int steps(int blocks) { return (COUNT * blocks + 3) / 4; }
    // The number of a lane's group within the row.
    __device__ static int place(int step, int part, int blocks) { return min(4 * step + part, COUNT * blocks - 1); }

    template <bool INTERLEAVED>
    __device__ void load(const typename Format::template Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int g = place(step, part, blocks);
        group.load(rows, g / COUNT, g % COUNT);
    }

    __device__ float add(float sum, const Block *x, int step, int part, int row, int blocks) const {
        float term = group.term(x[place(step, part, blocks)]);
        int left = COUNT * blocks - 4 * step;
        x += 4 * step;
        if (left >= 4) {
            for (int other = 0; other < 4; other++) sum = fma_rn(from_part(term, row, other), x[other].d, sum);
        } else {
            for (int other = 0; other < left; other++) sum = fma_rn(from_part(term, row, other), x[other].d, sum);
        }
        return sum;
    }
};

template <typename Format> using OneGroup = SmallGroups<Format, 1>;
template <typename Format> using TwoGroups = SmallGroups<Format, 2>;
template <typename Format> using FourGroups = SmallGroups<Format, 4>;

// All ones in each byte whose bit of four is set.
__device__ inline u32 masks_of(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) * 255; }
