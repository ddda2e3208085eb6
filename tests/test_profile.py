"""python -m d3s_kernels.planning.profile: the counts do not depend on when a run was interrupted."""

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_kernels import load_profile, plan_rollouts
from d3s_kernels.planning.profile.__main__ import main
from d3s_kernels.planning.profile.files import ProfileFile, Record, load_queries

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
transformers = pytest.importorskip("transformers")

from d3s_kernels.planning.profile.run import OwnNumbers, Sampler, load_reward, score  # noqa: E402  needs transformers

PAD, EOS, LETTERS = 0, 1, "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = 2 + len(LETTERS)
TEMPLATE = "c{{ messages[0]['content'] }}{{ closing or 'd' }}"
QUERIES = 7

REWARDS = '''
def early_letters(completions, answer, **columns):
    """1 where the letters stand early in the alphabet, by a measure of its own for each query."""
    return [float(sum(map(place, text)) < limit) for text, limit in zip(completions, answer)]


def place(letter):
    return ord(letter) - ord("a")


def of_messages(completions, answer, **columns):
    return early_letters([message["content"] for (message,) in completions], answer, **columns)


async def later(**arguments):
    return early_letters(**arguments)


def sometimes_none(completions, answer, **columns):
    return [None if answer[0] > 90 or not text else place(text[0]) / 26 for text in completions]
'''


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are slower on two threads, which only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {letter: token for token, letter in enumerate(LETTERS, 2)}
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<eos>"}
    tokenizer = transformers.Qwen2Tokenizer(vocabulary, [], **special, chat_template=TEMPLATE)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    torch.manual_seed(1)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)  # far from uniform
    # Settings that a published model brings along, and that a profile of the policy must not use.
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=5.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def command(model_folder: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a profile of seven queries of different lengths."""
    rows = [
        {"prompt": " ".join(f"w{2 + i + j}" for j in range(1 + i % 3)), "answer": 60 + 12 * i} for i in range(QUERIES)
    ]
    lines(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "rewards.py").write_text(REWARDS)

    def arguments(**changed: Any) -> list[str]:
        options = {
            "model": model_folder,
            "dataset": tmp_path / "prompts.jsonl",
            "reward": f"{tmp_path / 'rewards.py'}:early_letters",
            "out": tmp_path / "profile.jsonl",
            "max-new-tokens": 6,
            "batch-size": 16,  # two queries, with one left over
            **changed,
        }
        return [f"--{name}={value}" for name, value in options.items()]

    return arguments


def lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


# ---- the whole command -----------------------------------------------------------------------------------------------


def test_a_profile_and_its_plan(command: Callable[..., list[str]], tmp_path: Path, capsys: Any) -> None:
    assert main(command()) == 0
    found = records(tmp_path / "profile.jsonl")
    assert [record["index"] for record in found] == list(range(QUERIES))
    assert all(record["samples"] == 8 and record["mean_reward"] == record["successes"] / 8 for record in found)
    assert len({record["successes"] for record in found}) > 2  # otherwise this test shows little
    successes, samples = load_profile(tmp_path / "profile.jsonl")
    assert successes.tolist() == [record["successes"] for record in found]
    assert samples.tolist() == [8] * QUERIES
    assert plan_rollouts(successes, samples).phase.shape == (QUERIES,)
    never, always = (successes == 0).sum(), (successes == 8).sum()
    assert f"{QUERIES} queries, {never} never solved, {always} always" in capsys.readouterr().out


@pytest.mark.parametrize("batch", [3, 16, 64])
def test_interrupted_and_resumed(
    command: Callable[..., list[str]], tmp_path: Path, monkeypatch: Any, capsys: Any, batch: int
) -> None:
    """Interrupted after each query, also in the middle of a block, and with the last line half written."""
    assert main(command(**{"batch-size": batch})) == 0
    whole = (tmp_path / "profile.jsonl").read_bytes()
    for after in range(QUERIES):
        out = tmp_path / f"{after}.jsonl"
        again = command(**{"batch-size": batch, "out": out})

        def until(*arguments: Any, out: Path = out, after: int = after) -> list[float]:
            if len(records(out)) == after:
                raise KeyboardInterrupt
            return score(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr("d3s_kernels.planning.profile.run.score", until)
            assert main(again) == 130
        assert f"stopped after {after} of {QUERIES} queries" in capsys.readouterr().err
        part = out.read_bytes()
        assert part == b"".join(whole.splitlines(keepends=True)[: after + 1])
        out.write_bytes(part + b'{"index": 1, "succ')
        assert main(again) == 0
        assert out.read_bytes() == whole


def test_a_finished_profile_is_left_as_it_is(
    command: Callable[..., list[str]], tmp_path: Path, monkeypatch: Any
) -> None:
    assert main(command()) == 0
    whole = (tmp_path / "profile.jsonl").read_bytes()
    monkeypatch.setattr("d3s_kernels.planning.profile.run.score", None)  # no query is scored again
    assert main(command()) == 0
    assert (tmp_path / "profile.jsonl").read_bytes() == whole


def test_another_batch_size_goes_on_with_the_same_file(command: Callable[..., list[str]], tmp_path: Path) -> None:
    assert main(command()) == 0
    whole = (tmp_path / "profile.jsonl").read_text()
    (tmp_path / "profile.jsonl").write_text("".join(whole.splitlines(keepends=True)[:4]))
    assert main(command(**{"batch-size": 5})) == 0
    assert (tmp_path / "profile.jsonl").read_text() == whole  # no two tokens of this model tie


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"samples": 4}, "samples 8; got 4"),
        ({"seed": 1}, "seed 0; got 1"),
        ({"temperature": 0.5}, "temperature"),
        ({"threshold": 0.5}, "threshold"),
        ({"max-new-tokens": 7}, "max_new_tokens"),
        ({"chat-template-kwargs": '{"closing": "e"}'}, "chat_template_kwargs"),
        ({"dtype": "float32"}, "dtype"),
    ],
)
def test_other_settings_are_refused(
    command: Callable[..., list[str]], tmp_path: Path, capsys: Any, changed: dict[str, Any], name: str
) -> None:
    assert main(command()) == 0
    whole = (tmp_path / "profile.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        main(command(**changed))
    assert f"was written with {name}" in capsys.readouterr().err
    assert (tmp_path / "profile.jsonl").read_bytes() == whole


def test_another_dataset_under_the_same_name_is_refused(
    command: Callable[..., list[str]], tmp_path: Path, capsys: Any
) -> None:
    assert main(command()) == 0
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    lines(tmp_path / "prompts.jsonl", [*rows[:-1], {**rows[-1], "answer": 0}])
    with pytest.raises(SystemExit, match="2"):
        main(command())
    assert "was written with digest" in capsys.readouterr().err


def test_seeds_draw_other_completions(command: Callable[..., list[str]], tmp_path: Path) -> None:
    for seed in (0, 1):
        assert main(command(seed=seed, out=tmp_path / f"{seed}.jsonl")) == 0
    assert records(tmp_path / "0.jsonl") != records(tmp_path / "1.jsonl")


def test_messages_go_through_the_chat_template(command: Callable[..., list[str]], tmp_path: Path) -> None:
    """The template turns p into cpd, and the reward function gets messages."""
    text = [{"prompt": f"c{letter}d", "answer": 60} for letter in "pqrs"]
    chat = [{"prompt": [{"role": "user", "content": letter}], "answer": 60} for letter in "pqrs"]
    lines(tmp_path / "text.jsonl", text)
    lines(tmp_path / "chat.jsonl", chat)
    reward = f"{tmp_path / 'rewards.py'}:of_messages"
    assert main(command(dataset=tmp_path / "text.jsonl", out=tmp_path / "t.jsonl")) == 0
    assert main(command(dataset=tmp_path / "chat.jsonl", out=tmp_path / "c.jsonl", reward=reward)) == 0
    assert records(tmp_path / "c.jsonl") == records(tmp_path / "t.jsonl")
    other = {"out": tmp_path / "o.jsonl", "reward": reward, "chat-template-kwargs": '{"closing": "xyz"}'}
    assert main(command(dataset=tmp_path / "chat.jsonl", **other)) == 0
    assert records(tmp_path / "o.jsonl") != records(tmp_path / "t.jsonl")


def test_completions_without_a_reward_are_no_samples(command: Callable[..., list[str]], tmp_path: Path) -> None:
    reward = f"{tmp_path / 'rewards.py'}:sometimes_none"
    assert main(command(reward=reward, threshold=0.5)) == 0
    found = records(tmp_path / "profile.jsonl")
    assert found[-1] == {"index": QUERIES - 1, "successes": 0, "samples": 0, "mean_reward": None}
    assert any(record["samples"] for record in found)
    successes, samples = load_profile(tmp_path / "profile.jsonl")
    with pytest.raises(ValueError, match="samples: got 0 at query"):
        plan_rollouts(successes, samples)
    assert plan_rollouts(successes[samples > 0], samples[samples > 0]).phase.numel() < QUERIES


def test_a_dataset_by_name(command: Callable[..., list[str]], tmp_path: Path) -> None:
    """A folder with a JSONL file is a name that the datasets library can load."""
    pytest.importorskip("datasets")
    folder = tmp_path / "named"
    folder.mkdir()
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    lines(folder / "train.jsonl", [{"question": row["prompt"], "answer": row["answer"]} for row in rows])
    assert main(command()) == 0
    assert main(command(**{"dataset": folder, "prompt-column": "question", "out": tmp_path / "n.jsonl"})) == 0
    assert records(tmp_path / "n.jsonl") == records(tmp_path / "profile.jsonl")


@pytest.mark.slow("that it is found, and its bar seen, as a command; the tests above call what it calls")
def test_as_a_command(command: Callable[..., list[str]], tmp_path: Path) -> None:
    """Runs with a reward module in its working directory that is not installed, and with a progress bar."""
    arguments = [sys.executable, "-m", "d3s_kernels.planning.profile", *command(reward="rewards:later")]
    ran = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"{QUERIES}/{QUERIES}" in ran.stderr
    assert main(command(out=tmp_path / "here.jsonl")) == 0
    assert records(tmp_path / "profile.jsonl") == records(tmp_path / "here.jsonl")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 0}, "samples: got 0; takes at least 1"),
        ({"batch-size": 0}, "batch-size: got 0"),
        ({"max-new-tokens": -1}, "max-new-tokens: got -1"),
        ({"temperature": 0}, "temperature: got 0.0; takes a positive number"),
        ({"threshold": "nan"}, "threshold: got nan"),
        ({"chat-template-kwargs": "[]"}, "chat-template-kwargs: got []; takes a JSON object"),
        ({"prompt-column": "question"}, "prompt-column: got 'question'; takes one of 'prompt', 'answer'"),
        ({"reward": "rewards"}, "reward: got 'rewards'; takes 'module:function' or 'file.py:function'"),
        ({"reward": "no_such_module:f"}, "reward: there is no module no_such_module"),
        ({"reward": "no_such_file.py:f"}, "reward: there is no file no_such_file.py"),
        ({"reward": "math:pi"}, "reward: math has no function pi"),
    ],
)
def test_bad_arguments(
    command: Callable[..., list[str]], tmp_path: Path, capsys: Any, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command(**changed))
    assert message in capsys.readouterr().err
    assert not (tmp_path / "profile.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ('{"prompt": "b"}\nb\n', "has no JSON object in line 2"),
        ('{"prompt": "b"}\n\n{"prompt": ""}\n', "has no prompt in row 1"),
        ('{"prompt": "b"}\n{"answer": 1}\n', "has no prompt in row 1"),
    ],
)
def test_bad_datasets(
    command: Callable[..., list[str]], tmp_path: Path, capsys: Any, content: str, message: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        main(command())
    assert message in capsys.readouterr().err


# ---- the file --------------------------------------------------------------------------------------------------------

SETTINGS = {"queries": 3, "model": "ä", "samples": 8}
RECORDS = [Record(0, 1, 8, 0.125), Record(1, 0, 0, None), Record(2, 7, 8, 0.1 + 0.2)]


def write(path: Path, wanted: list[Record] = RECORDS, settings: dict[str, Any] = SETTINGS) -> set[int]:
    with ProfileFile(path, settings) as file:
        before = set(file.done)
        for record in wanted:
            if record.index not in file.done:
                file.write(record)
    return before


def test_the_prompt_takes_the_place_of_a_column_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    path.write_text(json.dumps({"question": "q", "prompt": "p", "answer": 1}))
    assert load_queries(str(path), None, "train", "question") == [{"prompt": "q", "answer": 1}]


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    """Lines do not end at a line separator or a form feed inside a string."""
    rows = [{"prompt": "a\u2028b"}, {"prompt": "c\x85d"}]
    path = tmp_path / "queries.jsonl"
    path.write_text(
        "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8", newline=""
    )
    assert load_queries(str(path), None, "train", "prompt") == rows


def test_a_file_is_repaired_wherever_it_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    assert write(path) == set()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert len(write(path)) == max(whole[:length].count(b"\n") - 1, 0)
        assert path.read_bytes() == whole


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    with ProfileFile(tmp_path / "profile.jsonl", SETTINGS) as file:
        for number, record in enumerate(RECORDS, 2):
            file.write(record)
            assert (tmp_path / "profile.jsonl").read_text().count("\n") == number


def test_an_unfinished_profile_is_not_loaded(tmp_path: Path) -> None:
    write(tmp_path / "profile.jsonl", RECORDS[:2])
    with pytest.raises(ValueError, match="has 2 of 3 queries"):
        load_profile(tmp_path / "profile.jsonl")


def test_the_order_of_lines_does_not_matter(tmp_path: Path) -> None:
    write(tmp_path / "profile.jsonl", RECORDS[::-1])
    successes, samples = load_profile(str(tmp_path / "profile.jsonl"))
    assert (successes.tolist(), samples.tolist()) == ([1, 0, 7], [8, 0, 8])
    assert successes.dtype == samples.dtype == torch.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a letter to a friend", "is no profile"),
        ("a letter\nto a friend\n", "is no profile: its first line has no settings"),
        ('{"settings": {"samples": 8}}\n', "is no profile"),
        ('{"settings": {"queries": 3}}\nmore\n', "is damaged: line 2"),
        ('{"settings": {"queries": 3}}\n{"index": 0}\n', "is damaged: line 2"),
        (
            '{"settings": {"queries": 3}}\n' + 2 * '{"index": 0, "successes": 1, "samples": 8, "mean_reward": 1}\n',
            "is damaged: line 3 has query 0",
        ),
        (
            '{"settings": {"queries": 3}}\n{"index": 3, "successes": 1, "samples": 8, "mean_reward": 1}\n',
            "is damaged: line 2 has query 3",
        ),
    ],
)
def test_what_is_no_profile_is_left_alone(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "profile.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        ProfileFile(path, {"queries": 3})
    assert path.read_text() == content
    with pytest.raises(ValueError, match=message):
        load_profile(path)


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_tokens_are_drawn_from_the_distribution() -> None:
    logits = torch.tensor([2.0, -torch.inf, 0.5, -1.0, -torch.inf])
    temperature, draws = 1.7, 20_000
    rows = [random.Random(f"0/{row}") for row in range(draws)]
    chosen = OwnNumbers(rows, temperature)(torch.zeros(draws, 1), logits.expand(draws, -1)).argmax(-1)
    share = torch.bincount(chosen, minlength=5) / draws
    expected = (logits / temperature).softmax(-1)
    assert torch.all(share[expected == 0] == 0)
    assert torch.all((share - expected).abs() < 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9)


@pytest.mark.parametrize("number", [0.0, math.nextafter(1, 0)])
@given(first=st.integers(0, 99), possible=st.integers(1, 100))
def test_the_extreme_numbers_draw_tokens_that_are_possible(number: float, first: int, possible: int) -> None:
    class Extreme(random.Random):
        def random(self) -> float:
            return number

    logits = torch.randn(1, 200)
    logits[0, :first] = logits[0, first + possible :] = -torch.inf
    left = OwnNumbers([Extreme()], 1.0)(torch.zeros(1, 1), logits)
    assert first <= left.argmax() < first + possible
    assert (left > -torch.inf).sum() == 1


def test_a_completion_does_not_depend_on_its_neighbours(model_folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    sampler = Sampler(model, tokenizer, temperature=1.0, max_new_tokens=12, template={})
    prompts = [sampler.prompt_ids(prompt) for prompt in ("a", "qrstu", "a")]
    together = sampler.completions(prompts, "abc")
    assert together == [sampler.completions([ids], key)[0] for ids, key in zip(prompts, "abc", strict=True)]
    assert together[0] != together[2]  # the same prompt, drawn by another key

    many = sampler.completions([prompts[0]] * 400, map(str, range(400)))
    assert all(EOS not in ids[:-1] and len(ids) <= 12 for ids in many)
    assert any(ids[-1] == EOS for ids in many)
    first = torch.bincount(torch.tensor([ids[0] for ids in many]), minlength=VOCABULARY) / 400
    expected = model(torch.tensor([prompts[0]])).logits[0, -1].softmax(-1)  # not that of the model's generation_config
    assert torch.all((first - expected).abs() < 5 * (expected * (1 - expected) / 400).sqrt() + 0.005)


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_rewards_are_asked_for_as_trl_does(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, answer: Any, **others: Any) -> list[Any]:
        seen.update(prompts=prompts, completions=completions, answer=answer, **others)
        others["log_metric"]("length", 3.0)
        others["log_extra"]("answer", answer)
        return [True, None, torch.tensor(0.5)]

    row = {"prompt": "p", "answer": 7, "completion": "not handed on"}
    assert score(reward, row, ["a", "b", "c"], [[1], [2], [3]]) == [1.0, pytest.approx(math.nan, nan_ok=True), 0.5]
    assert seen["prompts"] == ["p"] * 3
    assert seen["completions"] == ["a", "b", "c"]
    assert seen["completion_ids"] == [[1], [2], [3]]
    assert seen["answer"] == [7] * 3
    assert seen["trainer_state"].global_step == 0
    assert set(seen) == {
        "prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric"
    }  # fmt: skip


def test_a_reward_for_each_completion() -> None:
    with pytest.raises(ValueError, match="reward: gave 1 rewards; takes one for each of 2 completions"):
        score(lambda **_: [1.0], {"prompt": "p"}, ["a", "b"], [[1], [2]])


def test_a_file_of_rewards_can_use_what_lies_beside_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "d3s_test_neighbour.py").write_text("VALUE = 3.0\n")
    (tmp_path / "d3s_test_reward.py").write_text(
        "from d3s_test_neighbour import VALUE\ndef f(completions, **_):\n    return [VALUE] * len(completions)\n"
    )
    reward = load_reward(f"{tmp_path / 'd3s_test_reward.py'}:f")
    assert score(reward, {"prompt": "p"}, ["a"], [[1]]) == [3.0]


def test_what_a_module_of_rewards_lacks_is_said_by_python(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "d3s_test_lacking.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_reward("d3s_test_lacking:f")
