"""From queries to records: samples blocks of queries together, then scores and writes each query separately."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from .queries import Row
from .records import ProfileFile
from .rewards import score, to_record
from .sampling import Sampler


def profile(given: Namespace, rows: list[Row], reward: Callable[..., Any], file: ProfileFile) -> None:
    """Samples and scores the queries that are not in ``file`` yet."""
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype).to(given.device).eval()
    sampler = Sampler(
        model,
        AutoTokenizer.from_pretrained(given.model),
        temperature=given.temperature,
        max_new_tokens=given.max_new_tokens,
        template=given.chat_template_kwargs,
    )
    with tqdm(total=len(rows), initial=len(file.done), unit="query") as bar:
        for block in _blocks(len(rows), max(1, given.batch_size // given.samples)):
            if file.done.issuperset(block):
                continue
            completions = _completions(sampler, rows, block, given)
            for index in block:
                if index not in file.done:
                    row, ids = rows[index], completions[index]
                    rewards = score(reward, row, sampler.as_rewarded(row["prompt"], ids), ids)
                    file.write(to_record(index, rewards, given.threshold))
                    bar.update()


def _blocks(queries: int, size: int) -> Iterator[range]:
    """The blocks of queries. They do not depend on what is done already: the other queries of a block determine the
    padding of a query, and so the rounding of its logits.
    """
    for start in range(0, queries, size):
        yield range(start, min(start + size, queries))


def _completions(sampler: Sampler, rows: list[Row], block: range, given: Namespace) -> dict[int, list[list[int]]]:
    """All completions of each query of the block, sampled ``batch_size`` at a time."""
    prompts = {index: sampler.prompt_ids(rows[index]["prompt"]) for index in block}
    wanted = [(index, sample) for index in block for sample in range(given.samples)]
    found: dict[int, list[list[int]]] = {index: [] for index in block}
    for start in range(0, len(wanted), given.batch_size):
        batch = wanted[start : start + given.batch_size]
        keys = [f"{given.seed}/{index}/{sample}" for index, sample in batch]
        drawn = sampler.completions([prompts[index] for index, _ in batch], keys)
        for (index, _), ids in zip(batch, drawn, strict=True):
            found[index].append(ids)
    return found
