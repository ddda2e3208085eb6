// The memory to which the kernels of logprob_entropy.cu write the results of rows.
#pragma once

#include "../ops/logprob_entropy.h"
#include "score_keys.h"

namespace d3s {

struct RowSink {
  RowOutputs outputs;
  KeyOutput keys;
  RowState* states = nullptr;  // if set, the rows of a tile are merged into these states, and no outputs are written
  Faults faults;
};

__device__ inline void write_row(int64_t row, const RowStatistics& statistics, float logprob, const RowSink& sink) {
  sink.outputs.write(row, statistics, logprob);
  if (sink.keys.keys) sink.keys.keys[row] = key_of_entropy(sink.keys.scores, row, statistics.entropy);
}

__device__ inline void write_masked_row(int64_t row, const RowSink& sink) {
  sink.outputs.write(row, {0.f, 0.f, 0.f}, 0.f);
  if (sink.keys.keys) sink.keys.keys[row] = kAbsent;
}

// Notes the fault that made a row's results NaN.
__device__ inline void note_row(float temperature, bool bad_label, const Faults& faults) {
  if (temperature != temperature) faults.note(Fault::kTemperature);
  if (bad_label) faults.note(Fault::kLabels);
}

template <class T>
__device__ const T* row_at(const LogitsRows& rows, int64_t row) {
  return static_cast<const T*>(rows.logits) + rows.layout.offset(row);
}

}  // namespace d3s
