// The choice of experts on the device, in the steps of the gate on the CPU: scores, groups, the best k, their weights. The lists of the
// products that follow get the addresses of the chosen experts, from a table of slots.
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

// In the place of an expert, where there is none.
constexpr u32 NO_EXPERT = 0xFFFF;

// An address that depends on the choice.
struct Patch {
    // Gets the address of the expert plus the offset.
    u64 *target;
    u64 offset;
};
static_assert(sizeof(Patch) == 16, "must match the layout in Rust");

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
    // [tokens, k, patches_each]
    const Patch *patches;
    // [tokens, k, width]: the outputs of the chosen experts
    const float *outputs;
    u32 tokens;
    u32 experts;
    u32 k;
    u32 patches_each;
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
    u32 unused;
};
static_assert(sizeof(ChoiceArgs) == 152, "must match the layout in Rust");

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

// Chooses the experts of each token, unless they are known. A warp has a token; there are at most 1024 experts.
extern "C" __global__ void choose_experts(const ChoiceArgs *args_in_memory) {
    const ChoiceArgs &args = *args_in_memory;
    u32 token = group_of_warp(), lane = threadIdx.x % WARP, experts = args.experts;
    if (token >= args.tokens) return;
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
    const Patch *patches = args.patches + (u64)token * args.k * args.patches_each;
    for (u32 rank = 0; rank < args.k; rank++) {
        u32 expert = args.known ? args.known[(u64)token * args.k + rank] : take_best(values, &taken, experts);
        u64 place = (u64)token * args.k + rank, slot = skips ? 0 : args.slots[expert];
        if (lane == 0) {
            terms[rank].expert = expert;
            terms[rank].output = skips ? nullptr : args.outputs + place * args.width;
            args.chosen[place] = skips ? NO_EXPERT : expert;
        }
        for (u32 i = lane; i < args.patches_each; i += WARP) {
            Patch patch = patches[rank * args.patches_each + i];
            *patch.target = slot ? slot + patch.offset : 0;
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
