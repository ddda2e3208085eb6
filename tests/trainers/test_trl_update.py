"""What an update costs beside its arithmetic: no waiting for the device, and one pass over the head's gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("trl")
from accelerate import DistributedType
from batches import generation_batch, micro_batch, texts, with_sets
from tiny_trl import model, trainer

from d3s_kernels._lm_head import problem
from d3s_kernels._lm_head.forward import HostNumber
from d3s_kernels._lm_head.op import AtBackward
from d3s_kernels.integrations.trl.head import OurHead
from d3s_kernels.support import sampling_mask

OURS = str(Path(sys.modules[OurHead.__module__].__file__ or "").parents[2])  # the package
TORCH = str(Path(torch.__file__).parent)


class Waits(TorchDispatchMode):
    """The lines of this package that would wait for a GPU: they read a value, or need the number of marked rows."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "repeat_interleave")

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if name in self.READS or by_mask:
            self._add()
        return function(*args, **(kwargs or {}))

    def _add(self) -> None:
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(TORCH):
            assert frame.f_back is not None
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(OURS):
            self.lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    found = Waits()

    def tolist(tensor: Tensor) -> Any:
        found._add()
        return read(tensor)

    read = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", tolist)
    for module in (problem, sampling_mask):  # the values of tensors on a GPU are not checked
        monkeypatch.setattr(module, "is_known", lambda tensor: False)
    # On a GPU the number was copied while TRL's loss waited for its own metrics.
    monkeypatch.setattr(HostNumber, "value", lambda number: read(number._copy))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {}, {"loss_denominator": "kept"}, {"token_scope": "sequence"}, {"importance_sampling_level": "entropy_group"},
        {"sampling_mask": True, "top_k": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_micro_batch_waits_for_nothing_of_ours(
    options: dict[str, Any], waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, batch = trainer(**options), micro_batch(3)
    if made.args.sampling_mask:
        batch = with_sets(batch)
        # Only where tensors are on a CPU does the conversion of the sets read how many tokens they have.
        monkeypatch.setattr(Tensor, "is_cpu", False)
    with waits:
        made.compute_loss(made.model, batch).backward()
    assert waits.lines == []
    assert made.model.get_output_embeddings().weight.grad.any()


def test_where_all_rollouts_are_kept_their_choice_waits_for_nothing(waits: Waits) -> None:
    made, batch = trainer(rollouts=1.0), generation_batch(1)
    with waits:
        kept = made._keep_rollouts(dict(batch))
    assert waits.lines == []
    with waits:
        trainer()._keep_rollouts(dict(batch))
    assert waits.lines, "a choice waits for the rows to send"
    assert list(kept) == list(batch)
    assert all(torch.equal(kept[name], value) for name, value in batch.items())


def test_an_evaluation_between_two_logs_leaves_the_numbers_of_training() -> None:
    made, batch = trainer(), micro_batch(1)
    made.compute_loss(made.model, batch)
    made.model.eval()
    made.log({"eval_loss": 0.5})
    made.model.train()
    made.log(logs := {"loss": 0.5})
    assert logs["d3s/tokens_kept"] == -(-int(batch["completion_mask"].sum()) // 4)  # a quarter is kept


def test_scores_beside_the_loss_are_bounded_by_no_other_micro_batch() -> None:
    """A subclass may score once more, with a gradient: after the loss, or other tokens within it."""
    made, batch = trainer(), micro_batch(1)
    loss = made.compute_loss(made.model, batch)
    logprob, *_ = made._get_per_token_logps_and_entropies(made.model, *texts(batch).values(), 10, compute_entropy=True)
    (loss + (logprob * batch["completion_mask"]).sum()).backward()
    assert made.model.get_output_embeddings().weight.grad.isfinite().all()


# ---- the head adds its gradient to that of earlier micro-batches -----------------------------------------------------


def accumulated(made: Any, before_second: Callable[[], Any] = lambda: None) -> tuple[Tensor, bool]:
    """The head's gradient after two micro-batches, and whether the head of the second one added to it itself."""
    weight = made.model.get_output_embeddings().weight
    made.compute_loss(made.model, micro_batch(1)).backward()
    before_second()
    seen: list[bool] = []
    ask = OurHead._at_backward

    def at_backward(head: OurHead, of: Tensor, dtype: torch.dtype) -> AtBackward:
        asked = ask(head, of, dtype)

        def into() -> Tensor | None:
            found = asked.weight_grad_into()
            seen.append(found is not None and found is weight.grad)
            return found

        return asked._replace(weight_grad_into=into)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OurHead, "_at_backward", at_backward)
        made.compute_loss(made.model, micro_batch(2)).backward()
    assert len(seen) == 1
    return weight.grad.clone(), seen[0]


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_adds_to_the_gradient(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = (trainer(policy=model(tie_word_embeddings=tied)) for _ in range(2))
    found, added = accumulated(ours)
    assert added
    monkeypatch.setattr(type(plain.accelerator), "distributed_type", DistributedType.MULTI_CPU)
    expected, added = accumulated(plain)
    assert not added
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_where_somebody_sees_the_gradient_autograd_adds_it() -> None:
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        made, seen = trainer(), []
        getattr(made.model.get_output_embeddings().weight, hook)(seen.append)
        assert not accumulated(made)[1]
        assert len(seen) == 2
    scaled = trainer()
    scaled.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert not accumulated(scaled)[1]
    transposed_first = trainer()
    weight = transposed_first.model.get_output_embeddings().weight

    def transposed() -> None:
        weight.grad = weight.grad.T.contiguous().T

    assert not accumulated(transposed_first, transposed)[1]


def test_a_gradient_of_another_half_precision_is_left_to_autograd() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        made = trainer(policy=model().bfloat16())
        with torch.autocast("cpu", dtype):
            assert accumulated(made)[1] == (dtype == torch.bfloat16), dtype
