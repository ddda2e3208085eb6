"""The recipes of examples/trainers that put the head into a Megatron trainer: an update of Megatron's model without
logits has the loss and the gradients of the trainer's own formula with logits.

slime and NeMo-RL cannot be installed without a GPU, so their functions are stand-ins, written from the versions that
the recipes name.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-megatron)")

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron_core import installed
from megatron_core import recipe as load
from ranks import Ranks, world
from tiny_megatron import arrange, full_gradients, logprobs_of, my_rows, packed, parallel_state, tiny_model
from torch import Tensor

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
    old, advantages, reference = (torch.cat(batch[n]) for n in ("log_probs", "advantages", "ref_log_probs"))
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
        wanted["kl_loss"] = approx_kl(logprob, reference, kl_loss_type="k3", importance_ratio=ratio)
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
