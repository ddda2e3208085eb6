"""Formulas for the traffic of each op across ranks: its collectives, and the bytes that a rank puts into each
collective.

tests/test_traffic.py compares the formulas with the calls of torch.distributed; docs/scaling.md uses them.

    python -m benchmarks.traffic    the tables of docs/scaling.md
"""

from __future__ import annotations

from typing import NamedTuple

from d3s_kernels.distributed.tokens import digits_for, gathers_counts

Sent = list[tuple[str, int]]  # for each collective: its name in c10d, and the bytes that a rank puts in

REDUCE, GATHER, EXCHANGE = "allreduce", "allgather_base", "alltoall_base"


# ---- the formulas ----------------------------------------------------------------------------------------------------


def topk_mask(ranks: int, segments: int = 1, *, global_offsets: bool = False) -> Sent:
    """With global offsets, the first collective has each rank's number of scores. The counts of digits follow. The last
    collective has the counts of ties, unless the counts of digits were gathered on all ranks.
    """
    gathers = gathers_counts(segments, ranks)
    counts: Sent = [(GATHER if gathers else REDUCE, 8 * segments * 2**bits) for _, bits in digits_for(segments)]
    return [(GATHER, 8)] * global_offsets + counts + [(GATHER, 8 * segments)] * (not gathers)


def select_tokens(ranks: int, segments: int = 1, *, by_offsets: bool = False, drop_zeros: bool = False) -> Sent:
    """If the offsets describe sequences that lie on several ranks, the first collective tells, for each rank, whether
    its advantages can be per token, and whether they can be per sequence. With ``drop_zeros``, there is one more
    collective at the end.
    """
    return [(GATHER, 24)] * by_offsets + topk_mask(ranks, segments) + [(GATHER, 16 * segments)] * drop_zeros


def rollouts(largest: int, *, bounded: bool, width: int = 4) -> Sent:
    """The collectives of max_variance_select and select_rollouts. `largest` is the largest number of values on a rank,
    or the caller's bound on this number. For group_advantages, the values have 8 bytes.
    """
    return [(GATHER, 8)] * (not bounded) + [(GATHER, 8 + width * largest)]


def plan_rows() -> Sent:
    return [(GATHER, 8)]


def exchange_rows(moved: int, row_bytes: int) -> Sent:
    """The collective for a rank that sends `moved` rows. If no rank has to send a row, there is no collective."""
    return [(EXCHANGE, moved * row_bytes)]


def vocab_parallel(rows: int) -> Sent:
    """The collective of the forward, with logits or with the LM head. With logits, the backward sends nothing."""
    return [(GATHER, 16 * rows)]


def vocab_parallel_head_backward(rows: int, kept: int, hidden: int) -> Sent:
    """The first collective tells which rows have a gradient; the second has the gradients of these rows."""
    return [(REDUCE, rows), (REDUCE, 4 * kept * hidden)]


# ---- the time on a network -------------------------------------------------------------------------------------------


class Network(NamedTuple):
    """Assumed properties of a network, not measured."""

    latency: float  # seconds for a collective of a few kilobytes
    bandwidth: float  # bytes per second into a rank

    def seconds(self, sent: Sent, ranks: int) -> float:
        return sum(self.latency + received(round_, ranks) / self.bandwidth for round_ in sent)


BETWEEN_NODES = Network(60e-6, 25e9)
WITHIN_A_NODE = Network(20e-6, 200e9)


def received(round_: tuple[str, int], ranks: int) -> float:
    """Bytes that a rank receives, with ring algorithms."""
    kind, own = round_
    if kind == REDUCE:
        return 2 * own * (ranks - 1) / ranks
    return own * (ranks - 1) if kind == GATHER else own


class Line(NamedTuple):
    """A part of a step: its ranks and network, what this library sends for it, and what trainers send without the
    library.
    """

    what: str
    ranks: int
    network: Network
    sent: Sent
    otherwise: Sent  # what trainers send: scores, rows, maxima, sums of exponentials, all rows' gradients in bf16


class Step(NamedTuple):
    """A step of Qwen2.5-7B with four-way tensor parallelism within nodes: four ranks share the same tokens."""

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
        """Tokens of the kept rollouts on a rank."""
        return int(self.prompts * self.rollouts * self.keep) // self.data_parallel * self.length

    def lines(self) -> list[Line]:
        own = self.prompts * self.rollouts // self.data_parallel
        data, tensor = (self.data_parallel, BETWEEN_NODES), (self.tensor_parallel, WITHIN_A_NODE)
        moved = round(own * self.keep * 0.125)  # the share of rows that moves if rewards are 0 or 1 (equal_rows.py)
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
    """Two tables in Markdown: what is sent, and the time it takes with and without this library."""
    sent_rows = ["| | ranks | rounds | a rank puts in | it receives |", "| --- | --- | --- | --- | --- |"]
    time_rows = ["| | time | without these ops, it receives | time without them |", "| --- | --- | --- | --- |"]
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
