"""A rollout worker in a thread of the trainer's process, in the place of TRL's worker and its vLLM server."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_d3s import nearness


class ThreadWorker:
    """Generates in a thread, with transformers. TRL takes it as the rollout worker and as the weight transfer."""

    def __init__(self, folder: str, tokenizer: Any, prompts: list[dict[str, Any]], group: int) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(4 * group)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer
        self.prompts, self.group = prompts, group  # rollouts of a prompt
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
            self._thread.join(timeout=60)  # after a transfer that failed, it waits for the weights for ever

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
                prompt.expand(self.group, -1), do_sample=True, top_k=0, max_new_tokens=6,
                pad_token_id=self.tokenizer.pad_token_id, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        ids = output.sequences[:, prompt.shape[1] :]
        logprob = torch.stack(output.logits, dim=1).log_softmax(-1).gather(-1, ids.unsqueeze(-1))[..., 0]
        ends = ids == self.tokenizer.eos_token_id
        lengths = (ends.cumsum(1) - ends.long() == 0).sum(1).tolist()  # with the first end
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        rewards = np.array(nearness(completions=texts, answer=[row["answer"]] * self.group))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)  # as TRL's worker computes them
        self.generated += self.group
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
