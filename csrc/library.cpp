// The schemas of all ops that are written in C++. The ops that are written in Python are declared in
// d3s_kernels/_dispatch/over_supports.py and d3s_kernels/_lm_head/op.py. d3s_kernels/reference.py defines what the
// public ops compute, and tests/cases/ defines what the other ops compute. The docstrings of d3s_kernels explain the
// arguments.
//
// Some neighbouring arguments of an op are one argument of its kernel: a struct in C++ (csrc/ops/*_argument*.h) or an
// object in Python (d3s_kernels/_arguments/bundles.py). For example, `k` and `k_tensor` become one such argument, and
// so do the ids and the offsets of supports.
//
// Trainers change some numbers from step to step, and torch.compile must not compile again for each new value. So such
// a number is a SymInt (capacity, max_segment) or a tensor (ratio_tensor, temperature_tensor). k and keep can be passed
// as a SymInt or as a tensor.
#include "torch_abi.h"

namespace {

constexpr const char* kSchemas[] = {
    // vocabulary: ops that compute values for each row of logits [..., V], over all ids
    "logprob_entropy(Tensor logits, Tensor? labels, float temperature=1.0, Tensor? temperature_tensor=None, "
    "Tensor? mask=None) -> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum)",
    "logprob_entropy_backward(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, float temperature=1.0, Tensor? temperature_tensor=None, "
    "Tensor? mask=None, SymInt? first_token=None) -> (Tensor grad_logits)",
    // The same ops for a tile of the vocabulary. The first column of the tile is id first_token; without first_token,
    // the columns are the whole vocabulary. softmax_state_ merges the tile into states [rows, 4]. softmax_state_finish
    // also takes the states [shards, rows, 4] of vocabulary shards, and merges the shards in order.
    // logprob_entropy_backward_ overwrites the tile with the gradient of the tile. If grad_dtype is half as wide as the
    // dtype of the logits, the gradient fills the front half of each row. logprob_entropy_backward writes the gradient
    // to a new tensor instead.
    "softmax_state_(Tensor(a!) state, Tensor logits, Tensor? labels, SymInt? first_token=None, float temperature=1.0, "
    "Tensor? temperature_tensor=None, Tensor? mask=None) -> ()",
    "softmax_state_finish(Tensor state, float temperature=1.0, Tensor? temperature_tensor=None) "
    "-> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum)",
    "logprob_entropy_backward_(Tensor? grad_logprob, Tensor? grad_entropy, Tensor(a!) logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, SymInt? first_token=None, float temperature=1.0, "
    "Tensor? temperature_tensor=None, ScalarType? grad_dtype=None) -> ()",
    // supports: some rows have a support, the ids that could have been sampled. The results of such a row are over
    // these ids. support_rows says which rows the ops above have to compute, and whether there are more of these rows
    // than max_dense_rows; the leading dimensions of `values` are the rows. The ops after support_rows write the other
    // rows into the results of the ops above. If `exceeded` is true, they write NaN for all rows.
    // support_logprob_entropy_backward_ takes a gradient that is 0 in the rows with a support.
    "support_rows(Tensor values, Tensor support_ids, Tensor support_offsets, SymInt? max_dense_rows=None, "
    "Tensor? mask=None) -> (Tensor dense, Tensor exceeded)",
    "support_logprob_entropy_(Tensor(a!) logprob, Tensor(b!) entropy, Tensor(c!) row_max, Tensor(d!) log_sum, "
    "Tensor logits, Tensor? labels, Tensor support_ids, Tensor support_offsets, bool include_label=False, "
    "float temperature=1.0, Tensor? temperature_tensor=None, Tensor? mask=None, Tensor? exceeded=None, "
    "SymInt? support_of=None) -> ()",
    "support_softmax_state_(Tensor(a!) state, Tensor logits, Tensor? labels, Tensor support_ids, "
    "Tensor support_offsets, bool include_label=False, SymInt? first_token=None, float temperature=1.0, "
    "Tensor? temperature_tensor=None, Tensor? mask=None, Tensor? exceeded=None, SymInt? support_of=None) -> ()",
    "support_logprob_entropy_backward_(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, Tensor(a!) grad_logits, Tensor support_ids, "
    "Tensor support_offsets, bool include_label=False, float temperature=1.0, Tensor? temperature_tensor=None, "
    "Tensor? mask=None, SymInt? first_token=None) -> ()",
    // For an LM head, support_logits computes only the logits of the supports. It returns a list: first one logit for
    // each id, then one logit for the label of each row. If such a list is passed to the ops above, `support_of` is the
    // number of ids in the vocabulary or tile. support_logits_backward returns three lists of the same length: the
    // gradient of each logit, its row (-1 if it has no gradient), and its id. From these lists, support_hidden_grad_
    // computes the gradient of the hidden states, and support_weight_grad_ the gradients of weight and bias.
    "support_logits(Tensor hidden, Tensor weight, Tensor labels, Tensor support_ids, Tensor support_offsets, "
    "bool include_label=False, Tensor? bias=None, float? logit_softcap=None, Tensor? mask=None, "
    "SymInt? first_token=None, ScalarType logits_dtype=float) -> Tensor",
    "support_logits_backward(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, SymInt support_of, Tensor support_ids, Tensor support_offsets, "
    "bool include_label=False, float temperature=1.0, Tensor? temperature_tensor=None, float? logit_softcap=None, "
    "Tensor? mask=None, SymInt? first_token=None) "
    "-> (Tensor grad, Tensor rows, Tensor tokens, Tensor undefined)",
    "support_hidden_grad_(Tensor grad, Tensor weight, Tensor rows, Tensor tokens, Tensor offsets, Tensor undefined, "
    "Tensor(a!) out) -> ()",
    "support_weight_grad_(Tensor grad, Tensor hidden, Tensor rows, Tensor tokens, Tensor(a!) out, "
    "Tensor(b!)? bias_out=None) -> ()",
    // wide_product_ computes out = hidden @ weight.T, with bfloat16 inputs and a float32 result. This op exists only on
    // CPUs, where torch has no such product.
    "wide_product_(Tensor hidden, Tensor weight, Tensor(a!) out) -> ()",

    // tokens: ops that make masks from segments of scores; compact lists the true values of a mask
    "topk_mask(Tensor scores, float? ratio=None, Tensor? ratio_tensor=None, SymInt? k=None, Tensor? k_tensor=None, "
    "Tensor? mask=None, Tensor? offsets=None, SymInt? max_segment=None, bool pooled=False, bool drop_zeros=False) "
    "-> Tensor",
    "select_tokens(Tensor entropy, Tensor advantages, float? ratio=None, Tensor? ratio_tensor=None, "
    "Tensor? mask=None, Tensor? offsets=None, SymInt? max_segment=None, bool pooled=True, bool drop_zeros=False) "
    "-> (Tensor mask, Tensor count, Tensor threshold)",
    "select_tokens_from_logits(Tensor logits, Tensor advantages, float? ratio=None, Tensor? ratio_tensor=None, "
    "Tensor? mask=None, Tensor? offsets=None, SymInt? max_segment=None, bool pooled=True, "
    "bool drop_zeros=False, float temperature=1.0, Tensor? temperature_tensor=None) "
    "-> (Tensor mask, Tensor entropy, Tensor count, Tensor threshold)",
    "compact(Tensor mask, SymInt capacity) -> (Tensor indices, Tensor count)",

    // Top-K selection in steps (ops/topk_steps.h), for segments that are spread over several ranks
    "topk_order_keys(Tensor scores, Tensor? advantages=None, Tensor? mask=None, Tensor? offsets=None) -> Tensor",
    "topk_count_digit(Tensor keys, Tensor search, int shift, int bits, Tensor? offsets=None) -> Tensor",
    "topk_choose_digit_(Tensor(a!) search, Tensor counts, int shift, float? ratio=None, Tensor? ratio_tensor=None, "
    "SymInt? k=None, Tensor? k_tensor=None) -> ()",
    "topk_mask_from_key(Tensor keys, Tensor search, Tensor ties, Tensor? offsets=None, bool drop_zeros=False) "
    "-> (Tensor mask, Tensor zeros, Tensor lowest)",

    // rollouts: ops that compute advantages or a mask from groups of rewards or advantages
    "group_advantages(Tensor rewards, Tensor? offsets=None, str scale=\"group\", float eps=0.0001, int ddof=1) "
    "-> Tensor",
    "max_variance_select(Tensor values, SymInt? keep=None, Tensor? keep_tensor=None, Tensor? mask=None, "
    "Tensor? offsets=None, SymInt? max_segment=None, bool pooled=False) -> Tensor",

    // tokens: ops that compute ratios, groups and clip ranges of tokens for a loss. Group ids are int8; a token in no
    // group has an id below 0.
    "importance_ratio(Tensor logprob, Tensor old_logprob, Tensor? mask=None, Tensor? groups=None, "
    "Tensor? offsets=None, str level=\"token\", str denominator=\"self\", float low=-20.0, float high=20.0) "
    "-> (Tensor ratio)",
    "importance_ratio_backward(Tensor grad_ratio, Tensor ratio, Tensor? mask=None, Tensor? groups=None, "
    "float low=-20.0, float high=20.0) -> (Tensor grad_logprob)",
    "entropy_groups(Tensor entropy, float[] quantiles, Tensor? mask=None, Tensor? offsets=None, "
    "SymInt? max_segment=None, bool pooled=False) -> Tensor",
    "adaptive_clip(Tensor entropy, Tensor groups, Tensor? mask, Tensor? offsets, int vocab_size, float alpha=0.02) "
    "-> Tensor",
};

}  // namespace

STABLE_TORCH_LIBRARY(d3s_kernels, m) {
  for (const char* schema : kSchemas) m.def(schema);
}

// In d3s_checks, the same ops only check their arguments. Kernels written in Python call these ops first, so that a
// wrong argument gives the same message on every back-end.
STABLE_TORCH_LIBRARY(d3s_checks, m) {
  for (const std::string schema : kSchemas) m.def((schema.substr(0, schema.find("->")) + "-> ()").c_str());
}
