// Every op that C++ computes: the table of contents. Kernels are in cpu/ and cuda/, in the file named after the op's
// subject. The ops that Python computes are declared in d3s_kernels/_head/op.py. d3s_kernels/reference.py defines what
// an op computes; tests/cases/ does so for ops that are not public functions. The docstrings of d3s_kernels
// explain the arguments.
//
// Some neighbouring arguments belong together, and kernels take them as one struct: a number and the tensor that
// replaces it, segments, or a sampling mask (csrc/ops/arguments.h, d3s_kernels/_together.py).
//
// A number that a trainer changes from step to step comes as a SymInt (capacity, max_segment), as a 0-d tensor
// (ratio_tensor, temperature_tensor) or as either (k, keep), so that torch.compile compiles once.
#include "torch_abi.h"

namespace {

constexpr const char* kSchemas[] = {
    // vocabulary: logits [..., V] -> one number for each row, of all its tokens or of those that a sampling mask keeps
    "logprob_entropy(Tensor logits, Tensor? labels, float temperature=1.0, Tensor? temperature_tensor=None, "
    "Tensor? mask=None, Tensor? sampling_ids=None, Tensor? sampling_offsets=None, bool include_label=False, "
    "SymInt? max_dense_rows=None, SymInt? kept_of=None) "
    "-> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum)",
    "logprob_entropy_backward(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, float temperature=1.0, Tensor? temperature_tensor=None, "
    "Tensor? mask=None, SymInt? first_token=None, Tensor? sampling_ids=None, Tensor? sampling_offsets=None, "
    "bool include_label=False, SymInt? max_dense_rows=None) -> (Tensor grad_logits)",
    // The same for a tile, whose first column is token first_token. softmax_state_ merges it into states [rows, 4]. The
    // tile's gradient is written in place, or by the op above into a new tensor. With a grad_dtype of half the size,
    // the gradient takes the front half of each row. States [shards, rows, 4] of vocabulary shards are merged in order.
    "softmax_state_(Tensor(a!) state, Tensor logits, Tensor? labels, SymInt first_token, float temperature=1.0, "
    "Tensor? temperature_tensor=None, Tensor? mask=None, Tensor? sampling_ids=None, "
    "Tensor? sampling_offsets=None, bool include_label=False, SymInt? max_dense_rows=None, "
    "SymInt? kept_of=None) -> ()",
    "softmax_state_finish(Tensor state, float temperature=1.0, Tensor? temperature_tensor=None) "
    "-> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum)",
    "logprob_entropy_backward_(Tensor? grad_logprob, Tensor? grad_entropy, Tensor(a!) logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, SymInt first_token, float temperature=1.0, "
    "Tensor? temperature_tensor=None, ScalarType? grad_dtype=None) -> ()",
    // With a sampling mask: the logits of only the kept tokens. There is a place for each id, and after these one for
    // the label of each row. If the ops above get such logits, `kept_of` is the size of the vocabulary or tile. The
    // next ops give the gradient of these logits, with the row and token of each place (row -1: no gradient), and from
    // it the gradients of hidden states and weight.
    "kept_logits(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias=None, float? logit_softcap=None, "
    "Tensor? mask=None, SymInt first_token=0, ScalarType logits_dtype=float, Tensor? sampling_ids=None, "
    "Tensor? sampling_offsets=None, bool include_label=False, SymInt? max_dense_rows=None) -> Tensor",
    "kept_logits_backward(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, Tensor entropy, "
    "Tensor row_max, Tensor log_sum, SymInt kept_of, float temperature=1.0, Tensor? temperature_tensor=None, "
    "float? logit_softcap=None, Tensor? mask=None, SymInt? first_token=None, Tensor? sampling_ids=None, "
    "Tensor? sampling_offsets=None, bool include_label=False, SymInt? max_dense_rows=None) "
    "-> (Tensor grad, Tensor rows, Tensor tokens, Tensor undefined)",
    "kept_hidden_grad_(Tensor grad, Tensor weight, Tensor rows, Tensor tokens, Tensor offsets, Tensor undefined, "
    "Tensor(a!) out) -> ()",
    "kept_weight_grad_(Tensor grad, Tensor hidden, Tensor rows, Tensor tokens, Tensor(a!) out, "
    "Tensor(b!)? bias_out=None) -> ()",
    // out = hidden @ weight.T, bfloat16 in, float32 out: on CPUs, where torch has no such product
    "wide_product_(Tensor hidden, Tensor weight, Tensor(a!) out) -> ()",

    // tokens: segments of scores -> masks
    "topk_mask(Tensor scores, float? ratio=None, Tensor? ratio_tensor=None, SymInt? k=None, Tensor? k_tensor=None, "
    "Tensor? mask=None, Tensor? offsets=None, SymInt? max_segment=None, bool pooled=False, bool drop_zeros=False) "
    "-> Tensor",
    "select_tokens(Tensor entropy, Tensor advantages, float? ratio=None, Tensor? ratio_tensor=None, "
    "Tensor? mask=None, Tensor? offsets=None, SymInt? max_segment=None, bool pooled=True, bool drop_zeros=False) "
    "-> (Tensor mask, Tensor count, Tensor threshold)",
    "select_tokens_from_logits(Tensor logits, Tensor advantages, float? ratio=None, Tensor? ratio_tensor=None, "
    "Tensor? mask=None, Tensor? offsets=None, SymInt? max_segment=None, bool pooled=True, "
    "bool drop_zeros=False, float temperature=1.0, Tensor? temperature_tensor=None, Tensor? sampling_ids=None, "
    "Tensor? sampling_offsets=None, bool include_label=False, SymInt? max_dense_rows=None) "
    "-> (Tensor mask, Tensor entropy, Tensor count, Tensor threshold)",
    "compact(Tensor mask, SymInt capacity) -> (Tensor indices, Tensor count)",

    // The same in steps, for a segment that lies on several ranks: between the steps, the ranks add up their counts.
    "topk_order_keys(Tensor scores, Tensor? advantages=None, Tensor? mask=None, Tensor? offsets=None) -> Tensor",
    "topk_count_digit(Tensor keys, Tensor search, int shift, int bits, Tensor? offsets=None) -> Tensor",
    "topk_choose_digit_(Tensor(a!) search, Tensor counts, int shift, float? ratio=None, Tensor? ratio_tensor=None, "
    "SymInt? k=None, Tensor? k_tensor=None) -> ()",
    "topk_mask_from_key(Tensor keys, Tensor search, Tensor ties, Tensor? offsets=None, bool drop_zeros=False) "
    "-> (Tensor mask, Tensor zeros, Tensor lowest)",

    // rollouts: groups of rewards or advantages
    "group_advantages(Tensor rewards, Tensor? offsets=None, str scale=\"group\", float eps=0.0001, int ddof=1) "
    "-> Tensor",
    "max_variance_select(Tensor values, SymInt? keep=None, Tensor? keep_tensor=None, Tensor? mask=None, "
    "Tensor? offsets=None, SymInt? max_segment=None, bool pooled=False) -> Tensor",

    // tokens: the weights that a loss gives them. Groups are int8, below 0 for tokens in no group.
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

// The same ops, but they only check their arguments. Kernels written in Python call these first, so that a wrong
// argument gives the same message everywhere.
STABLE_TORCH_LIBRARY(d3s_checks, m) {
  for (const std::string schema : kSchemas) m.def((schema.substr(0, schema.find("->")) + "-> ()").c_str());
}
