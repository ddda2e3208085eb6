// logprob_entropy and its backward: one pass over the logits each way, no temporary but 12 bytes for each chunk of a
// row, and those only where the rows are fewer than keep the threads busy.
#include <algorithm>

#include "softmax_rows.h"
#include "vocabulary.h"

namespace d3s {
namespace {

// Work for a thread, in logits, below which a second thread costs more than it brings.
constexpr int64_t kGrain = 32768;

// Rows that are not masked out, so that threads share the reading evenly wherever the masked ones lie.
std::vector<int64_t> live_rows(int64_t rows, const bool* row_mask) {
  std::vector<int64_t> live;
  live.reserve(rows);
  for (int64_t row = 0; row < rows; ++row)
    if (!row_mask || row_mask[row]) live.push_back(row);
  return live;
}

// The state of a chunk of `row`; `next_row` is what is read when the row is done.
template <class T>
SoftmaxState chunk_state(const SoftmaxLoops<T>& loops, const T* row, int64_t columns, int64_t chunk, float temperature,
                         const T* next_row) {
  const int64_t begin = chunk * kChunk, end = std::min(columns, begin + kChunk);
  const SoftmaxSums sums =
      loops.chunk(row + begin, end - begin, kLog2E / temperature, end < columns ? row + end : next_row);
  return {sums.max, sums.sum, sums.dot};
}

// Calls done(row, state) with start(row) and the logits of each of the rows `live` merged. A row is one task, or, where
// rows are few, each of its chunks is one; its chunks are merged from left to right in either case, so the bits are
// the same.
template <class T, class Start, class Done>
void for_each_state(const T* logits, const Rows& rows, const std::vector<int64_t>& live,
                    const Temperatures& temperatures, const Start& start, const Done& done) {
  const SoftmaxLoops<T>& loops = D3S_PICK_VARIANT(softmax_rows).of(Tag<T>());
  const int64_t chunks = (rows.columns + kChunk - 1) / kChunk, count = static_cast<int64_t>(live.size());
  const bool few = chunks > 1 && count < 8 * static_cast<int64_t>(torch::stable::get_num_threads());

  std::vector<SoftmaxState> states(few ? count * chunks : 0);
  if (few)
    parallel_for(count * chunks, kGrain / kChunk, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = live[task / chunks];
        const T* p = logits + rows.offset(row);
        states[task] = chunk_state(loops, p, rows.columns, task % chunks, temperatures[row], p);
      }
    });

  parallel_for(count, few ? count : 1 + kGrain / (rows.columns + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = live[i];
      const float temperature = temperatures[row];
      const T* p = logits + rows.offset(row);
      const T* next_row = i + 1 < end ? logits + rows.offset(live[i + 1]) : p;
      SoftmaxState state = start(row);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const SoftmaxState part =
            few ? states[i * chunks + chunk] : chunk_state(loops, p, rows.columns, chunk, temperature, next_row);
        state = merge(state, part, 1.f / temperature);
      }
      done(row, state);
    }
  });
}

}  // namespace

Temperatures::Temperatures(double temperature, const OptionalTensor& tensor, const Tensor& logits, int64_t row_dims) {
  // Beyond these, 1 / t^2 or a distance times t would leave float32.
  const auto good = [](double t) { return t >= 1e-15 && t <= 1e15; };
  if (!tensor) {
    require(good(temperature), "temperature", "got ", temperature, "; takes a number above 0, in [1e-15, 1e15]");
    one_ = static_cast<float>(temperature);
    return;
  }
  require(tensor->scalar_type() == ScalarType::Float, "temperature", "got dtype ", dtype(*tensor), "; takes float32");
  contiguous_ = tensor->dim() == 0 ? *tensor : require_per_row("temperature", *tensor, logits, row_dims);
  const float* values = data<float>(*contiguous_);
  const int64_t n = contiguous_->numel();
  for (int64_t i = 0; i < n; ++i)
    require(good(values[i]), "temperature", "got ", values[i], " at row ", i,
            "; takes numbers above 0, in [1e-15, 1e15]");
  if (tensor->dim() == 0)
    one_ = values[0];
  else
    per_row_ = values;
}

Labels::Labels(const OptionalTensor& labels, const Tensor& logits, int64_t row_dims, int64_t vocabulary) {
  if (!labels) return;
  const auto type = labels->scalar_type();
  require(type == ScalarType::Long || type == ScalarType::Int, "labels", "got dtype ", dtype(*labels),
          "; takes int64 or int32");
  contiguous_ = require_per_row("labels", *labels, logits, row_dims);
  if (type == ScalarType::Long)
    labels64_ = data<int64_t>(*contiguous_);
  else
    labels32_ = data<int32_t>(*contiguous_);
  const int64_t rows = contiguous_->numel();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t label = labels64_ ? labels64_[row] : labels32_[row];
    require(label == -100 || (label >= 0 && label < vocabulary), "labels", "got ", label, " at row ", row,
            "; takes -100 (no target) or a token in [0, ", vocabulary, ")");
  }
}

void row_statistics(const Tensor& logits, const Labels& labels, const Temperatures& temperatures, const bool* row_mask,
                    const RowOutputs& outputs) {
  const Rows rows("logits", logits);
  if (row_mask)
    for (int64_t row = 0; row < rows.count; ++row)
      if (!row_mask[row]) outputs.write(row, {0.f, 0.f, 0.f}, 0.f);
  dispatch_float(logits, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* p = data<T>(logits);
    const auto start = [](int64_t) { return SoftmaxState(); };
    const auto done = [&](int64_t row, const SoftmaxState& state) {
      const RowStatistics statistics = finish(state, temperatures[row]);
      const int64_t label = labels.in_tile(row, 0, rows.columns);
      outputs.write(
          row, statistics,
          label < 0 ? 0.f : log_probability(to_float(p[rows.offset(row) + label]), statistics, temperatures[row]));
    };
    for_each_state(p, rows, live_rows(rows.count, row_mask), temperatures, start, done);
  });
}

namespace {

// The number of dimensions that rows have.
int64_t row_dims(const Tensor& logits) {
  require_float("logits", logits);
  require(logits.dim() >= 1, "logits", "got a 0-d tensor; takes [..., V]");
  return logits.dim() - 1;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logprob_entropy(const Tensor& logits, const OptionalTensor& labels,
                                                           double temperature, const OptionalTensor& temperature_tensor,
                                                           const OptionalTensor& row_mask) {
  const int64_t dims = row_dims(logits);
  const Labels targets(labels, logits, dims, logits.size(dims));
  const Temperatures temperatures(temperature, temperature_tensor, logits, dims);
  const OptionalTensor mask = require_mask("row_mask", row_mask, logits, dims);

  const std::vector<int64_t> sizes = leading_sizes(logits, dims);
  const auto output = [&] { return empty(sizes, ScalarType::Float, logits); };
  const Tensor logprob = output(), entropy = output(), row_max = output(), log_sum = output();
  row_statistics(logits, targets, temperatures, data<bool>(mask),
                 {mutable_data<float>(logprob), mutable_data<float>(entropy), mutable_data<float>(row_max),
                  mutable_data<float>(log_sum)});
  return {logprob, entropy, row_max, log_sum};
}

// What the gradient of a row needs, checked.
struct RowGradients {
  OptionalTensor logprob, entropy;
  Tensor entropies, maxima, log_sums;

  RowGradients(const OptionalTensor& grad_logprob, const OptionalTensor& grad_entropy, const Tensor& entropies,
               const Tensor& maxima, const Tensor& log_sums, const Tensor& logits, int64_t dims)
      : logprob(grad_logprob ? OptionalTensor(checked("grad_logprob", *grad_logprob, logits, dims)) : std::nullopt),
        entropy(grad_entropy ? OptionalTensor(checked("grad_entropy", *grad_entropy, logits, dims)) : std::nullopt),
        entropies(checked("entropy", entropies, logits, dims)),
        maxima(checked("row_max", maxima, logits, dims)),
        log_sums(checked("log_sum", log_sums, logits, dims)) {}

  static Tensor checked(const char* argument, const Tensor& tensor, const Tensor& logits, int64_t dims) {
    require(tensor.scalar_type() == ScalarType::Float, argument, "got dtype ", dtype(tensor), "; takes float32");
    return require_per_row(argument, tensor, logits, dims);
  }
};

// Writes the gradient of rows of logits, a tile of the vocabulary from first_token on, to `out`, which may be the
// logits.
void write_gradient(const RowGradients& gradients, const Tensor& logits, const Labels& labels,
                    const Temperatures& temperatures, const bool* row_mask, int64_t first_token, const Tensor& out) {
  const Rows rows("logits", logits), out_rows("logits", out);
  const float* g_logprob = data<float>(gradients.logprob);
  const float* g_entropy = data<float>(gradients.entropy);
  const float* entropies = data<float>(gradients.entropies);
  const float* maxima = data<float>(gradients.maxima);
  const float* log_sums = data<float>(gradients.log_sums);
  dispatch_float(logits, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const SoftmaxLoops<T>& loops = D3S_PICK_VARIANT(softmax_rows).of(tag);
    const T* from = data<T>(logits);
    T* to = mutable_data<T>(out);
    const auto g_y = [&](int64_t row) {
      return g_logprob && labels.in_tile(row, 0, INT64_MAX) >= 0 ? g_logprob[row] : 0.f;
    };
    const auto g_h = [&](int64_t row) { return g_entropy ? g_entropy[row] : 0.f; };

    // Rows without a gradient are not read. They are apart from the others so that threads share the work evenly.
    std::vector<int64_t> live, still;
    for (int64_t row = 0; row < rows.count; ++row)
      ((row_mask && !row_mask[row]) || (g_y(row) == 0.f && g_h(row) == 0.f) ? still : live).push_back(row);
    const int64_t grain = kGrain / (rows.columns + 1) + 1;
    parallel_for(static_cast<int64_t>(still.size()), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        memset(static_cast<void*>(to + out_rows.offset(still[i])), 0, rows.columns * sizeof(T));
    });

    const auto write_piece = [&](int64_t row, int64_t begin, int64_t end) {
      const T* p = from + rows.offset(row);
      T* gradient = to + out_rows.offset(row);
      if (log_sums[row] != log_sums[row]) {  // what came out was NaN: so is the gradient
        std::fill(gradient + begin, gradient + end, from_float<T>(NAN));
        return;
      }
      const float temperature = temperatures[row];
      const GradientLine line =
          gradient_line(g_y(row), g_h(row), {entropies[row], maxima[row], log_sums[row]}, temperature);
      const int64_t label = labels.in_tile(row, first_token, rows.columns);
      const bool has_label = label >= begin && label < end;
      const float label_distance = has_label ? to_float(p[label]) - maxima[row] : 0.f;  // before it is overwritten
      loops.gradient(p + begin, end - begin, {maxima[row], kLog2E / temperature, line.offset, line.slope},
                     gradient + begin);
      if (has_label) {
        const float e = expf(label_distance / temperature);
        const float softmax_part = e == 0.f ? 0.f : e * (line.offset + line.slope * label_distance);  // not 0 * inf
        gradient[label] = from_float<T>(line.target + softmax_part);
      }
    };
    const int64_t pieces = (rows.columns + kGrain - 1) / kGrain;
    parallel_for(static_cast<int64_t>(live.size()) * pieces, grain, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task % pieces * kGrain;
        write_piece(live[task / pieces], first, first + kGrain < rows.columns ? first + kGrain : rows.columns);
      }
    });
  });
}

Tensor logprob_entropy_backward(const OptionalTensor& grad_logprob, const OptionalTensor& grad_entropy,
                                const Tensor& logits, const OptionalTensor& labels, const Tensor& entropy,
                                const Tensor& row_max, const Tensor& log_sum, double temperature,
                                const OptionalTensor& temperature_tensor, const OptionalTensor& row_mask) {
  const int64_t dims = row_dims(logits);
  const Labels targets(labels, logits, dims, logits.size(dims));
  const Temperatures temperatures(temperature, temperature_tensor, logits, dims);
  const OptionalTensor mask = require_mask("row_mask", row_mask, logits, dims);
  const RowGradients gradients(grad_logprob, grad_entropy, entropy, row_max, log_sum, logits, dims);
  const Tensor out = empty(leading_sizes(logits, dims + 1), logits.scalar_type(), logits);
  write_gradient(gradients, logits, targets, temperatures, data<bool>(mask), 0, out);
  return out;
}

void logprob_entropy_backward_(const OptionalTensor& grad_logprob, const OptionalTensor& grad_entropy,
                               const Tensor& logits, const OptionalTensor& labels, const Tensor& entropy,
                               const Tensor& row_max, const Tensor& log_sum, int64_t first_token, double temperature,
                               const OptionalTensor& temperature_tensor) {
  const int64_t dims = row_dims(logits);
  require(first_token >= 0, "first_token", "got ", first_token, "; takes at least 0");
  for (int64_t i = 0; i < dims; ++i)
    require(logits.size(i) <= 1 || logits.stride(i) >= logits.size(dims), "logits",
            "its rows overlap; takes a tensor that can be written in place");
  const Labels targets(labels, logits, dims, INT64_MAX);
  const Temperatures temperatures(temperature, temperature_tensor, logits, dims);
  const RowGradients gradients(grad_logprob, grad_entropy, entropy, row_max, log_sum, logits, dims);
  write_gradient(gradients, logits, targets, temperatures, nullptr, first_token, logits);
}

// A state is a row of [state, 4] floats: max, sum, dot, and the label's logit (-inf until its tile has come).
constexpr int64_t kStateSize = 4;

float* require_state(const Tensor& state, const Tensor* logits) {
  require(state.scalar_type() == ScalarType::Float && state.dim() == 2 && state.size(1) == kStateSize &&
              state.is_contiguous(),
          "state", "got shape ", shape(state), " of ", dtype(state), "; takes contiguous float32 [rows, 4]");
  require(!logits || (logits->dim() == 2 && logits->size(0) == state.size(0)), "logits",
          "takes [rows, tile] with the rows of state, ", shape(state));
  return mutable_data<float>(state);
}

void softmax_state_(const Tensor& state, const Tensor& logits, const OptionalTensor& labels, int64_t first_token,
                    double temperature, const OptionalTensor& temperature_tensor) {
  require_float("logits", logits);
  require(first_token >= 0, "first_token", "got ", first_token, "; takes at least 0");
  float* states = require_state(state, &logits);
  const Labels targets(labels, logits, 1, INT64_MAX);
  const Temperatures temperatures(temperature, temperature_tensor, logits, 1);
  const Rows rows("logits", logits);
  dispatch_float(logits, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* p = data<T>(logits);
    const auto start = [&](int64_t row) {
      const float* s = states + row * kStateSize;
      return SoftmaxState{s[0], s[1], s[2]};
    };
    const auto done = [&](int64_t row, const SoftmaxState& state) {
      float* s = states + row * kStateSize;
      const int64_t label = targets.in_tile(row, first_token, rows.columns);
      s[0] = state.max, s[1] = state.sum, s[2] = state.dot;
      if (label >= 0) s[3] = to_float(p[rows.offset(row) + label]);
    };
    for_each_state(p, rows, live_rows(rows.count, nullptr), temperatures, start, done);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> softmax_state_finish(const Tensor& state, double temperature,
                                                                const OptionalTensor& temperature_tensor) {
  const float* states = require_state(state, nullptr);
  const Temperatures temperatures(temperature, temperature_tensor, state, 1);
  const int64_t rows = state.size(0);
  const auto output = [&] { return empty({rows}, ScalarType::Float, state); };
  const Tensor logprob = output(), entropy = output(), row_max = output(), log_sum = output();
  const RowOutputs outputs = {mutable_data<float>(logprob), mutable_data<float>(entropy), mutable_data<float>(row_max),
                              mutable_data<float>(log_sum)};
  for (int64_t row = 0; row < rows; ++row) {
    const float* s = states + row * kStateSize;
    const RowStatistics statistics = finish({s[0], s[1], s[2]}, temperatures[row]);
    outputs.write(row, statistics, log_probability(s[3], statistics, temperatures[row]));
  }
  return {logprob, entropy, row_max, log_sum};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(d3s_kernels, CPU, m) {
  m.impl("logprob_entropy", TORCH_BOX(&logprob_entropy));
  m.impl("logprob_entropy_backward", TORCH_BOX(&logprob_entropy_backward));
  m.impl("logprob_entropy_backward_", TORCH_BOX(&logprob_entropy_backward_));
  m.impl("softmax_state_", TORCH_BOX(&softmax_state_));
  m.impl("softmax_state_finish", TORCH_BOX(&softmax_state_finish));
}

}  // namespace d3s
