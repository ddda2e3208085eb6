"""torch.export: programs of the ops run at sizes they were not exported at, from a file, decomposed, and as an
AOTInductor package."""

import io
from pathlib import Path

import pytest
import torch
from helpers import assert_identical, random_labels, random_logits, require_inductor
from torch import Tensor, nn
from torch.export import Dim

import d3s_kernels as d3s

VOCABULARY, HIDDEN = 50, 16
SIZES = ((1, 1), (2, 9), (6, 3))


class HighEntropy(nn.Module):
    """Entropies from logits, and which tokens a trainer keeps."""

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        logprob, entropy = d3s.logprob_entropy(logits, labels)
        mask = labels != -100
        in_rows = d3s.topk_mask(entropy, 0.2, mask=mask)
        rewards = labels.clamp(min=0)  # whole numbers
        kept = d3s.select_tokens(entropy, d3s.group_advantages(rewards), 0.3, mask=mask)
        same = d3s.groups_without_spread(rewards), d3s.groups_without_spread(entropy)
        return logprob, entropy, in_rows, kept.mask, kept.count, kept.threshold, d3s.compact(kept.mask, 40)[0], *same


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        mask, hidden = labels != -100, torch.tanh(self.layer(hidden))
        return d3s.linear_logprob_entropy(hidden, self.head.weight, labels, mask=mask, max_rows=labels.numel())


def arguments(model: nn.Module, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    labels = random_labels(rows, tokens, vocabulary=VOCABULARY)
    if isinstance(model, Head):
        return torch.randn(rows, tokens, HIDDEN), labels
    return random_logits(rows, tokens, VOCABULARY), labels


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    sizes = {0: Dim("rows", min=1), 1: Dim("tokens", min=1)}
    return torch.export.export(model, arguments(model, 4, 7), dynamic_shapes=(sizes, sizes))


def from_a_file(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("of", [HighEntropy, Head])
def test_an_exported_program(of: type[nn.Module]) -> None:
    model = of()
    program = exported(model)
    for form in (program, from_a_file(program), program.run_decompositions()):
        for rows, tokens in SIZES:
            given = arguments(model, rows, tokens)
            for actual, expected in zip(form.module()(*given), model(*given), strict=True):
                torch.testing.assert_close(actual, expected)


@pytest.mark.slow("that AOTInductor compiles the ops into a package, which runs")
def test_a_package(tmp_path: Path) -> None:
    """Machine code that calls the ops through torch's dispatcher."""
    require_inductor()
    model = HighEntropy()
    path = torch._inductor.aoti_compile_and_package(exported(model), package_path=str(tmp_path / "entropy.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for rows, tokens in SIZES:
        given = arguments(model, rows, tokens)
        for actual, expected in zip(package(*given), model(*given), strict=True):
            assert_identical(actual, expected)
