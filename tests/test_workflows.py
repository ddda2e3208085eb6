"""The workflows pin what they use, name no host and are permitted little; `make lint-workflows` checks the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
if not WORKFLOWS:  # a source release has no folder that begins with a dot
    pytest.skip("needs .github", allow_module_level=True)

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in WORKFLOWS}
each = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)


@each
def test_actions_are_pinned_by_hash(text: str) -> None:
    for used in re.findall(r"^\s*-? *uses: (.*)$", text, re.MULTILINE):
        if used.startswith("./"):
            assert (ROOT / used).is_file()
        else:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), used


def test_no_file_names_a_host() -> None:
    for file in (path for folder in (".github", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()):
        found = re.findall(r"://|\b[\w-]+\.(?:org|io|com|net|dev)\b", file.read_text(encoding="utf-8"))
        assert not found, f"{file.name}: {found}"


@pytest.mark.parametrize("name", ["test.yml", "wheels.yml"])
def test_every_supported_python_is_tested(name: str) -> None:
    lists = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', lists)
    matrix = re.findall(r"python: \[(.*)\]", TEXTS[name])[0]
    assert [part.strip(' "') for part in matrix.split(",")] == supported


def test_jobs_may_do_no_more_than_they_say() -> None:
    """Nothing is permitted to all jobs of a workflow, and only jobs of a release may write."""
    allowed = {"release.yml": {"contents", "id-token", "attestations", "pages"}, "docs.yml": {"pages", "id-token"}}
    for name, text in TEXTS.items():
        assert re.search(r"^permissions: \{\}$", text, re.MULTILINE), name
        assert "secrets." not in text
        assert set(re.findall(r"^ +([a-z-]+): write", text, re.MULTILINE)) == allowed.get(name, set()), name


TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def called(text: str) -> Iterator[str]:
    """The targets of the Makefile that a workflow calls, also by a matrix."""
    for arguments in re.findall(r"(?<![\w-])make ([^\n]+)", re.sub(r"(^| )#.*$", "", text, flags=re.MULTILINE)):
        words = [word for word in arguments.split() if not word.startswith("-") and "=" not in word]
        if words[0] == "$TARGET":
            (matrix,) = re.findall(r"target: \[(.*)\]", text)
            yield from (part.strip(' "').split()[0] for part in matrix.split(","))
        elif not words[0].startswith("$"):  # the name of a job
            yield words[0]


@each
def test_jobs_call_targets_of_the_makefile(text: str) -> None:
    targets = set(called(text))
    assert targets
    assert targets <= TARGETS
