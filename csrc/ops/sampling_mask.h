// The arguments of a sampling mask, and their checks. Values on a GPU are checked only with D3S_KERNELS_CHECK=1.
#pragma once

#include <string>
#include <vector>

#include "../torch_abi.h"
#include "logprob_entropy.h"

namespace d3s {

struct SamplingMask {
  OptionalTensor ids, offsets;  // either both are set, or neither
  bool include_label;
  OptionalInt max_dense_rows;
};
template <>
struct Parameter<SamplingMask> : Together<SamplingMask, OptionalTensor, OptionalTensor, bool, OptionalInt> {};

inline void require_sampling_mask(const SamplingMask& given, const Tensor& logits, int64_t rows) {
  require(given.ids.has_value() == given.offsets.has_value(), "sampling_mask",
          "got one of ids and offsets; takes both or none");
  const int64_t bound = given.max_dense_rows.value_or(0);
  if (!given.ids) {
    require(!given.max_dense_rows, "max_dense_rows", "got ", bound, " without a sampling_mask; takes it with one");
    return;
  }
  const Tensor &ids = *given.ids, &offsets = *given.offsets;
  const auto type = offsets.scalar_type();
  require(ids.dim() == 1 && ids.scalar_type() == ScalarType::Int, "sampling_mask", "got ids of shape ", shape(ids),
          " and dtype ", dtype(ids), "; takes int32 [n]");
  require(offsets.dim() == 1 && (type == ScalarType::Int || type == ScalarType::Long), "sampling_mask",
          "got offsets of shape ", shape(offsets), " and dtype ", dtype(offsets), "; takes int32 or int64 [rows + 1]");
  require(offsets.numel() == rows + 1, "sampling_mask", "got ", offsets.numel() - 1,
          " rows; takes one for each row of the logits, ", rows);
  require(bound >= 0, "max_dense_rows", "got ", bound, "; takes at least 0");
  require_same_device("sampling_mask", ids, logits);
  require_same_device("sampling_mask", offsets, logits);
}

inline Spans spans_of(const SamplingMask& given, const Tensor& tokens, const Tensor& offsets) {
  Spans spans;
  spans.tokens = data<int32_t>(tokens);
  spans.count = tokens.numel();
  if (offsets.scalar_type() == ScalarType::Int)
    spans.offsets32 = data<int32_t>(offsets);
  else
    spans.offsets64 = data<int64_t>(offsets);
  spans.include_label = given.include_label;
  spans.max_dense_rows = given.max_dense_rows.value_or(-1);
  return spans;
}

template <class Offset>
void require_offsets(const Offset* offsets, int64_t rows, int64_t ids) {
  require(offsets[0] == 0, "sampling_mask", "its offsets start at ", offsets[0], "; must start at 0");
  for (int64_t row = 0; row < rows; ++row)
    require(offsets[row] <= offsets[row + 1], "sampling_mask", "its offsets decrease from ", offsets[row], " to ",
            offsets[row + 1], " at row ", row, "; must not decrease");
  require(offsets[rows] <= ids, "sampling_mask", "its offsets end at ", offsets[rows],
          "; must end at most at the number of ids, ", ids);
}

inline void require_offsets(const Tensor& offsets, int64_t rows, int64_t ids) {
  if (offsets.scalar_type() == ScalarType::Int)
    require_offsets(data<int32_t>(offsets), rows, ids);
  else
    require_offsets(data<int64_t>(offsets), rows, ids);
}

// Throws an exception for the first bad row. A row is bad if its span contains an id that is no token, contains an id
// twice or, without include_label, does not contain the label of the row.
inline void require_spans(const Spans& spans, const Labels& labels, const bool* mask, int64_t rows,
                          int64_t vocabulary) {
  const std::string end = vocabulary < INT64_MAX ? std::to_string(vocabulary) : "V";  // for a tile, the size is unknown
  std::vector<bool> seen;  // indexed by token; cleared after each row
  for (int64_t row = 0; row < rows; ++row) {
    const Span span = spans[row];
    const int64_t label = labels[row];
    bool found = label == kNoTarget || span.size == 0 || spans.include_label || (mask && !mask[row]);
    for (int64_t i = 0; i < span.size; ++i) {
      const int64_t token = span.tokens[i];
      require(token >= 0 && token < vocabulary, "sampling_mask", "got id ", token, " at row ", row,
              "; takes tokens in [0, ", end, ")");
      if (token >= static_cast<int64_t>(seen.size())) seen.resize(token + 1);
      require(!seen[token], "sampling_mask", "got id ", token, " twice at row ", row, "; takes each once");
      seen[token] = true;
      found |= token == label;
    }
    for (int64_t i = 0; i < span.size; ++i) seen[span.tokens[i]] = false;
    require(found, "labels", "got ", label, " at row ", row, ", which the row's span of sampling_mask lacks; takes a ",
            "kept token, -100 (no target), or any token with label_outside=\"include\"");
  }
}

}  // namespace d3s
