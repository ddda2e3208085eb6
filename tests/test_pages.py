"""The pages: links lead somewhere, tables are well formed, and lists, numbers and claims about the code are true."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_identical
from ranks import Ranks, world

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import pictures

import d3s_kernels as d3s
from benchmarks import page as results
from benchmarks.withdrawn import FULL_UPDATE

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks").rglob("*.md"))
AT_THE_TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*AT_THE_TOP, *sorted((ROOT / "docs").glob("*.md")), *RESULTS]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def prose(page: Path) -> str:
    """The page without its blocks of code, in which nothing is a link or a heading."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere_and_tables_have_at_most_five_columns(page: Path) -> None:
    text = prose(page)
    assert all(line.count("|") <= 6 for line in re.findall(r"^\|(?: *:?-+:? *\|)+$", text, re.MULTILINE))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_pictures_are_what_the_library_chooses_and_the_results_say() -> None:
    assert pictures.outdated() == [], "run python tools/pictures.py"


@pytest.mark.parametrize("path", sorted(results.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_page_of_a_machine_is_what_its_results_say(path: Path) -> None:
    assert path.with_suffix(".md").read_text(encoding="utf-8") == results.page_of(path), "run python -m benchmarks.page"


@pytest.mark.parametrize("run", results.newest(), ids=results.name_of)
def test_the_page_on_performance_has_the_newest_runs(run: results.Run) -> None:
    row = rf"\| \[{re.escape(results.heading(run))}\]\(\S+\) \| {re.escape(results.outcomes(run))} \|"
    assert re.search(row, (ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))


def short(gpu: results.Run) -> str:
    """A GPU's name without its maker and its memory."""
    return results.name_of(gpu).removeprefix("NVIDIA ").partition(" 80GB")[0]


def sentences_on_the_front_page(gpus: list[dict[str, Any]], cpu: dict[str, Any]) -> list[str]:
    """What README.md says of the newest runs, by the times that they are judged by; most of the newest GPU's."""

    def ours(run: dict[str, Any], contest: str, contender: str = "d3s_kernels") -> float:
        return run["contests"][contest][contender]["fastest_seconds" if run is cpu else "median_seconds"]

    def times(contest: str, peer: str) -> str:
        return f"{gpu['contests'][contest][peer]['times_ours']['value']:.2g} times as fast as"

    def update(run: dict[str, Any], between: str) -> str:
        return between.join(f"{1e3 * ours(run, FULL_UPDATE, name):.3g}" for name in ("d3s_kernels", "GRPOTrainer"))

    gpu, *others = gpus
    forward, mask, triton = "logprob_entropy forward", "topk_mask of a batch, 10%", "TRL's Triton kernel"
    sets = "linear_logprob_entropy forward + backward, with a sampling mask, added to a gradient"
    return [
        f"What you gain on an [{short(gpu)}]",
        f"On the {short(gpu)}, a top-10 % mask",
        f"Entropies of 8,192 rows of 151,936 bfloat16 logits take {1e6 * ours(gpu, forward):.3g} us",
        f"{times(forward, triton)} {triton}",
        f"512 x 8,192 scores takes {1e6 * ours(gpu, mask):.3g} us",
        f"{times(mask, 'topk + scatter')} `topk` and `scatter`",
        f"of 4,096 tokens take {1e3 * ours(gpu, sets):.2g} ms instead of {1e3 * ours(gpu, sets, 'all tokens'):.3g} ms",
        "of 32 full completions",
        update(gpu, " ms instead of ") + " ms",
        *(f"{short(run)}: {update(run, ' instead of ')}" for run in others),
        f"{1e3 * ours(cpu, forward):.3g} ms for 1,024 rows",
    ]


def test_the_front_page_has_measured_numbers() -> None:
    """Of the newest run of each GPU, and of a CPU. A failure prints what README.md should say."""
    gpus, cpus = ([run for run in results.newest() if run["device"] == device] for device in ("cuda", "cpu"))
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    missing = [sentence for sentence in sentences_on_the_front_page(gpus, cpus[0]) if sentence not in page]
    assert not missing, "README.md should say: " + "; ".join(missing)


def test_the_first_code_prints_what_the_front_page_shows() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    code, shown = re.findall(r"```python\n((?:(?!```).)*?)\n((?:# [^\n]*\n)+)```", page, re.DOTALL)[0]
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue() == re.sub("^# ", "", shown, flags=re.MULTILINE)


def test_every_environment_variable_is_listed() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    files = [*ROOT.glob("d3s_kernels/**/*.py"), *ROOT.glob("csrc/**/*.*"), *ROOT.glob("tests/conftest.py")]
    read = {
        name for file in files for name in re.findall(r"D3S_KERNELS_[A-Z]+|D3S_TEST_[A-Z]+", file.read_text("utf-8"))
    }
    assert len(read) > 4
    assert not sorted(name for name in read - {"D3S_TEST_CACHES"} if f"`{name}`" not in page)


def names_after_running(page: str, **names: Any) -> dict[str, Any]:
    """Runs the code of a page, which may use these names, and returns the names that it leaves."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, f"docs/{page}", "exec"), names)
    return names


def test_the_code_of_the_page_on_sampling_masks_runs() -> None:
    found = names_after_running("sampling-masks.md")
    everything = torch.softmax(found["logits"] / 0.8, -1)
    kept = everything.where(found["drawable"] > -torch.inf, 0).sum(-1)
    assert (kept < 1).all()
    torch.testing.assert_close(found["bias"], kept.log().mean())
    assert f"{found['bias']:.2f}" == "-0.10"
    assert found["rest"] < 1e-5


def test_the_code_of_the_page_on_debugging_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = names_after_running("debugging.md")
    assert "<mark" in (tmp_path / "selection.html").read_text(encoding="utf-8")
    assert (int(names["kept"].count), float(names["kept"].threshold)) == (0, float("inf"))


# ---- scaling.md ------------------------------------------------------------------------------------------------------


def scaled(ranks: Ranks | None, groups: list[int]) -> tuple[Any, Any, Any]:
    """What the page's code chooses, and the loss, on one of the ranks or in one process that has everything."""
    generator = torch.Generator().manual_seed(sum(groups))
    shape = (sum(groups), 4, 30)
    values = {
        "advantages": torch.randn(shape[:2], generator=generator),
        "entropy": torch.rand(shape, generator=generator),
        "mask": torch.rand(shape, generator=generator) < 0.8,
    }
    if ranks is not None:
        values = {name: value.split(groups)[ranks.rank] for name, value in values.items()}
    others = {"torch": torch, "d3s": d3s, "per_token_loss": values["entropy"], "keep": 2, "budget": d3s.Budget(2, 0.2)}
    found = names_after_running("scaling.md", **values, **others, group=None if ranks is None else ranks.group)
    return found["kept"], found["chosen"].mask, found["loss"]


def test_ranks_that_differ_choose_what_one_process_would() -> None:
    groups = [3, 0, 5]
    kept, tokens, loss = scaled(None, groups)
    of_ranks = list(zip(*world(3).run(scaled, groups), strict=True))
    assert_identical(torch.cat(of_ranks[0]), kept)
    assert int(kept.sum()) == 2 * sum(groups)
    assert_identical(torch.cat(of_ranks[1]), tokens)
    torch.testing.assert_close(sum(of_ranks[2]), loss)


# ---- SECURITY.md -----------------------------------------------------------------------------------------------------

# What runs the code that it reads, or sends or receives pickles; `model.eval()` does neither.
RUNS_CODE = re.compile(
    r"(?:import|from) (?:c?[pP]ickle|dill|cloudpickle|marshal|shelve|socket|http|urllib|requests)\b"
    r"|(?<![.\w])(?:eval|exec)\(|\btorch\.load\(|trust_remote_code"
    r"|\b(?:all_gather_object|broadcast_object_list|gather_object|scatter_object_list|(?:send|recv)_object_list)\("
)


def test_nothing_is_unpickled_but_what_the_page_names() -> None:
    files = list((ROOT / "d3s_kernels").rglob("*.py"))
    found = {path.relative_to(ROOT).as_posix(): set(RUNS_CODE.findall(path.read_text("utf-8"))) for path in files}
    assert {name: calls for name, calls in found.items() if calls} == {
        "d3s_kernels/integrations/trl/page.py": {"gather_object("},
        "d3s_kernels/integrations/swift/trainer.py": {"gather_object("},
    }
