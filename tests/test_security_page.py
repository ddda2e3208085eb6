"""What SECURITY.md says of the code is true."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Calls that run what they read, or that send or receive pickles.
RUNS_CODE = {
    "eval", "exec", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "socket", "http", "urllib", "requests"}


def found_in(path: Path) -> set[str]:
    """The modules that a file imports and the functions that it calls, of those above."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {(node.module or "").partition(".")[0]} & MODULES
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            is_method = isinstance(node.func, ast.Attribute) and called in ("eval", "exec")  # model.eval()
            names |= {called} & RUNS_CODE if not is_method else set()
            if called == "load" and getattr(getattr(node.func, "value", None), "id", "") == "torch":
                names.add("torch.load")
    return names


def test_nothing_is_unpickled_but_what_the_page_names() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in (ROOT / "d3s_kernels").rglob("*.py")
        if (names := found_in(path))
    }
    assert found == {
        "d3s_kernels/integrations/trl/page.py": {"gather_object"},
        "d3s_kernels/integrations/swift/trainer.py": {"gather_object"},
    }


def test_no_model_brings_its_code() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "d3s_kernels").rglob("*.py")]
    assert not any("trust_remote_code" in text for text in texts)
