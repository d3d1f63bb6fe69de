// Formats that make the integers of a group of 32 values one word at a time.
//
// Such a format has two functions: `word`, four integers of a group as signed bytes; and `Scale::of`, as in tensor.cuh.
#pragma once
#include "tensor.cuh"

// The integers of a group, and its scale.
template <typename Format> struct Group {
    u32 q[8];
    typename Format::Scale scale;

    template <typename Rows> __device__ void load(const Rows &rows, int b, int g) {
#pragma unroll
        for (int j = 0; j < 8; j++) q[j] = Format::word(rows, b, g, j);
        scale = Format::Scale::of(rows, b, g);
    }

    // The product with a block of activations.
    __device__ float term(const Block &x) const {
        int first = 0, last = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            first = __dp4a((int)q[j], x.q[j], first);
            last = __dp4a((int)q[4 + j], x.q[4 + j], last);
        }
        return Format::HALVES ? scale.term(first, last, x) : scale.term(first + last, 0, x);
    }
};

// A lane's integers of a group for tensor cores.
template <typename Format, typename Rows>
__device__ void fragment_of_words(const Rows &rows, int b, int g, int piece, u32 (&out)[2]) {
    for (int i = 0; i < 2; i++) out[i] = Format::word(rows, b, g, 4 * i + piece);
}

// With blocks of 256 values.
template <typename Format> struct LargeGroups : Format, LargeBlocks {
    Group<Format> groups[2];

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int g, int piece, u32 (&out)[2]) {
        fragment_of_words<Format>(rows, b, g, piece, out);
    }

    template <bool INTERLEAVED>
    __device__ void load(const typename Format::template Rows<INTERLEAVED> &rows, int b, int part, int) {
#pragma unroll
        for (int i = 0; i < 2; i++) groups[i].load(rows, b, 2 * part + i);
    }

    __device__ float add(float sum, const Block *x, int b, int part, int row, int) const {
        float terms[2];
#pragma unroll
        for (int i = 0; i < 2; i++) terms[i] = groups[i].term(x[8 * b + 2 * part + i]);
        return add_parts(sum, terms, row);
    }
};

// With blocks of COUNT groups.
template <typename Format, int COUNT> struct SmallGroups : Format, GroupsOfBlocks<COUNT> {
    Group<Format> group;

    template <typename Rows> __device__ static void fragment(const Rows &rows, int b, int g, int piece, u32 (&out)[2]) {
        fragment_of_words<Format>(rows, b, g, piece, out);
    }

    template <bool INTERLEAVED>
    __device__ void load(const typename Format::template Rows<INTERLEAVED> &rows, int step, int part, int blocks) {
        int g = this->block(step, part, blocks);
        group.load(rows, g / COUNT, g % COUNT);
    }

    __device__ float add(float sum, const Block *x, int step, int part, int row, int blocks) const {
        return this->add_parts(sum, group.term(x[this->block(step, part, blocks)]), step, row, blocks);
    }
};

template <typename Format> using TwoGroups = SmallGroups<Format, 2>;
template <typename Format> using FourGroups = SmallGroups<Format, 4>;

// All ones in each byte whose bit of four is set.
__device__ inline u32 masks_of(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) * 255; }
