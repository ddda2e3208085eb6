"""d3s savings: operations are those that torch counts, and shares are those of what the trainers compute."""

from __future__ import annotations

import doctest
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from helpers import slow
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).parent / "trainers"))
from d3s_kernels import __main__ as commands
from d3s_kernels._lm_head.backward import Incoming, Wanted
from d3s_kernels._lm_head.backward import backward as head_backward
from d3s_kernels._lm_head.forward import forward as head_forward
from d3s_kernels._lm_head.problem import HeadProblem
from d3s_kernels.savings import __main__ as savings
from d3s_kernels.savings.counts import CHOICES, ENTROPIES, NOTHING, PARTS, TRL, lengths_of, update
from d3s_kernels.savings.model import DENSE, EXPERTS, NORM_AT_END, OWN_HEAD_DIM, Model, from_config

LLAMA = ["--layers=2", "--hidden=64", "--intermediate=128", "--heads=4", "--kv-heads=2", "--vocab=1000"]
BATCH = ["--prompt-length=8", "--lengths=32,32"]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
OF_QWEN = {"moe_intermediate_size": 24, "mlp_only_layers": [0], "shared_expert_intermediate_size": 40}
ALWAYS = ["gemma2", "llama with LoRA", "qwen2", "qwen3_moe with LoRA"]
LATER = [slow(name, shows="its operations") for name in sorted((DENSE | NORM_AT_END | EXPERTS) - {*ALWAYS})]


def operations(call: Callable[[], Any]) -> int:
    in_place = {torch.ops.aten.addmm_: lambda total, a, b, **_: 2 * a[0] * a[1] * b[1]}  # torch does not count it
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [*ALWAYS, *LATER])
def test_torch_counts_as_many_operations_of_the_body(name: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    kind, _, lora = name.partition(" with ")
    own = OF_QWEN if kind.endswith("_moe") else {"head_dim": 16} if kind in OWN_HEAD_DIM else {}
    config = SIZES | own | {"model_type": kind}
    options = {"attn_implementation": "eager", **({"experts_implementation": "eager"} if kind in EXPERTS else {})}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config), **options).train()
    if lora:
        model.requires_grad_(False).enable_input_require_grads()
    forward, recompute, backward = from_config(config).body(3, 10, bool(lora))
    for again in (0, recompute):
        hidden: list[torch.Tensor] = []
        call = partial(model, torch.arange(30).view(3, 10), use_cache=False)
        assert operations(lambda call=call, hidden=hidden: hidden.append(call()[0])) == forward
        assert operations(hidden[0].sum().backward) == backward + again
        model.gradient_checkpointing_enable()


def test_torch_counts_as_many_products_of_the_heads() -> None:
    """Of 20 labelled tokens, of which ours keeps 5. torch does not look into our op, so its parts are called here."""
    theirs = pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    hidden, weight, labels, one = torch.randn(20, 8), torch.randn(50, 8), torch.arange(20), 2 * 8 * 50
    found: list[Any] = []
    assert operations(lambda: found.extend(head_forward(HeadProblem(hidden, weight, labels)))) == 20 * one
    for frozen in (True, False):
        wanted, incoming = Wanted(True, not frozen, False), Incoming((labels < 5).float(), None, *found[1:4])
        ours = partial(head_backward, HeadProblem(hidden, weight, labels), incoming, wanted)
        assert operations(ours) == 5 * one * (3 - frozen)
        of_trl = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
        logprob = theirs.apply(*of_trl, None, labels, 1.0, 64)[0]
        assert operations(logprob.sum().backward) == 20 * one * (3 - frozen)


def test_an_update_computes_these_rows_and_columns() -> None:
    """By hand, with one weight: of four rollouts in two micro-batches, two tokens of the first are kept."""
    batch = "--prompts 1 --group-size 4 --micro-batch 2 --rollouts-kept 2 --token-share 0.2 --prompt-length 1"
    options = savings.options_of([*LLAMA, *BATCH, *batch.split()])
    options.model, entropy = Model(1, 0, 0, 1, 1), torch.zeros(4, 4)
    entropy[0, :2] = 1
    advantages, order = torch.tensor([[1.0, -1, 0, 0]]), torch.tensor([0, 2, 3, 1])
    drawn = torch.tensor([3, 2, 4, 1]), advantages, entropy, entropy >= 0, order, torch.zeros(4)
    for choice, largest, padding, *parts in (
        (TRL, 10, 12, 40, 40, 80, 20, 60, 0),
        (NOTHING, 10, 4, 32, 32, 64, 20, 60, 0),  # two rows of 5 and 4 columns, two of 3 and 2
        ("rollouts", 4, 0, 14, 14, 28, 10, 30, 0),
        ("tokens in the update", 10, 8, 36, 36, 72, 20, 18, 0),  # one of four tokens, and two of six
        ("random prefixes", 4, 0, 16, 16, 32, 8, 24, 0),  # the first token of each
        ("tokens known before", 3, 4, 10, 10, 20, 4, 12, 30),  # two rows of 5 columns; then 3, and 2 without a token
    ):
        found, positions = update(options, drawn, choice)
        assert [positions, *(found[part] for part in ("padding", *PARTS))] == [largest, padding, *parts], choice
    options.passes, options.lora, options.no_checkpointing = "vllm", True, True
    assert [update(options, drawn, "rollouts")[0][part] for part in PARTS] == [14, 0, 14, 10, 20, 52]


PASSES: dict[str, dict[str, Any]] = {
    "none": {}, "old": {"num_iterations": 2},
    "vllm": {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "passes"),
    [
        (TRL, "old"), (NOTHING, "old"), ("rollouts", "none"), ("tokens known before", "none"),
        ("off-policy tokens", "vllm"), ("rollouts + tokens in the update", "vllm"),
        ("rollouts + random prefixes", "old"),
    ],
)  # fmt: skip
def test_the_trainer_forwards_what_is_counted(choice: str, passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 rollouts in four micro-batches; the first eight have no advantage. A token's id says in which row it is."""
    pytest.importorskip("trl")
    from batches import forwards, looked_at
    from tiny_trl import D3STrainer, PlainTrainer, none_for_even_prompts, trainer

    (chooses, tokens), options = CHOICES[choice], {**PASSES[passes], "reward_funcs": none_for_even_prompts}
    if choice != TRL:
        options |= {"rollouts": 0.5 if chooses else 1.0, "tokens": 0.25 if tokens in ("in update", "known") else 1.0}
        source = {"in update": "update", "known": "rollout"}.get(tokens, "auto")
        options |= {"entropy_from": source, "keep_all": choice == NOTHING}
    if tokens == "prefix":
        options |= {"token_rule": "prefix", "tokens": 0.5}
    kind = PlainTrainer if choice == TRL else D3STrainer
    made: Any = trainer(kind, per_device_train_batch_size=4, gradient_accumulation_steps=4, **options)
    lengths = torch.randint(2, 6, (16,)).index_fill(0, torch.randperm(16)[:3], 12)
    ids = [[2 + row] * length for row, length in enumerate(lengths.tolist())]
    drawn = {"prompt_ids": [[2, 3]] * 16, "completion_ids": ids, "logprobs": [[-4.0] * len(row) for row in ids]}
    made.rollout_func, made.use_vllm, made._last_loaded_step = lambda *_: drawn, passes == "vllm", 0
    seen: list[dict[str, torch.Tensor]] = [{"advantages": torch.zeros(16)}]
    if choice != TRL:
        looked_at(monkeypatch, made, "_keep_rollouts", lambda _, batch, *more: seen.append(batch))
        looked_at(monkeypatch, made, "_choose_tokens_of_batch", lambda _, batch, *more: seen.append(batch))
    with forwards(made.model) as calls:
        for step in range(4):
            made._step = step
            inputs = made._prepare_inputs([{"prompt": "w4"}] * 8 + [{"prompt": "w5"}] * 8)
            made.compute_loss(made.model, inputs)

    advantages = seen[:2][-1]["advantages"].view(2, 8)
    entropy, on_policy = torch.zeros(16, 12), torch.arange(12) < lengths[:, None]
    chosen = seen[-1]
    if choice != TRL:
        place = chosen["completion_ids"][:, :1] - 2, torch.arange(chosen["completion_ids"].shape[1])
        on_policy[place] = chosen["completion_mask"].bool() & (chosen.get("importance_sampling_ratio", 1) != 0)
        entropy[place] = chosen.get("d3s_entropy", torch.zeros(()))
    shuffled = torch.cat([part["completion_ids"][:, 0] for part in made._buffered_inputs]) - 2
    order = torch.zeros(16, dtype=torch.int64).index_copy(0, shuffled, torch.arange(len(shuffled)))
    batch = f"--prompts 2 --micro-batch 4 --token-share 0.25 --prompt-length 2 --passes {passes}"
    counting = savings.options_of([*LLAMA, *BATCH, *batch.split()])
    counting.model = model = Model(1, 0, 1, 1, 1)
    cuts = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(42 + 499_979))
    drawn_batch = lengths, advantages, entropy, on_policy, order, cuts
    counts, largest = update(counting, drawn_batch, choice)

    sizes = [(has_grad, *call["input_ids"].shape, 2 * int((call["labels"] != -100).sum())) for has_grad, call in calls]
    trained, before = ([size for has_grad, *size in sizes if has_grad == wanted] for wanted in (True, False))
    assert (counts["body forward"], counts["head forward"], counts["passes without gradient"], largest) == (
        sum(model.body(rows, columns)[0] for rows, columns, _ in trained),
        sum(of_head for *_, of_head in trained),
        sum(model.body(rows, columns)[0] + of_head for rows, columns, of_head in before),
        max(rows * columns for rows, columns, _ in trained),
    )
    assert choice != NOTHING or len({rows for rows, *_ in trained}) > 1
    assert (on_policy.sum() < lengths.sum()) == (passes == "vllm")
    if choice != TRL:
        logged = {name: [float(value) for value in values] for name, values in made._metrics["train"].items()}
        counting.model = Model(1, 0, 0, 1, 1)
        counts, _ = update(counting, drawn_batch, choice)
        assert counts["head backward"] == 6 * sum(logged["d3s/tokens_kept"])
        assert logged["d3s/largest_micro_batch"] == [largest]
        assert logged["d3s/padding"] == pytest.approx([counts["padding"] / counts["body forward"]])


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert commands.main(["savings", *arguments]) == 0
    return capsys.readouterr().out


def test_shares_sum_up_and_what_keeps_all_saves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    batch = [*LLAMA, *BATCH, "--json", "--prompts=2", "--micro-batch=4", "--off-policy=0.2", "--generation-share=0.5"]
    choices = json.loads(printed(capsys, *batch, "--lengths", "20,64"), parse_constant=pytest.fail)["choices"]
    for row in choices.values():
        assert sum(row["shares"].values()) == pytest.approx(row["update"])
        assert row["step"] == pytest.approx(0.5 + 0.5 * row["update"])
    assert choices[TRL]["update"] == 1 > choices[NOTHING]["update"] > choices["off-policy tokens"]["update"]
    assert choices[TRL]["largest_micro_batch"] > choices[NOTHING]["largest_micro_batch"]
    all_kept = ["--rollouts-kept", "1", "--token-share", "1", "--off-policy", "0", "--passes", "old"]
    kept = json.loads(printed(capsys, *batch, *all_kept))["choices"]
    assert {row["update"] for choice, row in kept.items() if "prefixes" not in choice} == {1}
    assert kept["random prefixes"]["update"] == kept["rollouts + random prefixes"]["update"] < 1


def test_the_text_and_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    (tmp_path / "lengths").write_text('20\n{"length": 30}\n')
    text = printed(capsys, str(tmp_path), *BATCH, "--prompts=2", "--lengths", str(tmp_path / "lengths"))
    assert all(said in text for said in ("Pays most: rollouts", "--group-size 8", savings.NOTES))
    assert doctest.testmod(savings) == (0, 4)


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    command, table = re.findall(r"```\n(.*?)```", page.partition("shapes of Qwen2.5-0.5B:")[2], re.DOTALL)[:2]
    lines = printed(capsys, *command.replace("\\", "").split()[4:]).splitlines()
    assert [line.rstrip() for line in lines[: table.count("\n")]] == table.splitlines()


def test_lengths_and_entropies_are_drawn_from_what_they_should_be() -> None:
    draw, draws = lengths_of("400,1024"), Random(0)
    lengths = [draw(draws) for _ in range(20000)]
    assert (max(lengths), sum(lengths) / 20000) == (1024, pytest.approx(400, rel=0.02))
    groups = json.loads((Path(__file__).parents[1] / "benchmarks" / "recorded.json").read_text())["groups"]
    entropies = torch.tensor([level for group in groups for answer in group["answers"] for level in answer["entropy"]])
    assert (entropies.double() / 100).quantile(torch.linspace(0, 1, 21).double()).tolist() == pytest.approx(
        ENTROPIES, abs=0.01
    )


def test_errors_name_the_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, lines = tmp_path / "model.json", tmp_path / "lengths"
    lines.write_text("12\n1.5\n")
    hybrid = {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}
    for config, arguments, said in (
        ({"model_type": "qwen3_next"}, [], "model_type: got 'qwen3_next'; takes gemma, gemma2, "),
        ({"text_config": {"model_type": "qwen2_vl_text"}}, [], "model_type: got 'qwen2_vl_text'; takes gemma, "),
        (hybrid, [], "layer_types: got 'linear_attention'; takes full_attention and sliding_attention; if the"),
        (SIZES | {"model_type": "gemma"}, [], "--head-dim: got None for head_dim; takes a whole number of at least 1"),
        ([], [], "config: got {}; takes a config.json, its folder, or else a model's numbers"),
        (None, LLAMA[:1], "--hidden: got None for hidden_size; takes a whole number of at least 1"),
        (None, [*LLAMA, "--lengths", str(lines)], "line 2: got 1.5; takes a whole number of at least 1"),
        (None, [*LLAMA, "--lengths", "9,8"], "--lengths: got '9,8'; takes a file, or a mean and a maximum above it"),
        (None, [*LLAMA, "--token-share", "two"], "--token-share: got 'two'; takes a number in (0, 1]"),
        (None, [*LLAMA, "--passes=old", "--off-policy=0.2"], "--passes: got 'old' with --off-policy 0.2; takes vllm"),
        (None, [*LLAMA, "--micro-batch", "7"], "--micro-batch: got 7; takes a divisor of 64, all rollouts"),
    ):
        file.write_text(json.dumps(config))
        with pytest.raises(SystemExit) as end:
            commands.main(["savings", *([] if config is None else [str(file)]), *BATCH, *arguments])
        assert end.value.code == 2
        assert said.format(file) in capsys.readouterr().err
