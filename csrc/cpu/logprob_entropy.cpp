// Computes logprob_entropy and its gradient, each in one pass over the logits. Temporary memory holds a list of the
// rows and, if there are too few rows to keep all threads busy, 12 bytes for each slice of a row.
#include "../ops/logprob_entropy.h"

#include <algorithm>

#include "../torch_abi.h"
#include "row_slices.h"

namespace d3s {

const bool kMakesKeys = false;  // on CPUs, the vectorised loops of topk_mask.cpp make the keys

void row_statistics(const LogitsRows& rows, const RowOutputs& outputs, const KeyOutput&, Device&) {
  for (int64_t row = 0; row < rows.layout.count; ++row)
    if (rows.masked_out(row)) outputs.write(row, {0.f, 0.f, 0.f}, 0.f);
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto start = [](int64_t) { return SoftmaxState(); };
    const auto done = [&](int64_t row, const SoftmaxState& state, int64_t label) {
      const float temperature = rows.temperatures[row];
      const RowStatistics statistics = finish(state, temperature);
      const T* p = static_cast<const T*>(rows.logits) + rows.layout.offset(row);
      outputs.write(row, statistics, label < 0 ? 0.f : log_probability(to_float(p[label]), statistics, temperature));
    };
    for_each_state<T>(rows, unmasked(rows), whole_slices<T>, start, done);
  });
}

namespace {

bool has_gradient(const LogitsRows& rows, const RowGradients& gradients, int64_t row) {
  return !rows.masked_out(row) && !(gradients.of_logprob(row, rows.labels) == 0.f && gradients.of_entropy(row) == 0.f);
}

// Writes zeros in short pieces. For long pieces, the memset of the C library may use the instruction rep stosb. In
// newly allocated memory, this instruction was measured to take 10 % longer.
void clear(void* memory, int64_t bytes) {
  constexpr int64_t kPiece = 1024;
  for (int64_t begin = 0; begin < bytes; begin += kPiece)
    memset(static_cast<char*>(memory) + begin, 0, std::min(kPiece, bytes - begin));
}

// Without `packed`, row i of the logits is row i of the gradient, and a narrow gradient overwrites the logits.
void write_gradients(const LogitsRows& rows, const PackedRows* packed, const RowGradients& gradients,
                     const GradientOutput& out) {
  const int64_t columns = rows.layout.columns;
  if (columns == 0) return;  // if a shard has no ids, its gradient has no memory
  dispatch_gradient(rows.type, out.type, [&](auto logits_tag, auto tag) {
    using From = typename decltype(logits_tag)::type;
    using T = typename decltype(tag)::type;
    constexpr bool narrow = !std::is_same_v<From, T>;
    const SoftmaxLoops<T>& loops = softmax_rows().of(tag);
    const From* from = static_cast<const From*>(rows.logits);
    T* to = static_cast<T*>(out.gradient);

    // `still` lists the rows without an incoming gradient, which need no logits. `live` lists the other rows. Each list
    // is divided evenly among the threads.
    std::vector<int64_t> live, still;
    for (int64_t row = 0; row < out.layout.count; ++row)
      (has_gradient(rows, gradients, row) ? live : still).push_back(row);
    const int64_t grain = kGrain / (columns + 1) + 1;
    parallel_for(static_cast<int64_t>(still.size()), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        clear(to + out.layout.offset(still[i]), columns * static_cast<int64_t>(sizeof(T)));
    });

    const auto write_piece = [&](int64_t row, int64_t begin, int64_t end) {
      const From* p = from + rows.layout.offset(packed ? packed->rows[row] : row);
      T* gradient = to + out.layout.offset(row);
      const RowStatistics statistics = gradients.statistics(row);
      const float g_logprob = gradients.of_logprob(row, rows.labels), g_entropy = gradients.of_entropy(row);
      if (gradients.any_nan(row, rows.labels)) {  // the whole row becomes NaN, even at ids with probability 0
        std::fill(gradient + begin, gradient + end, from_float<T>(NAN));
        return;
      }
      const float temperature = rows.temperatures[row];
      const GradientLine line = gradient_line(g_logprob, g_entropy, statistics, temperature);
      const int64_t label = rows.column(rows.labels[row]);
      const bool has_label = label >= begin && label < end;
      // The label's logit is read before the gradient overwrites it.
      const float label_distance = has_label ? to_float(p[label]) - statistics.max : 0.f;
      const GradientRow of_row = {statistics.max, kLog2E / temperature, line.offset, line.slope};
      if constexpr (narrow)
        loops.narrow_gradient(p + begin, end - begin, of_row, gradient + begin);
      else
        loops.gradient(p + begin, end - begin, of_row, gradient + begin);
      if (has_label) gradient[label] = from_float<T>(label_gradient(line, label_distance, temperature));
    };
    // If a narrow gradient overwrites logits of other columns in its row, no row is cut into pieces.
    const int64_t length = narrow && !packed ? columns : kGrain, pieces = (columns + length - 1) / length;
    parallel_for(static_cast<int64_t>(live.size()) * pieces, grain, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task % pieces * length;
        write_piece(live[task / pieces], first, std::min(columns, first + length));
      }
    });
  });
}

}  // namespace

void row_gradients(const LogitsRows& rows, const RowGradients& gradients, const GradientOutput& out, Device&) {
  write_gradients(rows, nullptr, gradients, out);
}

void packed_row_gradients(const LogitsRows& rows, const PackedRows& packed, const RowGradients& gradients,
                          const GradientOutput& out, Device&) {
  write_gradients(rows, &packed, gradients, out);
}

void merge_tile(const LogitsRows& rows, RowState* states, Device&) {
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    merge_slices<T>(rows, whole_slices<T>, states);
  });
}

void finish_states(const RowStates& states, const Temperatures& temperatures, const RowOutputs& outputs, Device&) {
  for (int64_t row = 0; row < states.count; ++row) {
    const RowState state = states.merged(row, temperatures[row]);
    const RowStatistics statistics = finish(state.get(), temperatures[row]);
    outputs.write(row, statistics, log_probability(state.label_logit, statistics, temperatures[row]));
  }
}

}  // namespace d3s
