// The choice of experts on the device, in the steps of the gate on the CPU: scores, groups, the best k, their weights. The lists of the
// products that follow get the addresses of the chosen experts, from a table of slots, and their rows.
#include "activations.cuh"

// How logits become scores.
enum Score : u32 { RAW, SOFTMAX, SIGMOID, SQRT_SOFTPLUS };
// How the chosen experts are weighted. WEIGHT_SCORE: by their scores, divided by a divisor and times factor.
// SPARSE_MIXER: by a softmax over the experts that are near.
enum Weighting : u32 { WEIGHT_SCORE, SOFTMAX_OF_CHOSEN, SIGMOID_OF_CHOSEN, SIGMOID_SHARE_OF_CHOSEN, SPARSE_MIXER };
// What a sum of scores becomes as a divisor.
enum Renorm : u32 { NO_DIVISION, SUM_PLUS, SUM_AT_LEAST };
// How a group of experts is ranked.
enum GroupRank : u32 { BEST, BEST_TWO };

// The most places whose experts are in the memory of a block.
constexpr u32 SHARED_PLACES = 1024;
// In the place of an expert, where there is none.
constexpr u32 NO_EXPERT = 0xFFFF;

// A list of products, or of biases, of the experts of a call: one for each, in the order in which they are first chosen.
struct ExpertList {
    // The entry of the first expert.
    u8 *entries;
    // Of the part of an expert, in bytes.
    u64 offset;
    // Inputs and outputs of the first row. With picks, all experts have the same inputs.
    const u8 *x;
    u8 *out;
    // By row: its row in the inputs; or null
    const u32 *picks;
    // Bytes from an entry to the next, from the inputs of a row to those of the next, and from its outputs
    u32 stride;
    u32 x_step;
    u32 out_step;
    // 1: of biases
    u32 is_bias;

    // Writes the entry with this number, of an expert with `count` rows from row `first` on; null leaves it out.
    __device__ void set(u32 number, const u8 *expert, u32 first, u32 count) const {
        u8 *entry = entries + (u64)number * stride;
        const u8 *part = expert ? expert + offset : nullptr;
        float *outputs = (float *)(out + (u64)first * out_step);
        if (is_bias) {
            BiasKernelArgs &bias = *(BiasKernelArgs *)entry;
            bias.bias = (const float *)part;
            bias.out = outputs;
            bias.tokens = count;
            return;
        }
        ProductKernelArgs &product = *(ProductKernelArgs *)entry;
        product.weights = part;
        product.x = x + (u64)first * x_step;
        product.pick = picks ? picks + first : nullptr;
        product.out = outputs;
        product.tokens = count;
    }
};
static_assert(sizeof(ExpertList) == 56, "must match the layout in Rust");

// The arguments of a choice.
struct ChoiceArgs {
    // [tokens, classes]
    const float *logits;
    // [experts], added to the scores for the choice only; or null
    const float *bias;
    // [experts], factors on the weights; or null
    const float *scales;
    // [experts]: the address of each; null where it is not on the device, and its products are left out
    const u64 *slots;
    // [tokens, 2 * experts + 1 + groups]: scores of classes, those by which experts are chosen, and those of groups; and where weights scale
    // inputs, behind these the k weights of the token
    float *scores;
    // [tokens, k]: the experts, if the gate only weighs them; or null
    const u32 *known;
    // [tokens, k], in page-locked memory
    u32 *chosen;
    // [tokens, k]; the choice writes the weights
    ExpertTerm *terms;
    // [lists]
    const ExpertList *lists;
    // [rows, width]: the outputs of the chosen experts. A place that has an expert has a row; those of an expert are consecutive.
    const float *outputs;
    // [2, tokens, k], used where the block has too little: by place its expert, and the first place that has the same
    u32 *places;
    // By row: its row in the inputs
    u32 *picks;
    u32 tokens;
    u32 experts;
    u32 k;
    u32 list_count;
    u32 score;
    u32 weighting;
    u32 renorm;
    // Added to a sum of scores, or the least divisor, or how far experts may be for SPARSE_MIXER.
    float renorm_by;
    float factor;
    // 0: without groups
    u32 groups;
    u32 kept_groups;
    u32 rank;
    // The score of experts of the groups that lost.
    float masked;
    // 1: weights scale the inputs of experts, and not their outputs
    u32 scales_input;
    // Experts; or one more, where the last class stands for no expert, and scores are a softmax over all.
    u32 classes;
    // Added to the score of that class.
    float bias_of_none;
    u32 width;
    // Places that have the same row of inputs.
    u32 share;
    // Entries of each list.
    u32 entries;
    u32 unused;
};
static_assert(sizeof(ChoiceArgs) == 176, "must match the layout in Rust");

// Replaces values by their softmax; the powers are added in order. For all threads of a warp.
__device__ inline void softmax_in_order(float *values, u32 count) {
    u32 lane = threadIdx.x % WARP;
    float top = minus_infinity();
    for (u32 i = lane; i < count; i += WARP) top = larger(top, values[i]);
    for (int step = WARP / 2; step > 0; step /= 2) top = larger(top, __shfl_xor_sync(ALL, top, step));
    for (u32 i = lane; i < count; i += WARP) values[i] = exp_in_steps(sub_rn(values[i], top));
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 8
    for (u32 i = 0; i < count; i++) sum = add_rn(sum, values[i]);
    __syncwarp();
    for (u32 i = lane; i < count; i += WARP) values[i] = div_rn(values[i], sum);
    __syncwarp();
}

// The score by which a group is ranked.
__device__ inline float score_of_group(const float *group, u32 count, u32 rank) {
    float best = minus_infinity(), second = best;
    for (u32 i = 0; i < count; i++) {
        if (group[i] > best) {
            second = best;
            best = group[i];
        } else if (group[i] > second) {
            second = group[i];
        }
    }
    float both = add_rn(best, second);
    return rank == BEST ? best : both == both ? both : minus_infinity();
}

// Masks the experts of all groups but the best.
__device__ inline void mask_groups(const ChoiceArgs &args, float *values, float *of_groups) {
    u32 lane = threadIdx.x % WARP, each = args.experts / args.groups;
    for (u32 g = lane; g < args.groups; g += WARP) of_groups[g] = score_of_group(values + g * each, each, args.rank);
    __syncwarp();
    for (u32 g = lane; g < args.groups; g += WARP) {
        u32 own = place_in_order(of_groups[g]), better = 0;
        for (u32 other = 0; other < args.groups; other++) {
            u32 place = place_in_order(of_groups[other]);
            better += place > own || (place == own && other < g);
        }
        if (better < args.kept_groups) continue;
        for (u32 i = 0; i < each; i++) values[g * each + i] = args.masked;
    }
    __syncwarp();
}

// The score of an expert, unless it is a part of a softmax.
__device__ inline float score_of(float logit, u32 score) {
    return score == SIGMOID ? sigmoid(logit) : score == SQRT_SOFTPLUS ? (float)sqrt((double)softplus_of(logit)) : logit;
}

// The expert with the largest value of those that were not taken, the first of equals; NaN comes last. Bit i of a lane's `taken` is of its
// expert number i.
__device__ inline u32 take_best(const float *values, u32 *taken, u32 experts) {
    u32 lane = threadIdx.x % WARP, best = 0, expert = ~0u;
    for (u32 i = lane, turn = 0; i < experts; i += WARP, turn++) {
        if (*taken >> turn & 1) continue;
        u32 place = place_in_order(values[i] == values[i] ? values[i] : minus_infinity());
        if (expert == ~0u || place > best) {
            best = place;
            expert = i;
        }
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        u32 other = __shfl_xor_sync(ALL, best, step), its = __shfl_xor_sync(ALL, expert, step);
        if (its != ~0u && (expert == ~0u || other > best || (other == best && its < expert))) {
            best = other;
            expert = its;
        }
    }
    if (expert % WARP == lane) *taken |= 1u << expert / WARP;
    return expert;
}

// The weight of the chosen expert of this rank, without those of lower ranks.
__device__ inline float sparse_mixer(const ChoiceArgs &args, const float *logits, const ExpertTerm *terms, u32 rank) {
    float top = logits[terms[rank].expert], sum = 0.0f;
    for (u32 i = 0; i < args.experts; i++) {
        float logit = logits[i];
        bool is_far = div_rn(sub_rn(top, logit), larger(top, fabsf(logit))) > args.renorm_by, was_taken = false;
        for (u32 before = 0; before < rank; before++) was_taken |= terms[before].expert == i;
        if (!is_far && !was_taken) sum = add_rn(sum, exp_in_steps(sub_rn(logit, top)));
    }
    return div_rn(1.0f, sum);
}

// The weights of the chosen experts of a token, whose logits and scores are these. One thread computes them, in their order.
__device__ inline void weigh(
    const ChoiceArgs &args, const float *logits, const float *scores, ExpertTerm *terms) {
    float sum = 0.0f, top = minus_infinity();
    for (u32 rank = 0; rank < args.k; rank++) top = larger(top, logits[terms[rank].expert]);
    for (u32 rank = 0; rank < args.k; rank++) {
        u32 expert = terms[rank].expert;
        float weight = args.weighting == WEIGHT_SCORE        ? scores[expert]
                       : args.weighting == SPARSE_MIXER      ? sparse_mixer(args, logits, terms, rank)
                       : args.weighting == SOFTMAX_OF_CHOSEN ? exp_in_steps(sub_rn(logits[expert], top))
                                                             : sigmoid(logits[expert]);
        terms[rank].weight = weight;
        sum = add_rn(sum, weight);
    }
    float divisor = args.renorm == NO_DIVISION ? 1.0f
                    : args.renorm == SUM_PLUS  ? add_rn(sum, args.renorm_by)
                                               : larger(args.renorm_by, sum);
    for (u32 rank = 0; rank < args.k; rank++) {
        float weight = terms[rank].weight;
        if (args.weighting == SOFTMAX_OF_CHOSEN) weight = div_rn(weight, sum);
        else if (args.weighting == SIGMOID_SHARE_OF_CHOSEN) weight = weight != 0.0f ? div_rn(weight, sum) : weight;
        else if (args.weighting == WEIGHT_SCORE && weight != 0.0f) weight = mul_rn(div_rn(weight, divisor), args.factor);
        if (args.scales) weight = mul_rn(weight, args.scales[terms[rank].expert]);
        terms[rank].weight = weight;
    }
}

// Whether the class for no expert scores higher than all experts. For all threads of a warp.
__device__ inline bool has_none(const ChoiceArgs &args, const float *scores, const float *values) {
    if (args.classes == args.experts) return false;
    float none = add_rn(scores[args.experts], args.bias_of_none);
    bool is_higher = true;
    for (u32 i = threadIdx.x % WARP; i < args.experts; i += WARP) is_higher &= none > values[i];
    return __ballot_sync(ALL, is_higher) == ALL;
}

// The row of a table `[any, width]` with a number.
extern "C" __global__ void take_row(const u32 *table, const u32 *number, u32 *out, u32 width) {
    u32 i = index_of_thread();
    if (i < width) out[i] = table[(u64)*number * width + i];
}

// The experts of a token, unless they are known, and their weights. For all threads of a warp; there are at most 1024 experts.
// Its experts are written to its places in `of_places`, which has those of all tokens.
__device__ inline void choose_for(const ChoiceArgs &args, u32 token, u32 *of_places) {
    u32 lane = threadIdx.x % WARP, experts = args.experts;
    const float *logits = args.logits + (u64)token * args.classes;
    u32 step = 2 * experts + 1 + args.groups + (args.scales_input ? args.k : 0);
    float *scores = args.scores + (u64)token * step, *values = scores + experts + 1;
    for (u32 i = lane; i < args.classes; i += WARP) scores[i] = score_of(logits[i], args.score);
    __syncwarp();
    if (args.score == SOFTMAX || args.classes > experts) softmax_in_order(scores, args.classes);
    for (u32 i = lane; i < experts; i += WARP) values[i] = args.bias ? add_rn(scores[i], args.bias[i]) : scores[i];
    __syncwarp();
    bool skips = has_none(args, scores, values);
    if (args.groups) mask_groups(args, values, values + experts);
    ExpertTerm *terms = args.terms + (u64)token * args.k;
    u32 taken = 0;
    for (u32 rank = 0; rank < args.k; rank++) {
        u64 place = (u64)token * args.k + rank;
        u32 expert = args.known ? args.known[place] : take_best(values, &taken, experts);
        if (lane == 0) {
            terms[rank].expert = expert;
            terms[rank].output = nullptr;
            of_places[place] = args.chosen[place] = skips ? NO_EXPERT : expert;
        }
    }
    __syncwarp();
    if (lane == 0) weigh(args, logits, scores, terms);
    if (lane == 0 && args.scales_input) {
        for (u32 rank = 0; rank < args.k; rank++) {
            values[experts + args.groups + rank] = terms[rank].weight;
            terms[rank].weight = 1.0f;
        }
    }
}

// Gives the places of each expert consecutive rows, in the order in which experts are first chosen, and writes the lists of products. For all
// threads of a block.
__device__ inline void group_places(const ChoiceArgs &args, const u32 *experts, u32 *firsts, u32 &distinct) {
    u32 count = args.tokens * args.k;
    if (threadIdx.x == 0) distinct = 0;
    __syncthreads();
    for (u32 place = threadIdx.x; place < count; place += blockDim.x) {
        u32 first = 0;
        while (experts[first] != experts[place]) first++;
        firsts[place] = first;
        if (first == place && experts[place] != NO_EXPERT) atomicAdd(&distinct, 1u);
    }
    __syncthreads();
    for (u32 place = threadIdx.x; place < count; place += blockDim.x) {
        u32 expert = experts[place], first = firsts[place], row = 0, number = 0, rows = 0;
        if (expert == NO_EXPERT) continue;
        for (u32 other = 0; other < count; other++) {
            if (experts[other] == NO_EXPERT) continue;
            u32 its = firsts[other];
            row += its < first || (its == first && other < place);
            number += its == other && other < first;
            rows += its == first;
        }
        args.terms[place].output = args.outputs + (u64)row * args.width;
        args.picks[row] = place / args.share;
        if (first != place) continue;
        const u8 *slot = (const u8 *)args.slots[expert];
        for (u32 list = 0; list < args.list_count; list++) args.lists[list].set(number, slot, row, rows);
    }
    for (u32 entry = distinct + threadIdx.x; entry < args.entries; entry += blockDim.x) {
        for (u32 list = 0; list < args.list_count; list++) args.lists[list].set(entry, nullptr, 0, 0);
    }
}

// Chooses the experts of all tokens, unless they are known, and writes the lists of their products. There is one block; a warp has a token at a
// time.
extern "C" __global__ void choose_experts(const ChoiceArgs *args_in_memory) {
    __shared__ u32 shared[2 * SHARED_PLACES];
    __shared__ u32 distinct;
    const ChoiceArgs &args = *args_in_memory;
    u32 count = args.tokens * args.k, *places = count <= SHARED_PLACES ? shared : args.places;
    for (u32 token = threadIdx.x / WARP; token < args.tokens; token += blockDim.x / WARP) choose_for(args, token, places);
    group_places(args, places, places + count, distinct);
}
