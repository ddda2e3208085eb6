"""D3S in TRL's asynchronous trainer: `D3SAsyncGRPOTrainer` replaces `AsyncGRPOTrainer`.

    pip install --no-build-isolation '.[trl]'
    python examples/async_trl_d3s.py         # a tiny model, made on the spot, on a CPU

The policy learns to add two numbers. This thread trains it; another thread generates with the latest weights that it
was sent. Elsewhere TRL's worker does that with a vLLM server: leave out `rollout_worker` and `weight_transfer`, and
TRL's attention for prefix trees, a kernel for GPUs, stays in place. docs/async.md explains what happens to a sample.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl_d3s import nearness, sums, tiny_model, tiny_tokenizer

from d3s_kernels.integrations.trl import D3SAsyncGRPOConfig, D3SAsyncGRPOTrainer

GROUP = 32  # generations for each prompt


class ThreadWorker:
    """Generates in a thread, with transformers. TRL takes it as the rollout worker and as the weight transfer."""

    def __init__(self, folder: str, tokenizer: Any, prompts: list[dict[str, Any]]) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(4 * GROUP)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer
        self.prompts = prompts
        self.generated, self.waited_s = 0, 0.0  # rollouts, and how long the queue was full
        self._version, self._stopped = 0, threading.Event()
        self._error: Exception | None = None
        self._weights = threading.Lock()  # held while the model generates, or gets new weights
        self._thread = threading.Thread(target=self._run, daemon=True)

    # ---- what TRL calls of a worker ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the thread that generates has ended") from self._error

    # ---- what TRL calls of a weight transfer ------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        self._weights.acquire()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in iterator:
                own[name].copy_(weight)

    def resume(self) -> None:
        self._weights.release()

    def destroy(self) -> None:
        pass

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for group_id, row in enumerate(itertools.cycle(self.prompts)):
                for sample in self.samples(group_id, row):
                    begin = time.perf_counter()
                    while not self._stopped.is_set():
                        try:
                            self.rollout_buffer.put(sample, timeout=0.05)
                            break
                        except queue.Full:
                            continue
                    self.waited_s += time.perf_counter() - begin
                if self._stopped.is_set():
                    return
        except Exception as error:
            self._error = error
            raise

    def samples(self, group_id: int, row: dict[str, Any]) -> list[RolloutSample]:
        """Generates a group. Its log-probabilities are those that the tokens were sampled with."""
        prompt = self.tokenizer(row["prompt"], return_tensors="pt").input_ids
        with self._weights, torch.no_grad():
            version = self._version
            output = self.model.generate(
                prompt.expand(GROUP, -1), do_sample=True, top_k=0, max_new_tokens=6,
                pad_token_id=self.tokenizer.pad_token_id, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        ids = output.sequences[:, prompt.shape[1] :]
        logprob = torch.stack(output.logits, dim=1).log_softmax(-1).gather(-1, ids.unsqueeze(-1))[..., 0]
        ends = ids == self.tokenizer.eos_token_id
        lengths = (ends.cumsum(1) - ends.long() == 0).sum(1).tolist()  # with the first end
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        rewards = np.array(nearness(completions=texts, answer=[row["answer"]] * GROUP))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)  # as TRL's worker computes them
        self.generated += GROUP
        before = prompt.shape[1]
        return [
            RolloutSample(
                prompt=[{"role": "user", "content": row["prompt"]}],
                completion=[{"role": "assistant", "content": text}],
                input_ids=torch.cat([prompt[0], own[:length]]).numpy(),
                completion_mask=np.array([0] * before + [1] * length),
                old_log_probs=np.array([0.0] * before + scores[:length].tolist(), dtype=np.float32),
                advantage=float(advantage),
                model_version=version,
                group_id=group_id,
                metrics={"reward": float(reward), "reward_std": float(rewards.std())},
                enqueued_at=time.time(),
            )
            for text, own, length, scores, reward, advantage in zip(
                texts, ids, lengths, logprob, rewards, advantages, strict=True
            )
        ]


def use_a_cpu() -> None:
    """Replaces the two parts of TRL's trainer that need a GPU."""
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None  # then it logs no MFU
    async_grpo_trainer.register_tree_attention = register_tree_attention


def register_tree_attention() -> None:
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **_: None)


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor, tree_cu_seqlens_k: Tensor, scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """TRL's attention for prefix trees, in plain PyTorch, for a CPU: the tokens of a segment see those of its path."""
    outputs = []
    bounds = (tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist())
    for (begin, end), (first, last) in zip(*map(itertools.pairwise, bounds), strict=True):
        path = tree_kv_index[first:last]
        seen = torch.ones(end - begin, len(path), dtype=torch.bool).tril(len(path) - (end - begin))
        own, keys, values = query[:, :, begin:end], key[:, :, path], value[:, :, path]
        outputs.append(scaled_dot_product_attention(own, keys, values, seen, scale=scaling, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="async-trl-d3s")
    given = parser.parse_args()
    use_a_cpu()
    args = D3SAsyncGRPOConfig(
        given.out,
        # Of 32 rollouts of a prompt, the 8 whose rewards vary most are trained on, with all of their tokens.
        num_generations=GROUP,
        rollouts_start=8,
        rollouts_end=8,
        token_ratio_start=1.0,
        token_ratio_end=1.0,
        window_groups=4,
        # Tokens whose probability has changed too much since they were sampled are left out (IcePop).
        off_policy_rule="token_mask",
        max_staleness=3,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=1,
        token_budget=0,  # micro-batches of 32 samples; by default as many as fit into the server's context
        max_steps=given.steps,
        learning_rate=1e-3,
        logging_steps=max(1, given.steps // 5),
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer()
        tiny_model().save_pretrained(folder)
        worker = ThreadWorker(folder, tokenizer, list(sums().shuffle(seed=0)))
        trainer = D3SAsyncGRPOTrainer(
            model=folder,
            train_dataset=sums(),
            processing_class=tokenizer,
            rollout_worker=worker,
            weight_transfer=worker,
            args=args,
        )
        begin = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begin
    print(f"{'step':>5} {'reward':>7} {'rollouts kept':>14} {'off-policy':>11} {'versions old':>13}")
    for log in trainer.state.log_history:
        if "d3s/reward" in log:
            shares = f"{log['d3s/rollout_share']:14.0%} {log['d3s/off_policy_share']:11.1%}"
            print(f"{log['step']:5} {log['d3s/reward']:7.3f} {shares} {log['sample/staleness_mean']:13.2f}")
    steps, per_step = trainer.state.global_step, args.samples_of_step()
    waited = sum(log.get("perf/rollout_wait_s", 0) * args.logging_steps for log in trainer.state.log_history)
    print(f"generated {worker.generated} rollouts, trained on {steps * per_step} of them in {steps} steps")
    print(f"of {seconds:.1f} s, the trainer waited {waited:.1f} s for rollouts, the generator {worker.waited_s:.1f} s")


if __name__ == "__main__":
    main()
