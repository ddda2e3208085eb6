// The arguments of supports, and their checks. Public functions get supports as a sampling mask. Values on a GPU are
// checked only with D3S_KERNELS_CHECK=1.
#pragma once

#include <string>
#include <vector>

#include "logits_argument.h"
#include "support_logprob_entropy.h"

namespace d3s {

struct SupportArgument {
  Tensor ids, offsets;
  bool include_label;
};
template <>
struct Parameter<SupportArgument> : Together<SupportArgument, Tensor, Tensor, bool> {};

// Requires ids and offsets with one support for each of `rows` rows, on the device of `like`.
inline void require_supports(const Tensor& ids, const Tensor& offsets, const Tensor& like, int64_t rows) {
  const auto type = offsets.scalar_type();
  require(ids.dim() == 1 && ids.scalar_type() == ScalarType::Int, "sampling_mask", "got ids of shape ", shape(ids),
          " and dtype ", dtype(ids), "; takes int32 [n]");
  require(offsets.dim() == 1 && (type == ScalarType::Int || type == ScalarType::Long), "sampling_mask",
          "got offsets of shape ", shape(offsets), " and dtype ", dtype(offsets), "; takes int32 or int64 [rows + 1]");
  require(offsets.numel() == rows + 1, "sampling_mask", "got ", offsets.numel() - 1,
          " rows; takes one for each row of the logits, ", rows);
  require_same_device("sampling_mask", ids, like);
  require_same_device("sampling_mask", offsets, like);
}

inline Supports supports_of(const Tensor& ids, const Tensor& offsets, bool include_label) {
  Supports supports;
  supports.tokens = data<int32_t>(ids);
  supports.count = ids.numel();
  if (offsets.scalar_type() == ScalarType::Int)
    supports.offsets32 = data<int32_t>(offsets);
  else
    supports.offsets64 = data<int64_t>(offsets);
  supports.include_label = include_label;
  return supports;
}

template <class Offset>
void require_offsets_of_ids(const Offset* offsets, int64_t rows, int64_t ids) {
  require(offsets[0] == 0, "sampling_mask", "its offsets start at ", offsets[0], "; must start at 0");
  for (int64_t row = 0; row < rows; ++row)
    require(offsets[row] <= offsets[row + 1], "sampling_mask", "its offsets decrease from ", offsets[row], " to ",
            offsets[row + 1], " at row ", row, "; must not decrease");
  require(offsets[rows] <= ids, "sampling_mask", "its offsets end at ", offsets[rows],
          "; must end at most at the number of ids, ", ids);
}

inline void require_offsets_of_ids(const Tensor& offsets, int64_t rows, int64_t ids) {
  if (offsets.scalar_type() == ScalarType::Int)
    require_offsets_of_ids(data<int32_t>(offsets), rows, ids);
  else
    require_offsets_of_ids(data<int64_t>(offsets), rows, ids);
}

// Throws an exception for the first bad row. A row is bad in three cases: one of its ids is not in the vocabulary; an
// id comes twice; or, without include_label, the label of the row is not among its ids.
inline void require_ids(const Supports& supports, const Labels& labels, const bool* mask, int64_t rows,
                        int64_t vocabulary) {
  const std::string end = vocabulary < INT64_MAX ? std::to_string(vocabulary) : "V";  // for a tile, the size is unknown
  std::vector<bool> seen;  // indexed by id; cleared after each row
  for (int64_t row = 0; row < rows; ++row) {
    const Support support = supports[row];
    const int64_t label = labels[row];
    bool found = label == kNoTarget || support.size == 0 || supports.include_label || (mask && !mask[row]);
    for (int64_t i = 0; i < support.size; ++i) {
      const int64_t token = support.tokens[i];
      require(token >= 0 && token < vocabulary, "sampling_mask", "got id ", token, " at row ", row,
              "; takes tokens in [0, ", end, ")");
      if (token >= static_cast<int64_t>(seen.size())) seen.resize(token + 1);
      require(!seen[token], "sampling_mask", "got id ", token, " twice at row ", row, "; takes each once");
      seen[token] = true;
      found |= token == label;
    }
    for (int64_t i = 0; i < support.size; ++i) seen[support.tokens[i]] = false;
    require(found, "labels", "got ", label, " at row ", row, ", which the row's support in sampling_mask lacks; takes ",
            "an id of the support, -100 (no target), or any token with label_outside=\"include\"");
  }
}

// The rows of logits with their supports, checked. The object owns the tensors that `rows` points into, except the
// logits.
class SupportRowsArgument {
 public:
  SupportRowsArgument(const LogitsArgument& argument, const Tensor& logits, const SupportArgument& given)
      : argument_(argument) {
    static_cast<LogitsRows&>(rows) = argument.rows;
    const int64_t count = rows.layout.count;
    require_supports(given.ids, given.offsets, logits, count);
    ids_ = packed(given.ids);
    offsets_ = packed(given.offsets);
    rows.supports = supports_of(*ids_, *offsets_, given.include_label);
    const OptionalTensor known_ids = on_host(*ids_), known_offsets = on_host(*offsets_);
    if (!known_ids || !known_offsets) return;
    const auto known = [](const OptionalTensor& tensor) { return tensor ? on_host(*tensor) : tensor; };
    const OptionalTensor labels = known(argument.labels), mask = known(argument.mask);
    require_offsets_of_ids(*known_offsets, count, known_ids->numel());
    require_ids(supports_of(*known_ids, *known_offsets, given.include_label), labels_of(labels), data<bool>(mask),
                count, rows.vocabulary);
  }

  // With `support_of`, `logits` is a list of support logits, expanded to all rows. `support_of` is then the number of
  // ids in the vocabulary or tile.
  SupportRowsArgument(const Tensor& logits, const OptionalTensor& labels, const SupportArgument& given,
                      const TemperatureArgument& temperature, const OptionalTensor& mask, const Tile& tile,
                      const OptionalInt& support_of)
      : SupportRowsArgument(
            of_list(LogitsArgument(logits, labels, temperature, mask, tile, support_of), logits, given, support_of),
            logits, given) {
    rows.listed = support_of.has_value();
  }

  // Returns whether the op before this one has found more rows without a support than the caller's bound.
  void set_exceeded(const OptionalTensor& exceeded, const Tensor& logits) {
    if (!exceeded) return;
    require(exceeded->numel() == 1 && exceeded->scalar_type() == ScalarType::Bool, "exceeded", "got shape ",
            shape(*exceeded), " of ", dtype(*exceeded), "; takes bool [1]");
    require_same_device("exceeded", *exceeded, logits);
    exceeded_ = exceeded;
    rows.exceeded = data<bool>(exceeded_);
  }

  int64_t dims() const { return argument_.dims; }

  SupportRows rows;

 private:
  static LogitsArgument of_list(LogitsArgument argument, const Tensor& logits, const SupportArgument& given,
                                const OptionalInt& support_of) {
    if (!support_of) return argument;
    require(*support_of >= 0, "support_of", "got ", *support_of, "; takes at least 0");
    const int64_t places = given.ids.numel() + argument.rows.layout.count;
    require(argument.rows.type == FloatType::kFloat32 && argument.dims == 1 && logits.size(1) == places, "logits",
            "got shape ", shape(logits), " of ", dtype(logits), "; takes float32 [rows, places], all ", places,
            " for each row");
    return argument;
  }

  LogitsArgument argument_;
  OptionalTensor ids_, offsets_, exceeded_;
};

}  // namespace d3s
