// Checks the arguments of topk_order_keys, topk_count_digit, topk_choose_digit_ and topk_mask_from_key, and allocates
// their results.
#include "topk_steps.h"

#include "selection_arguments.h"

namespace d3s {
namespace {

constexpr int64_t kSearchFields = sizeof(KeySearch) / sizeof(int64_t);

Tensor topk_order_keys(const Tensor& scores, const OptionalTensor& advantages, const OptionalTensor& mask,
                       const OptionalTensor& offsets) {
  require_float("scores", scores);
  const OptionalTensor present = require_mask("mask", mask, scores, scores.dim());
  const OptionalTensor each = advantages ? OptionalTensor(packed(*advantages)) : std::nullopt;
  const Tensor values = packed(scores);
  Scores source;
  source.values = values.const_data_ptr();
  source.type = float_type(scores);
  source.mask = data<bool>(present);
  source.sequences = segments_of(scores, offsets, "scores");
  if (each) source.kind = kind_of(*each, scores, source.sequences);
  source.advantages = data<float>(each);
  const Tensor keys = empty(leading_sizes(scores, scores.dim()), ScalarType::Int, scores);
  TorchDevice device(scores, PublicOp::kTopkMask);
  make_order_keys(source, scores.numel(), mutable_data<uint32_t>(keys), device);
  return keys;
}

SegmentedKeys keys_of(const Tensor& keys, const OptionalTensor& offsets) {
  require(keys.scalar_type() == ScalarType::Int && keys.is_contiguous(), "keys", "got ", dtype(keys),
          "; takes contiguous int32, from topk_order_keys");
  return {data<uint32_t>(keys), keys.numel(), segments_of(keys, offsets, "keys")};
}

KeySearch* searches_of(const Tensor& search, int64_t segments, const Tensor& like) {
  require(search.scalar_type() == ScalarType::Long && search.dim() == 2 && search.size(0) == segments &&
              search.size(1) == kSearchFields && search.is_contiguous(),
          "search", "got shape ", shape(search), " of ", dtype(search), "; takes contiguous int64 [", segments, ", ",
          kSearchFields, "]");
  require_same_device("search", search, like);
  return mutable_data<KeySearch>(search);
}

Digit digit_of(int64_t shift, int64_t bits) {
  require(bits >= 1 && bits <= Digit::kMostBits, "bits", "got ", bits, "; takes 1 to ", int{Digit::kMostBits});
  require(shift >= 0 && shift + bits <= Digit::kKeyBits, "shift", "got ", shift, " of ", bits, " bits; takes 0 to ",
          Digit::kKeyBits - bits);
  return {static_cast<int>(shift), static_cast<int>(bits)};
}

Tensor topk_count_digit(const Tensor& keys, const Tensor& search, int64_t shift, int64_t bits,
                        const OptionalTensor& offsets) {
  const SegmentedKeys source = keys_of(keys, offsets);
  const Digit digit = digit_of(shift, bits);
  const KeySearch* searches = searches_of(search, source.segments.count, keys);
  const Tensor counts = empty({source.segments.count, digit.bins()}, ScalarType::Long, keys);
  TorchDevice device(keys, PublicOp::kTopkMask);
  count_digit(source, searches, digit, mutable_data<int64_t>(counts), device);
  return counts;
}

void topk_choose_digit_(const Tensor& search, const Tensor& counts, int64_t shift, const RatioArgument& ratio,
                        const KeepArgument& k) {
  require(counts.scalar_type() == ScalarType::Long && counts.dim() == 2 && counts.is_contiguous(), "counts",
          "got shape ", shape(counts), " of ", dtype(counts), "; takes contiguous int64 [segments, bins]");
  int64_t bits = 0;
  while (bits < Digit::kMostBits && int64_t{1} << bits < counts.size(1)) ++bits;
  require(int64_t{1} << bits == counts.size(1), "counts", "got ", counts.size(1), " bins; takes a power of two");
  const Digit digit = digit_of(shift, bits);
  KeySearch* searches = searches_of(search, counts.size(0), counts);
  const Quota quota = quota_of(ratio, k, search);
  TorchDevice device(search, PublicOp::kTopkMask);
  choose_digit(searches, counts.size(0), data<int64_t>(counts), digit, quota, device);
}

std::tuple<Tensor, Tensor, Tensor> topk_mask_from_key(const Tensor& keys, const Tensor& search, const Tensor& ties,
                                                      const OptionalTensor& offsets, bool drop_zeros) {
  const SegmentedKeys source = keys_of(keys, offsets);
  const int64_t segments = source.segments.count;
  const KeySearch* searches = searches_of(search, segments, keys);
  require(ties.scalar_type() == ScalarType::Long && ties.dim() == 1 && ties.size(0) == segments, "ties", "got shape ",
          shape(ties), " of ", dtype(ties), "; takes int64 [", segments, "]");
  require_same_device("ties", ties, keys);
  const Tensor allowed = packed(ties);
  const Tensor mask = empty(leading_sizes(keys, keys.dim()), ScalarType::Bool, keys);
  const Tensor zeros = empty({segments}, ScalarType::Long, keys), lowest = empty({segments}, ScalarType::Long, keys);
  Quota quota;
  quota.drop_zeros = drop_zeros;
  TorchDevice device(keys);
  mask_from_key(source, searches, data<int64_t>(allowed), quota,
                {mutable_data<bool>(mask), mutable_data<int64_t>(zeros), mutable_data<int64_t>(lowest)}, device);
  return {mask, zeros, lowest};
}

}  // namespace

// Top-K selection in steps (topk_steps.h), for segments that are spread over several ranks.
D3S_REGISTER(
    "topk_order_keys(Tensor scores, Tensor? advantages=None, Tensor? mask=None, Tensor? offsets=None) -> Tensor",
    topk_order_keys)
D3S_REGISTER("topk_count_digit(Tensor keys, Tensor search, int shift, int bits, Tensor? offsets=None) -> Tensor",
             topk_count_digit)
D3S_REGISTER(
    "topk_choose_digit_(Tensor(a!) search, Tensor counts, int shift, float? ratio=None, Tensor? ratio_tensor=None, "
    "SymInt? k=None, Tensor? k_tensor=None) -> ()",
    topk_choose_digit_)
D3S_REGISTER(
    "topk_mask_from_key(Tensor keys, Tensor search, Tensor ties, Tensor? offsets=None, bool drop_zeros=False) "
    "-> (Tensor mask, Tensor zeros, Tensor lowest)",
    topk_mask_from_key)

}  // namespace d3s
