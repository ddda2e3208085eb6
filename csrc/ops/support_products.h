// The matrix products of an LM head, computed only for the ids of supports. They are implemented in cpu/ and cuda/.
// ops/support_products.cpp has checked the arguments. Nothing here depends on torch.
//
// A place is an index into a list of support logits, and stands for a row and an id of the row's set. There is one
// place for each id of the supports, and then one place for each row. The place of a row is for its label, which may
// join the row's set.
#pragma once

#include "../core/float_bits.h"
#include "../core/segments.h"
#include "device.h"
#include "support_logprob_entropy.h"

namespace d3s {

struct Matrix {
  const void* values = nullptr;
  FloatType type = FloatType::kFloat32;
  int64_t rows = 0, columns = 0;
  int64_t stride = 0;  // between rows; the stride between columns is 1
};

template <class T>
D3S_HOST_DEVICE T* row_of(const Matrix& matrix, int64_t row) {
  return const_cast<T*>(static_cast<const T*>(matrix.values)) + row * matrix.stride;
}

// Calls body(Tag<T>, Tag<To>) with the element types of `from` and `to`. `to` has the type of `from`, or float32.
template <class Body>
void dispatch_sum(const Matrix& from, const Matrix& to, const Body& body) {
  dispatch_float(from.type, [&](auto tag) {
    if (to.type == from.type)
      body(tag, tag);
    else
      body(tag, Tag<float>());
  });
}

D3S_HOST_DEVICE float rounded(float value, FloatType type) {
  if (type == FloatType::kBfloat16) return to_float(from_float<bfloat16>(value));
  if (type == FloatType::kFloat16) return to_float(from_float<float16>(value));
  return value;
}

// A vector of any float type. `values` may be null.
struct Vector {
  void* values = nullptr;
  FloatType type = FloatType::kFloat32;

  D3S_HOST_DEVICE float operator[](int64_t i) const {
    if (type == FloatType::kBfloat16) return to_float(static_cast<const bfloat16*>(values)[i]);
    if (type == FloatType::kFloat16) return to_float(static_cast<const float16*>(values)[i]);
    return static_cast<const float*>(values)[i];
  }
  D3S_HOST_DEVICE void add(int64_t i, float value) const {
    const float sum = (*this)[i] + value;
    if (type == FloatType::kBfloat16)
      static_cast<bfloat16*>(values)[i] = from_float<bfloat16>(sum);
    else if (type == FloatType::kFloat16)
      static_cast<float16*>(values)[i] = from_float<float16>(sum);
    else
      static_cast<float*>(values)[i] = sum;
  }
};

// An LM head or one of its vocabulary shards, and the hidden states of all rows.
struct SupportHead {
  Matrix hidden, weight;
  Vector bias;
  float softcap = 0.f;  // 0: none
  FloatType logits_type = FloatType::kFloat32;
  SupportRows rows;  // the rows of the head's logits; each column belongs to a row of `weight`

  D3S_HOST_DEVICE int64_t places() const { return rows.supports.count + hidden.rows; }
  // Returns whether the row's set is a single id. If so, no logit of the row is needed.
  D3S_HOST_DEVICE bool single(int64_t row, const Support& support) const {
    return support.size == 1 &&
           !(rows.supports.include_label && rows.labels[row] >= 0 && rows.labels[row] != support.tokens[0]);
  }
  // Returns whether the label of the row may join the set of the row. The label joins unless the support already
  // contains it.
  D3S_HOST_DEVICE bool may_join(int64_t row, const Support& support) const {
    return rows.supports.include_label && support.size > 0 && rows.labels[row] >= 0 && !rows.masked_out(row);
  }
  // Turns the product of a hidden state and a weight row into a logit. The rounding steps are the same as in the dense
  // head.
  D3S_HOST_DEVICE float logit(float product, int64_t weight_row) const {
    float z = rounded(product, logits_type);
    if (bias.values) z = rounded(z + bias[weight_row], logits_type);
    if (softcap > 0.f) {
      z = rounded(tanhf(rounded(z / softcap, logits_type)), logits_type);
      z = rounded(z * softcap, logits_type);
    }
    return z;
  }
};

// Writes one logit for each place. The logit is -inf in four cases: the place belongs to no row; the id of the place is
// in another shard; the row is masked out; or the set of the row is a single id. Offsets on a GPU may be unchecked; if
// an offset is bad, all logits are NaN.
void support_logits(const SupportHead& head, float* out, Device& device);

// The gradient of the logit at each place.
struct SupportGradient {
  const float* grad = nullptr;
  const int32_t* rows = nullptr;    // the row of each place; below 0 if the place has no gradient
  const int32_t* tokens = nullptr;  // the weight row of each place
  int64_t places = 0;

  // Returns whether the place has a gradient. `rows` and `tokens` on a GPU may be unchecked, so both values of the
  // place are tested here.
  D3S_HOST_DEVICE bool has(int64_t place, int64_t row_count, int64_t token_count) const {
    return rows[place] >= 0 && rows[place] < row_count && tokens[place] >= 0 && tokens[place] < token_count;
  }
};

// out[row] = the sum of grad * weight[token] over the places of the row. The terms are added in the order of the places
// in `supports`, and the place of the label comes last. If undefined[row] is true, out[row] becomes NaN. Otherwise, if
// the support of the row is empty, out[row] is not written. `out` has the type of `weight`, or float32.
void sum_for_rows(const SupportGradient& gradient, const Matrix& weight, const Segments& supports,
                  const bool* undefined, const Matrix& out, Device& device);

// An id, `token`, may be in the supports of several rows. For each of these rows, in their order, adds grad *
// hidden[row] to out[token], and grad to bias_out[token]. `out` has the type of `hidden`, or float32, and may have no
// columns. bias_out may be null.
void add_for_tokens(const SupportGradient& gradient, const Matrix& hidden, const Matrix& out, const Vector& bias_out,
                    Device& device);

}  // namespace d3s
