"""The site: every page and every public name is on it, links lead where they should, and it builds strictly."""

from __future__ import annotations

import ast
import html
import re
import runpy
import subprocess
import sys
from inspect import isfunction
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import get_origin

import pytest

import d3s_kernels
from d3s_kernels import distributed

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import site_pages
from links import with_links
from site_pages import all_menus, all_places, on_site

ROOT = site_pages.ROOT
WITH_SPHINX = Path(sys.prefix, "docs", "bin", "python")  # of `make docs`

CODE_HOST = "https://host.invalid/project"


def test_every_page_is_in_the_navigation_once() -> None:
    menus = (menu for of in all_menus(all_places(), CODE_HOST).values() for menu in of)
    entries = [target for menu in menus for _, target in menu.entries if target != CODE_HOST]
    docs = {f"/{page.stem}" for page in (ROOT / "docs").glob("*.md")} - {"/index"}
    api = {f"/api/{page.stem}" for page in (ROOT / "docs/site/api").glob("*.rst")}
    assert not {*docs, *api, "/pages", "/CONTRIBUTING"} - {*entries}
    assert len(entries) == len(set(entries))


def public_names(module: str) -> list[str]:
    """``__all__``, read from the source: TRL and verl need not be installed."""
    folder = ROOT / module.replace(".", "/")
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    assigned = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    return next(ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "__all__")


@pytest.mark.parametrize(
    "module",
    ["d3s_kernels", "d3s_kernels.distributed", "d3s_kernels.integrations.trl", "d3s_kernels.integrations.verl"],
)
def test_every_public_name_is_described(module: str) -> None:
    pages = "".join(site_pages.with_functions(site_pages.read(file)) for file in all_places() if file.suffix == ".rst")
    described = {*re.findall(r":: (d3s_kernels[\w.]*)$", pages, re.MULTILINE), "d3s_kernels.build_info"}
    # A name that a module imports when it is first used is described where it is defined.
    described |= {re.sub(r"\.(async_\w+|distillation)\b", "", name) for name in described}
    assert not [name for name in public_names(module) if f"{module}.{name}" not in described]


@pytest.mark.parametrize("module", [d3s_kernels, distributed])
def test_types_in_signatures_lead_somewhere(module: ModuleType) -> None:
    """A name for several types or strings has no description that it could lead to; `make docs` has to know it."""
    is_elsewhere = runpy.run_path(str(ROOT / "docs/site/names.py"))["is_elsewhere"]
    for name in public_names(module.__name__):
        if isfunction(function := getattr(module, name)):
            for word in re.findall(r"\w+", " ".join(map(str, function.__annotations__.values()))):
                assert is_elsewhere(word) or get_origin(function.__globals__.get(word)) is None, f"{name}: {word}"


def test_links() -> None:
    for file, target, link in (
        ("docs/index.md", "../README.md", "index.md"),
        ("docs/index.md", "../CONTRIBUTING.md", "CONTRIBUTING.md"),
        ("docs/trl.md", "verl.md#5-sampling-masks", "verl.md#5-sampling-masks"),
        ("docs/trl.md", "#options", "#options"),
        ("docs/gpu.md", "../benchmarks/targets.py", f"{CODE_HOST}/blob/main/benchmarks/targets.py"),
        ("docs/performance.md", "../benchmarks/results", f"{CODE_HOST}/tree/main/benchmarks/results"),
        ("README.md", "docs/methods/rollouts.png", "methods/rollouts.png"),
        ("README.md", "docs/index.md", "pages.md"),
        ("README.md", "experiments/learning/README.md", "experiments/learning/index.md"),
        ("benchmarks/NOTES.md", "../docs/lm-head.md", "../lm-head.md"),
        ("README.md", "https://arxiv.org/abs/2509.22115", "https://arxiv.org/abs/2509.22115"),
    ):
        assert on_site(target, PurePosixPath(file), all_places(), CODE_HOST) == link, target

    with pytest.raises(SystemExit, match=r"README\.md: links to docs/none\.md, which is not there"):
        on_site("docs/none.md", PurePosixPath("README.md"), {}, CODE_HOST)
    text = "[a](x.md) ![b](x.png)\n\n```python\nf[a](x)\n```\n\n[c](y.md)"  # a block of code has no links
    assert with_links(text, str.upper) == "[a](X.MD) ![b](X.PNG)\n\n```python\nf[a](x)\n```\n\n[c](Y.MD)"


@pytest.mark.skipif(not WITH_SPHINX.exists(), reason="needs Sphinx: make docs")
@pytest.mark.slow("that the API pages have no markup left over, and that guides lead to them")
def test_docstrings_are_rendered(tmp_path: Path) -> None:
    collect = [ROOT / "tools" / "site_pages.py", tmp_path / "pages"]
    build = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-c", ROOT / "docs" / "site"]
    for command in (collect, [*build, tmp_path / "pages", site := tmp_path / "site"]):
        done = subprocess.run([WITH_SPHINX, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for page in (site / "api").glob("*.html"):
        text = html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))
        assert not re.findall(r":(?:func|class|meth|mod|data|exc):`|``|=====|^ *(?:Args|Example):$", text, re.MULTILINE)
    tokens = (site / "api" / "tokens.html").read_text(encoding="utf-8")
    assert 'id="d3s_kernels.select_tokens"' in tokens
    assert 'href="api/tokens.html#d3s_kernels.topk_mask"' in (site / "index.html").read_text(encoding="utf-8")
    assert re.search(r"<td><p>&quot;entropy_quantile&quot;</p></td>", tokens)
