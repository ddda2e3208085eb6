// The gradients of a row's log-probabilities at given ids, of the log-probability of the ids' tail (all other ids), of
// the label's log-probability, and of the entropy.
//
// With the probabilities p, the incoming gradients g_k of the given ids, g_tail, g_label and g_entropy, and their sum
// G = sum_k g_k + g_tail + g_label, the gradient of the logit z of an id v at temperature t is
//
//     dz = (sum_k g_k 1{v = id_k} + g_label 1{v = label} - p G - g_entropy p (log p + H)) / t    for a given id v,
//     dz = (g_label 1{v = label} + q g_tail - p G - g_entropy p (log p + H)) / t                 for an id v of the
//     tail.
//
// Here, q = p / P is the probability of v within the tail, and P is the probability of the tail. In the tail, p = q P,
// so dz has the form of the gradient of logprob_entropy (core/softmax_state.h) for a row that consists of the tail
// alone, with other incoming gradients. The kernels of logprob_entropy write this gradient for the whole row, and then
// the gradients at the given ids and at the label are written over it. No value is divided by P, which may be tiny.
#pragma once

#include <cmath>

#include "macros.h"

namespace d3s {
namespace {  // internal linkage, like the functions of core/softmax_state.h

struct TokenGradient {
  float all;  // G
  float g_tail;
  float g_entropy;
  float tail_logprob;  // log P; -inf if no id of the tail has a probability above 0
  float entropy;
  float temperature;

  D3S_HOST_DEVICE float tail() const { return expf(tail_logprob); }

  // The incoming gradients and the entropy with which the kernels of logprob_entropy write the gradient of the tail.
  D3S_HOST_DEVICE float tail_grad_logprob() const { return has_tail() ? all * tail() - g_tail : 0.f; }
  D3S_HOST_DEVICE float tail_grad_entropy() const { return has_tail() ? g_entropy * tail() : 0.f; }
  D3S_HOST_DEVICE float tail_entropy() const { return has_tail() ? entropy + tail_logprob : 0.f; }

  // Returns dz for a given id. `own` is the sum of the incoming gradients of the id.
  D3S_HOST_DEVICE float at_given(float logprob, float own) const { return (own - shared(logprob)) / temperature; }

  // Returns dz for the label, if the label is in the tail.
  D3S_HOST_DEVICE float at_label_in_tail(float logprob, float g_label) const {
    const float of_tail = g_tail == 0.f ? 0.f : g_tail * expf(logprob - tail_logprob);
    return (g_label + of_tail - shared(logprob)) / temperature;
  }

 private:
  D3S_HOST_DEVICE bool has_tail() const { return !(tail_logprob == -INFINITY); }
  D3S_HOST_DEVICE float shared(float logprob) const {
    const float p = expf(logprob);
    const bool none = p == 0.f || (all == 0.f && g_entropy == 0.f);  // 0 * -inf and 0 * NaN would be NaN
    return none ? 0.f : p * (all + g_entropy * (logprob + entropy));
  }
};

}  // namespace
}  // namespace d3s
