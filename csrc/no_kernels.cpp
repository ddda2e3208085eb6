// A back-end that computes nothing: with it the ops check their arguments and that is all. What serves a device from
// Python (d3s_kernels/_torch, d3s_kernels/_triton) asks these ops first, so that a wrong argument meets the same words
// everywhere.
#include "ops/logprob_entropy.h"
#include "ops/ratios.h"
#include "ops/rollouts.h"
#include "ops/topk_mask.h"
#include "ops/topk_steps.h"

namespace d3s {

const bool kMakesKeys = false;

void row_statistics(const LogitsRows&, const RowOutputs&, const KeyOutput&, Device&) {}
void row_gradients(const LogitsRows&, const RowGradients&, int64_t, void*, const RowLayout&, Device&) {}
void merge_tile(const LogitsRows&, int64_t, RowState*, Device&) {}
void finish_states(const RowStates&, const Temperatures&, const RowOutputs&, Device&) {}

void select_top(const Scores&, const Quota&, bool, const Segments&, int64_t, int64_t, const SelectionOutputs&,
                Device&) {}
void compact_indices(const uint8_t*, int64_t, int64_t*, int64_t, int64_t*, Device&) {}

void make_order_keys(const Scores&, int64_t, uint32_t*, Device&) {}
void count_digit(const SegmentedKeys&, const KeySearch*, const Digit&, int64_t*, Device&) {}
void choose_digit(KeySearch*, int64_t, const int64_t*, const Digit&, const Quota&, Device&) {}
void mask_from_key(const SegmentedKeys&, const KeySearch*, const int64_t*, bool, const KeyMaskOutputs&, Device&) {}

void max_variance_mask(const SegmentedValues&, const Keep&, bool*, Device&) {}
void group_advantages_of(const SegmentedValues&, const AdvantageOptions&, float*, Device&) {}

void importance_ratios(const float*, const float*, const TokenGroups&, RatioForm, const LogBounds&, float*, Device&) {}
void importance_ratio_gradients(const RatioGradient&, float*, Device&) {}
void scaled_group_means(const float*, const TokenGroups&, float, float*, Device&) {}
void group_by_quantiles(const QuantileMasks&, int8_t*, Device&) {}

}  // namespace d3s
