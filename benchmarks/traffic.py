"""What each op sends across ranks, by formula: rounds, and bytes that a rank gives to each.

tests/test_traffic.py holds the formulas against what torch.distributed is asked for; docs/scaling.md works with them.

    python -m benchmarks.traffic    the tables of docs/scaling.md
"""

from __future__ import annotations

from typing import NamedTuple

from d3s_kernels._across_ranks.topk_mask import digits_for, gathers_counts

Sent = list[tuple[str, int]]  # of each round: the collective, as c10d calls it, and the bytes of what a rank puts in

REDUCE, GATHER, EXCHANGE = "allreduce", "allgather_base", "alltoall_base"


# ---- the formulas ----------------------------------------------------------------------------------------------------


def topk_mask(ranks: int, segments: int = 1, *, global_offsets: bool = False) -> Sent:
    """With global offsets first how many scores a rank has; counts of digits; of ties, unless all have all counts."""
    gathers = gathers_counts(segments, ranks)
    counts: Sent = [(GATHER if gathers else REDUCE, 8 * segments * 2**bits) for _, bits in digits_for(segments)]
    return [(GATHER, 8)] * global_offsets + counts + [(GATHER, 8 * segments)] * (not gathers)


def select_tokens(ranks: int, segments: int = 1, *, by_offsets: bool = False, drop_zeros: bool = False) -> Sent:
    """By offsets of sequences that are cut, first what each rank's advantages may be for; zeros are counted last."""
    return [(GATHER, 24)] * by_offsets + topk_mask(ranks, segments) + [(GATHER, 16 * segments)] * drop_zeros


def rollouts(largest: int, *, bounded: bool) -> Sent:
    """group_advantages, max_variance_select, select_rollouts: `largest` values on a rank, or the bound on them."""
    return [(GATHER, 8)] * (not bounded) + [(GATHER, 8 + 4 * largest)]


def plan_rows() -> Sent:
    return [(GATHER, 8)]


def exchange_rows(moved: int, row_bytes: int) -> Sent:
    """Of a rank that sends so many; nothing is sent where no row moves."""
    return [(EXCHANGE, moved * row_bytes)]


def vocab_parallel(rows: int) -> Sent:
    """Forward, with logits or with the LM head; backward nothing with logits."""
    return [(GATHER, 16 * rows)]


def vocab_parallel_head_backward(rows: int, kept: int, hidden: int) -> Sent:
    """Which rows have a gradient, and theirs."""
    return [(REDUCE, rows), (REDUCE, 4 * kept * hidden)]


# ---- what that is on a network ---------------------------------------------------------------------------------------


class Network(NamedTuple):
    """Assumed, not measured."""

    latency: float  # seconds of a collective of a few kilobytes
    bandwidth: float  # bytes a second into a rank

    def seconds(self, sent: Sent, ranks: int) -> float:
        return sum(self.latency + received(round_, ranks) / self.bandwidth for round_ in sent)


BETWEEN_NODES = Network(60e-6, 25e9)
WITHIN_A_NODE = Network(20e-6, 200e9)


def received(round_: tuple[str, int], ranks: int) -> float:
    """Bytes into a rank, by rings."""
    kind, own = round_
    if kind == REDUCE:
        return 2 * own * (ranks - 1) / ranks
    return own * (ranks - 1) if kind == GATHER else own


class Line(NamedTuple):
    """A part of a step: over how many ranks and what network, what is sent for it, and what is without these ops."""

    what: str
    ranks: int
    network: Network
    sent: Sent
    otherwise: Sent  # scores and rows gathered; maxima, then sums of exponentials added up; all rows' gradient, bf16


class Step(NamedTuple):
    """One of Qwen2.5-7B, by four-way tensor parallelism within nodes: every fourth rank has tokens of its own."""

    gpus: int
    prompts: int = 1024
    rollouts: int = 16  # of a prompt
    length: int = 4096  # tokens of a completion
    tensor_parallel: int = 4
    keep: float = 0.5  # of the rollouts
    ratio: float = 0.10  # of the tokens
    hidden: int = 3584

    @property
    def data_parallel(self) -> int:
        return self.gpus // self.tensor_parallel

    @property
    def tokens(self) -> int:
        """Of the kept rollouts of a rank."""
        return int(self.prompts * self.rollouts * self.keep) // self.data_parallel * self.length

    def lines(self) -> list[Line]:
        own = self.prompts * self.rollouts // self.data_parallel
        data, tensor = (self.data_parallel, BETWEEN_NODES), (self.tensor_parallel, WITHIN_A_NODE)
        moved = round(own * self.keep * 0.125)  # the share with 0-1 rewards, as benchmarks/equal_rows.py has it
        row = 2 * 4 * self.length  # tokens and mask, int32
        two_reductions = [(REDUCE, 4 * self.tokens), (REDUCE, 12 * self.tokens)]
        head = vocab_parallel_head_backward(self.tokens, int(self.tokens * self.ratio), self.hidden)
        return [
            Line("advantages and rollouts", *data, rollouts(own, bounded=True), [(GATHER, 4 * own)]),
            Line("rows evened out", *data, plan_rows() + exchange_rows(moved, row), [(GATHER, moved * row)]),
            Line("entropies", *tensor, vocab_parallel(self.tokens), two_reductions),
            Line("tokens", *data, select_tokens(self.data_parallel), [(GATHER, 4 * self.tokens)]),
            Line("LM head, backward", *tensor, head, [(REDUCE, 2 * self.tokens * self.hidden)]),
        ]


def readable(bytes_: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if bytes_ >= size:
            return f"{bytes_ / size:.3g} {unit}"
    return f"{bytes_:.0f} B"


def table(step: Step) -> str:
    """Two tables: what is sent, and what that takes beside the way without this library."""
    sent_rows = ["| | ranks | rounds | a rank puts in | it receives |", "| --- | --- | --- | --- | --- |"]
    time_rows = ["| | time | otherwise it would receive | in |", "| --- | --- | --- | --- |"]
    for what, ranks, network, sent, otherwise in step.lines():
        put_in = sum(bytes_ for _, bytes_ in sent)
        into, instead = (readable(sum(received(round_, ranks) for round_ in all_)) for all_ in (sent, otherwise))
        time, longer = (f"{1e3 * network.seconds(all_, ranks):.2f} ms" for all_ in (sent, otherwise))
        sent_rows.append(f"| {what} | {ranks} | {len(sent)} | {readable(put_in)} | {into} |")
        time_rows.append(f"| {what} | {time} | {instead} | {longer} |")
    return "\n".join([*sent_rows, "", *time_rows])


if __name__ == "__main__":
    for gpus in (64, 1024):
        step = Step(gpus)
        print(f"\n{gpus} GPUs, {step.tokens:,} tokens of kept rollouts on a rank\n\n{table(step)}")
