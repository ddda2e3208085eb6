// Checks the arguments of the op that finds the largest logits of rows, one vocabulary tile at a time.
#include "topk_logprobs.h"

#include "logits_argument.h"

namespace d3s {

namespace {

void topk_softmax_state_(const Tensor& state, const Tensor& best, const Tensor& logits, const Tile& tile,
                         const TemperatureArgument& temperature, const OptionalTensor& mask) {
  const LogitsArgument argument(logits, {}, temperature, mask, tile);
  const LogitsRows& rows = argument.rows;
  require_states_of(state, logits, rows.layout.count);
  require(best.scalar_type() == ScalarType::Long && best.dim() == 2 && best.is_contiguous() &&
              best.size(0) == rows.layout.count && best.size(1) >= 1 && best.size(1) <= kMostBest,
          "best", "got shape ", shape(best), " of ", dtype(best),
          "; takes contiguous int64 [rows, k] with k from 1 to ", int64_t{kMostBest}, " and the rows of state, ",
          shape(state));
  require_same_device("best", best, logits);
  require(rows.id(0) <= INT32_MAX && rows.layout.columns <= INT32_MAX - rows.id(0), "first_token", "got ", rows.id(0),
          " for ", rows.layout.columns, " columns; takes ids below 2^31");
  TorchDevice device(logits, PublicOp::kTopkLogprobs);
  merge_topk_tile(rows, mutable_data<RowState>(state), {static_cast<TopkEntry*>(best.mutable_data_ptr()), best.size(1)},
                  device);
}

}  // namespace

// Of the columns of a tile and of the entries that are in best [rows, k] already, leaves the k largest in best, the
// largest first. Merges all other columns, and the entries that leave best, into the states [rows, 4]; the label's
// logit stays as it is. core/topk_entry.h says how a logit and its id are one integer; INT64_MIN is an empty entry.
D3S_REGISTER(
    "topk_softmax_state_(Tensor(a!) state, Tensor(b!) best, Tensor logits, SymInt? first_token=None, "
    "float temperature=1.0, Tensor? temperature_tensor=None, Tensor? mask=None) -> ()",
    topk_softmax_state_)

}  // namespace d3s
