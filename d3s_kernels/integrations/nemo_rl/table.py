"""What :class:`D3SLoss` and :func:`keep_rollouts` assume about NeMo-RL."""

from __future__ import annotations

from .._assumptions import Assumption, Kind, Table
from .._megatron import MEGATRON

_LOSSES, _TRAIN = "nemo_rl.algorithms.loss", "nemo_rl.models.automodel.train"
_MEGATRON, _POLICY = "nemo_rl.models.megatron.train", "nemo_rl.models.policy.lm_policy"
_CLIPPED, _WRAPPERS = f"{_LOSSES}.loss_functions:ClippedPGLossFn", f"{_LOSSES}.wrapper"
_PACKED = f"{_WRAPPERS}:SequencePackingLossWrapper.__call__"
_GRPO, _BATCH = "nemo_rl.algorithms.grpo:grpo_train", "nemo_rl.distributed.batched_data_dict:BatchedDataDict"
_FORWARD = "forward_with_post_processing_fn"
_V1 = "nemo_rl.models.policy.workers.dtensor_policy_worker:DTensorPolicyWorkerImpl.train"
_GIVEN = "global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks, **loss_input"
_CALLED, _DIVIDED = "the call of the loss", "logits are divided by the temperature"
_OF_CLIPPED = "(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks)"
_OF_TRAIN = "(self, data, loss_fn, eval_mode, gbs, mbs, timer, check_dim_skip_keys)"
_PACKER = (
    "get_packer(algorithm=sequence_packing_args['algorithm'], bin_capacity=sequence_packing_args["
    "'max_tokens_per_microbatch'], collect_metrics=False, min_bin_count=shards, bin_count_multiple=shards)"
)
_OF_THE_LOSS: tuple[tuple[str, Kind, str, str], ...] = (
    (f"{_LOSSES}.interfaces:LossInputType", "defines", "LOGIT LOGPROB", "what a loss can be given"),
    (f"{_LOSSES}.utils:prepare_loss_input", "reads", "input_type LOGIT logits", "a loss of this type gets the logits"),
    (f"{_CLIPPED}.__call__", "takes", _OF_CLIPPED, "NeMo-RL's loss, which ours calls"),
    (f"{_CLIPPED}.__call__", "reads", "token_mask sample_mask advantages", "fields of a micro-batch"),
    (f"{_CLIPPED}.__init__", "reads", "metric_normalizations approx_entropy", "what metrics are divided by"),
    (f"{_TRAIN}:LossPostProcessor.__call__", "calls", f"self.loss_fn(data=data_dict, {_GIVEN})", _CALLED),
    (_V1, "calls", f"loss_fn(data=mb, {_GIVEN})", _CALLED),
    (f"{_WRAPPERS}:wrap_loss_fn_with_input_preparation", "calls", f"loss_fn(data=data, {_GIVEN})", _CALLED),
    (_PACKED, "calls", f"self.loss_fn(data=unpadded_seq_data, {_GIVEN})", "its call for each packed sequence"),
    (_PACKED, "calls", "next_token_logits.narrow(1, logit_start, logit_length)", "logits are views of one tensor"),
    (_PACKED, "reads", "loss_accum", "the backward pass comes after all sequences"),
    (_V1, "calls", "self._apply_temperature_scaling(logits)", _DIVIDED),
    (f"{_TRAIN}:{_FORWARD}", "calls", "apply_temperature_scaling(logits, sampling_params)", _DIVIDED),
    (f"{_MEGATRON}:{_FORWARD}", "calls", "apply_temperature_scaling(output_tensor, sampling_params)", _DIVIDED),
    ("nemo_rl.models.automodel.setup", "reads", "generation top_k top_p temperature", "how tokens were sampled"),
    (f"{_MEGATRON}:LossPostProcessor.__call__", "reads", "sequence_packing enabled fuse_loss", "options of the policy"),
    (_POLICY, "reads", "megatron_cfg enabled tensor_model_parallel_size", "options of the policy"),
    (_POLICY, "reads", "dtensor_cfg tensor_parallel_size context_parallel_size", "options of the policy"),
    (f"{_BATCH}.shard_by_batch_size", "calls", _PACKER, "all ranks have equally many packed micro-batches"),
)  # fmt: skip
_OF_ROLLOUTS: tuple[tuple[str, Kind, str, str], ...] = (
    (_GRPO, "reads", "token_mask sample_mask advantages", "fields of the batch"),
    (f"{_BATCH}.select_indices", "takes", "(self, indices)", "takes rows of the batch"),
    (f"{_POLICY}:Policy.train", "takes", _OF_TRAIN, "the method to override"),
    (f"{_POLICY}:Policy.train", "reads", "train_global_batch_size", "what the number of rows has to fit to"),
    ("nemo_rl.algorithms.grpo:setup", "reads", "policy_factory", "which class the policy has"),
)  # fmt: skip

NEMO_RL = Table(
    "nemo_rl", "NVIDIA-NeMo/RL", "7ea279a", "2026-08-22",
    (
        Assumption(
            "D3SLoss keep_rollouts", _GRPO, "calls", "policy.train(train_data, loss_fn, timer=timer)", "the update"
        ),
        *(Assumption("D3SLoss", *row) for row in _OF_THE_LOSS),
        MEGATRON._replace(needed_by="D3SLoss_on_Megatron"),
        *(Assumption("keep_rollouts", *row) for row in _OF_ROLLOUTS),
    ),
)  # fmt: skip
