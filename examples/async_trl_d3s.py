"""D3S in TRL's asynchronous trainer: `D3SAsyncGRPOTrainer` replaces `AsyncGRPOTrainer`.

    pip install --no-build-isolation '.[trl]'
    python examples/async_trl_d3s.py         # a tiny model, made on the spot, on a CPU

The policy learns to add two numbers. This thread trains it; another thread generates with the latest weights that it
was sent. Elsewhere TRL's worker does that with a vLLM server: leave out `rollout_worker` and `weight_transfer`, and
TRL's attention for prefix trees, a kernel for GPUs, stays in place. docs/async.md explains what happens to a sample.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from _async.on_a_cpu import use_a_cpu
from _async.worker import ThreadWorker
from trl_d3s import sums, tiny_model, tiny_tokenizer

from d3s_kernels.integrations.trl import D3SAsyncGRPOConfig, D3SAsyncGRPOTrainer  # were without D3S

GROUP = 32  # generations for each prompt


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
        worker = ThreadWorker(folder, tokenizer, list(sums().shuffle(seed=0)), GROUP)
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
