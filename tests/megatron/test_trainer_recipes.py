"""The recipes of examples/trainers that put the head into a Megatron trainer: an update of Megatron's model without
logits has the loss and the gradients of the trainer's own formula with logits.

slime and NeMo-RL cannot be installed without a GPU, so their functions are stand-ins, written from the versions that
the recipes name.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-megatron)")

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron_core import installed
from megatron_core import recipe as load
from ranks import Ranks, world
from tiny_megatron import (
    arrange,
    full_gradients,
    gathered,
    logprobs_of,
    my_rows,
    packed,
    parallel_state,
    reference_of,
    tiny_model,
    zigzag,
)
from torch import Tensor
from torch.nn.functional import pad

from d3s_kernels import reference

TEMPERATURE, VOCABULARY = 0.7, 96
TOTALS, RESPONSES = (13, 6, 11), (8, 4, 9)  # of the last response, one context rank has only a few tokens


# ---- slime -----------------------------------------------------------------------------------------------------------


def approx_kl(log_probs: Tensor, base: Tensor, *, kl_loss_type: str, importance_ratio: Tensor | None) -> Tensor:
    """``compute_approx_kl``, of its kinds only "k3"."""
    assert kl_loss_type == "k3"
    kl = (base - log_probs).exp() - 1 - (base - log_probs)
    return kl if importance_ratio is None else importance_ratio * kl


def clipped_loss(ppo_kl: Tensor, advantages: Tensor, low: float, high: float, eps_clip_c: float | None = None) -> Any:
    assert eps_clip_c is None
    ratio = (-ppo_kl).exp()
    losses = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    return torch.maximum(*losses), (losses[1] > losses[0]).float()


def cispo_loss(ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, low: float, high: float) -> Any:
    ratio = (-ppo_kl).exp()
    cut = ratio.clamp(1 - low, 1 + high)
    return -cut.detach() * advantages * log_probs, (cut != ratio).float()


def offsets_with_cp(total: int, response: int) -> Any:
    """``get_logits_and_tokens_offset_with_cp``: the chunks of this rank, the rows in them that predict the response,
    and the tokens that they predict.
    """
    rank, context = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    size = -(-total // (2 * context))
    chunks = [(place * size, (place + 1) * size) for place in (rank, 2 * context - rank - 1)]
    rows = [(max(a, total - response - 1), min(b, total - 1)) for a, b in chunks]
    rows = [(a, b) if a < b else (0, 0) for a, b in rows]
    return size, chunks, rows, [(a + 1, b + 1) if a < b else (0, 0) for a, b in rows]


def part_of_response(values: Tensor, total: int, response: int) -> Tensor:
    """``slice_log_prob_with_cp``."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    return torch.cat(
        [
            values[a - (total - response - 1) : b - (total - response - 1)]
            for a, b in offsets_with_cp(total, response)[2]
        ]
    )


OF_SLIME = {
    "slime.utils.ppo_utils": SimpleNamespace(
        compute_policy_loss=clipped_loss, compute_cispo_loss=cispo_loss, compute_approx_kl=approx_kl
    ),
    "slime.backends.megatron_utils.cp_utils": SimpleNamespace(
        get_logits_and_tokens_offset_with_cp=offsets_with_cp, slice_log_prob_with_cp=part_of_response
    ),
}
SLIME = load("d3s_slime", {})
HEAD = load("d3s_slime_head", {})


def arguments(**options: Any) -> SimpleNamespace:
    given = {
        "loss_type": "custom_loss", "custom_loss_function_path": "d3s_slime_head.policy_loss",
        "custom_megatron_before_log_prob_hook_path": "d3s_slime_head.remove", "advantage_estimator": "grpo",
        "rollout_top_p": 1.0, "rollout_temperature": TEMPERATURE, "params_dtype": torch.float32, "eps_clip": 0.2,
        "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.1,
        "kl_loss_type": "k3", "use_unbiased_kl": False, "use_rollout_logprobs": False,
    }  # fmt: skip
    return SimpleNamespace(**given | options)


def slimes_update(ranks: Ranks, seed: int, context: int, options: dict[str, Any], model_options: Any) -> None:
    """Two training steps with a pass for log-probabilities between them, of one micro-batch of three samples."""
    arrange(tensor := 2, context)
    torch.manual_seed(seed)
    args = arguments(**options)
    unit = 2 * context if context > 1 else 1
    lengths = [-(-total // unit) * unit for total in TOTALS]  # as slice_with_cp pads
    tokens = [torch.randint(VOCABULARY, (total,)) for total in TOTALS]
    fields = {name: [-3 * torch.rand(n) for n in RESPONSES] for name in ("log_probs", "ref_log_probs")}
    fields["rollout_log_probs"] = [old + 0.1 * torch.randn(len(old)) for old in fields["log_probs"]]
    fields["advantages"] = [torch.randn(()) * (torch.rand(n) < 0.4) for n in RESPONSES]
    masks = [(torch.rand(n) < 0.8).int() for n in RESPONSES]
    padding = -sum(lengths) % (4 * tensor * 2 * context)
    whole = torch.cat([torch.nn.functional.pad(t, (0, n - len(t))) for t, n in zip(tokens, lengths, strict=True)])
    whole = torch.nn.functional.pad(whole, (0, padding))[None]
    rows = [total - n - 1 for total, n in zip(TOTALS, RESPONSES, strict=True)]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    where = torch.cat([torch.arange(n) + a + b for n, a, b in zip(RESPONSES, rows, starts, strict=True)])
    full_mask = torch.zeros_like(whole).index_put((torch.zeros_like(where), where), torch.cat(masks).long())
    pieces = [*lengths, *([padding] if padding else [])]
    batch = {
        "tokens": my_rows(whole, pieces), "full_loss_masks": my_rows(full_mask, pieces), "unconcat_tokens": tokens,
        "total_lengths": list(TOTALS), "response_lengths": list(RESPONSES), "loss_masks": masks,
        **{name: [part_of_response(v, t, n) for v, t, n in zip(values, TOTALS, RESPONSES, strict=True)]
           for name, values in fields.items()},
    }  # fmt: skip
    own_masks = torch.cat([part_of_response(m, t, n) for m, t, n in zip(masks, TOTALS, RESPONSES, strict=True)])
    model = tiny_model(VOCABULARY, seed=seed, ddp={}, **model_options)

    def forward() -> Tensor:
        return model(batch["tokens"], None, None, packed_seq_params=packed(pieces))

    # slime's own way, with logits
    labels = torch.zeros_like(whole).index_put(
        (torch.zeros_like(where), where), torch.cat([t[-n:] for t, n in zip(tokens, RESPONSES, strict=True)])
    )
    mine = my_rows(torch.zeros_like(whole).index_put((torch.zeros_like(where), where), torch.tensor(1)), pieces)[0] > 0
    logits = gather_from_tensor_model_parallel_region(forward())
    logprob, entropy = (x[0, mine] for x in logprobs_of(logits, my_rows(labels, pieces), TEMPERATURE))
    old, advantages, base = (torch.cat(batch[n]) for n in ("log_probs", "advantages", "ref_log_probs"))
    if args.use_rollout_logprobs:
        old = torch.cat(batch["rollout_log_probs"])
    loss_of = cispo_loss if args.advantage_estimator == "cispo" else clipped_loss
    given = (logprob,) if args.advantage_estimator == "cispo" else ()
    losses, clipped = loss_of(old - logprob, *given, advantages, args.eps_clip, args.eps_clip_high)
    wanted = {"pg_loss": losses, "pg_clipfrac": clipped, "ppo_kl": old - logprob, "entropy_loss": entropy}
    wanted["loss"] = losses - args.entropy_coef * entropy
    compared = logprob if args.use_rollout_logprobs else old
    wanted["train_rollout_logprob_abs_diff"] = (compared - torch.cat(batch["rollout_log_probs"])).abs()
    if args.use_kl_loss:
        ratio = (logprob - old).exp() if args.use_unbiased_kl else None
        wanted["kl_loss"] = approx_kl(logprob, base, kl_loss_type="k3", importance_ratio=ratio)
        wanted["loss"] = wanted["loss"] + args.kl_loss_coef * wanted["kl_loss"]
    (wanted["loss"] * own_masks).sum().backward()
    gradients = full_gradients(model)
    everything = args.use_kl_loss or args.entropy_coef
    read = own_masks if everything else own_masks * (advantages != 0)

    def sum_of_tokens(values: Tensor) -> Tensor:
        return (values * own_masks).sum()

    with installed(OF_SLIME):
        for step in range(2):
            HEAD.install(args, 0, step, [model], None, None)
            model.zero_grad_buffer()
            output = forward()
            assert step == 0 or output.shape[-1] == 0
            loss, metrics = HEAD.policy_loss(args, batch, output, sum_of_tokens)
            loss.backward()
            for name, values in wanted.items():
                counts = own_masks if name in ("loss", "pg_loss") else read
                if name == "train_rollout_logprob_abs_diff" and not args.use_rollout_logprobs:
                    counts = own_masks
                expected = (values * counts).sum()
                torch.testing.assert_close(metrics[name], expected.detach(), rtol=1e-4, atol=1e-4, msg=name)
            assert set(metrics) == set(wanted)
            for name, found in full_gradients(model).items():
                torch.testing.assert_close(found, gradients[name], rtol=1e-4, atol=1e-5, msg=name)
            HEAD.remove(args, [model], "ref_")
            with torch.no_grad():
                assert forward().shape[-1] == VOCABULARY // tensor


def slimes_choice(ranks: Ranks, seed: int) -> None:
    """Each of two context ranks has two chunks of each sequence, and all of them choose from one pool."""
    arrange(2, 2)
    torch.manual_seed(seed)
    whole = {name: [torch.rand(n) + 0.1 for n in RESPONSES] for name in ("entropy", "advantages")}
    masks = [(torch.rand(n) < 0.8).int() for n in RESPONSES]
    pieces = {
        name: [part_of_response(v, t, n) for v, t, n in zip(values, TOTALS, RESPONSES, strict=True)]
        for name, values in {**whole, "mask": masks}.items()
    }
    data = {"total_lengths": list(TOTALS), "response_lengths": list(RESPONSES), "loss_masks": masks, **pieces}
    options = {"d3s_token_ratio_start": 0.3, "d3s_token_ratio_end": 0.3, "d3s_loss_denominator": "all"}
    args = arguments(num_rollout=10, use_rollout_entropy=True, **options)
    with installed(OF_SLIME):
        SLIME.choose_tokens(args, 0, data)
        with pytest.raises(ValueError, match="context_parallel_size: got 2; takes 1, because a rank has parts"):
            SLIME.choose_tokens(arguments(**vars(args) | {"d3s_token_scope": "sequence"}), 0, data)
    pool = [torch.cat(values) for values in (*whole.values(), masks)]
    kept = reference.select_tokens(pool[0], pool[1], 0.3, mask=pool[2].bool()).mask
    mine = [part_of_response(k, t, n) for k, t, n in zip(kept.split(RESPONSES), TOTALS, RESPONSES, strict=True)]
    assert 0 < kept.sum() < pool[2].sum()
    torch.testing.assert_close(torch.cat(data["advantages"]), torch.cat(pieces["advantages"]) * torch.cat(mine))
    assert [len(values) for values in data["advantages"]] == [len(values) for values in mine]
    torch.testing.assert_close(data["d3s/token_share"], kept.sum() / pool[2].sum())


def test_slime_chooses_from_the_parts_of_responses() -> None:
    world(4).run(slimes_choice, int(torch.randint(2**31, ())))


PARALLEL = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("context", "options", "model_options"),
    [
        (1, {}, PARALLEL),
        (1, {"advantage_estimator": "cispo", "use_rollout_logprobs": True}, {"tied": True}),
        (2, {"use_kl_loss": True, "use_unbiased_kl": True}, PARALLEL),
        (2, {"entropy_coef": 0.01}, {}),
        (2, {}, PARALLEL),
    ],
)
def test_slimes_update(context: int, options: dict[str, Any], model_options: dict[str, Any]) -> None:
    world(2 * context).run(slimes_update, int(torch.randint(2**31, ())), context, options, model_options)


def slimes_pipeline(ranks: Ranks) -> None:
    """Two stages in Megatron's schedule, three micro-batches, and tensor-parallel ranks in each stage."""
    arrange(2, pipeline=2)
    torch.manual_seed(3)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    stage = {"pre_process": first, "post_process": not first, "sequence_parallel": True, "batch_p2p_comm": False}
    model, args, masks = tiny_model(VOCABULARY, ddp={}, **stage), arguments(), torch.zeros(1, 16, dtype=torch.int64)
    masks[0, 3:8] = masks[0, 12:15] = 1  # of two sequences of 9 and 7 tokens, the rows that predict 5 and 3
    batches = [
        {
            "tokens": torch.randint(VOCABULARY, (1, 16)), "total_lengths": [9, 7], "response_lengths": [5, 3],
            "full_loss_masks": masks, "log_probs": [-3 * torch.rand(8)],
            "advantages": [torch.randn(8) * (torch.rand(8) < 0.5)],
        }
        for _ in range(3)
    ]  # fmt: skip

    def with_logits(batch: dict[str, Any], output: Tensor) -> Any:
        logits = gather_from_tensor_model_parallel_region(output)
        logprob, _ = logprobs_of(logits, batch["tokens"].roll(-1, 1), TEMPERATURE)
        ppo_kl = batch["log_probs"][0] - logprob[masks > 0]
        loss = clipped_loss(ppo_kl, batch["advantages"][0], args.eps_clip, args.eps_clip_high)[0].sum()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

    def with_head(batch: dict[str, Any], output: Tensor) -> Any:
        batch = {**batch, "unconcat_tokens": batch["tokens"][0].split([9, 7])}
        return HEAD.policy_loss(args, batch, output, Tensor.sum)

    found, zeros = [], torch.zeros
    for loss_of in (with_logits, with_head):
        model.zero_grad_buffer()
        if loss_of is with_head:
            HEAD.install(args, 0, 0, [model], None, None)

        def step(micro_batches: Any, stage: Any, loss_of: Any = loss_of) -> Any:
            batch = next(micro_batches)
            return stage(batch["tokens"], None, None, packed_seq_params=packed([9, 7])), partial(loss_of, batch)

        with pytest.MonkeyPatch.context() as patch, installed(OF_SLIME):
            patch.setattr(torch, "zeros", lambda *size, **options: zeros(*size, **options | {"device": "cpu"}))
            losses = get_forward_backward_func()(
                forward_step_func=step, data_iterator=iter(batches), model=[model], num_microbatches=3, seq_length=16,
                micro_batch_size=1, decoder_seq_length=16, forward_only=False,
            )  # fmt: skip
        HEAD.remove()
        gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
        found.append(([each["loss"] for each in losses], gradients))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert len(found[0][0]) == (0 if first else 3)


def test_slimes_pipeline() -> None:
    world(4).run(slimes_pipeline)


# ---- NeMo-RL ---------------------------------------------------------------------------------------------------------


class ClippedPGLossFn:
    """A loss with a gradient at every token of the masks."""

    def __init__(self, cfg: Any) -> None:
        self.metric_normalizations: dict[str, str] = {}

    def __call__(self, logprobs: Tensor, data: Any, valid_seqs: Tensor, valid_toks: Tensor) -> Any:
        ratio = (logprobs - data["prev_logprobs"][:, 1:]).exp()
        loss = -(ratio * data["advantages"][:, 1:] * data["token_mask"][:, 1:]).sum()
        return loss / valid_toks, {"loss": loss.item()}


class AllGatherCP(torch.autograd.Function):
    """``AllGatherCPTensor``: from two pieces on each rank to the sequence, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any, dim: int) -> Tensor:
        assert dim == 1
        ctx.group, ctx.rows = group, torch.cat(zigzag([mine.shape[1] * group.size()], group.size()))
        return gathered(mine, 1, group)[:, ctx.rows.argsort()]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[:, ctx.rows].chunk(ctx.group.size(), 1)[ctx.group.rank()], None, None


def tokens_on_this_cp_rank(ids: Tensor, rank: int, size: int, seq_dim: int = 1) -> Tensor:
    return ids[:, zigzag([ids.shape[1]], size)[rank]]


class Worker:
    """``MegatronPolicyWorkerImpl``: a micro-batch of packed sequences, and a loss that is called for each of them."""

    def __init__(self, cfg: dict[str, Any], model: Any) -> None:
        self.cfg, self.model = cfg, model

    def train(self, data: dict[str, Tensor], loss_fn: Any, eval_mode: bool) -> dict[str, Any]:
        assert not eval_mode
        context = parallel_state.get_context_parallel_world_size()
        lengths = data["lengths"].tolist()
        unit = 4 * context  # a multiple of the tensor ranks, too
        padded = [-(-n // unit) * unit for n in lengths]
        rows = zip(data["input_ids"], lengths, padded, strict=True)
        whole = torch.cat([pad(row[:n], (0, m - n)) for row, n, m in rows])
        output = self.model(my_rows(whole[None], padded), None, None, packed_seq_params=packed(padded))
        valid = data["token_mask"][:, 1:].sum()
        losses, begin = [], 0
        for row, (n, m) in enumerate(zip(lengths, padded, strict=True)):
            part = {name: values[row : row + 1, :n] for name, values in data.items() if values.dim() == 2}
            part["sample_mask"] = torch.ones(1)
            logits = output.narrow(1, begin, m // context)
            begin += m // context
            losses.append(loss_fn(data=part, logits=logits, global_valid_seqs=None, global_valid_toks=valid)[0])
        # NeMo-RL divides by the context ranks, over which Megatron's mean is later multiplied.
        (loss := sum(losses) / context).backward()
        return {"loss": loss.detach(), "columns": output.shape[-1]}


NEMO_RL = {
    "ray": SimpleNamespace(remote=lambda **options: lambda made: made),
    "nemo_rl.algorithms.loss": SimpleNamespace(ClippedPGLossFn=ClippedPGLossFn),
    "nemo_rl.algorithms.loss.interfaces": SimpleNamespace(
        LossInputType=SimpleNamespace(LOGIT="logit"), MetricNormalizer=SimpleNamespace(TOKENS="tokens")
    ),
    "nemo_rl.distributed.model_utils": SimpleNamespace(
        _get_tokens_on_this_cp_rank=tokens_on_this_cp_rank, allgather_cp_sharded_tensor=AllGatherCP.apply
    ),
    "nemo_rl.models.policy.utils": SimpleNamespace(get_runtime_env_for_policy_worker=lambda name: {}),
    "nemo_rl.models.policy.workers.megatron_policy_worker": SimpleNamespace(MegatronPolicyWorkerImpl=Worker),
}
LOSS = load("d3s_nemo_rl", NEMO_RL)
WORKER = load("d3s_nemo_rl_head", NEMO_RL)


def nemo_rls_update(ranks: Ranks, seed: int, context: int, ratio: float, model_options: Any) -> None:
    """With and without the head: an update of all tokens as in plain torch, and one of the chosen tokens."""
    arrange(2, context)
    torch.manual_seed(seed)
    lengths = torch.tensor([13, 6, 24])
    places = torch.arange(24)
    mask = (places < lengths[:, None]) & (places >= 3)
    data = {
        "input_ids": torch.randint(VOCABULARY, (3, 24)), "token_mask": mask.float(), "lengths": lengths,
        "advantages": torch.randn(3, 1).expand(3, 24), "prev_logprobs": -3 * torch.rand(3, 24),
    }  # fmt: skip
    cfg = {
        "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2, "context_parallel_size": context},
        "sequence_packing": {"enabled": True}, "precision": "float32",
        "generation": {"top_k": None, "top_p": 1.0, "temperature": TEMPERATURE},
    }  # fmt: skip
    ratios = {"token_ratio_start": ratio, "token_ratio_end": ratio, "loss_denominator": "all"}
    none = SimpleNamespace(use_importance_sampling_correction=False, force_on_policy_ratio=False)
    model = tiny_model(VOCABULARY, seed=seed, ddp={}, **model_options)
    found = []
    with installed(NEMO_RL):
        for worker in (WORKER.D3SMegatronPolicyWorker(cfg, model), Worker(cfg, Scaled(model))):
            for _ in range(2):
                model.zero_grad_buffer()
                loss_fn = LOSS.D3SLoss(none, cfg, token_scope="sequence", **ratios)
                metrics = worker.train(data=data, loss_fn=loss_fn, eval_mode=False)
                found.append((metrics, full_gradients(model)))
    assert [metrics["columns"] for metrics, _ in found] == [0, 0, VOCABULARY // 2, VOCABULARY // 2]
    wanted, gradients = found[-1]
    if ratio == 1:
        exact = reference_of(model)
        losses = []
        for row, n in enumerate(lengths.tolist()):
            logits = exact(data["input_ids"][row : row + 1, :n], None, None)[:, :-1]
            labels = data["input_ids"][row : row + 1, 1:n]
            part = {name: values[row : row + 1, :n] for name, values in data.items() if values.dim() == 2}
            loss_of = ClippedPGLossFn(none)
            losses.append(loss_of(logprobs_of(logits, labels, TEMPERATURE)[0], part, None, mask[:, 1:].sum())[0])
        sum(losses).backward()
        torch.testing.assert_close(wanted["loss"] * context, sum(losses).detach().float(), rtol=1e-4, atol=1e-5)
        for name, parameter in exact.named_parameters():
            # Megatron's mean over the context ranks, which NeMo-RL counteracts.
            torch.testing.assert_close(gradients[name] * context, parameter.grad.float(), rtol=1e-3, atol=1e-5)
    for metrics, of_head in found[:2]:
        torch.testing.assert_close(metrics["loss"], wanted["loss"], rtol=1e-4, atol=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(of_head[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


class Scaled:
    """``apply_temperature_scaling`` of a model's logits."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        return self.model(*given, **named) / TEMPERATURE


@pytest.mark.parametrize(
    ("context", "ratio", "model_options"),
    [(1, 1.0, {"tied": True}), (1, 0.3, PARALLEL), (2, 1.0, PARALLEL), (2, 0.3, {})],
)
def test_nemo_rls_update(context: int, ratio: float, model_options: dict[str, Any]) -> None:
    world(2 * context).run(nemo_rls_update, int(torch.randint(2**31, ())), context, ratio, model_options)
