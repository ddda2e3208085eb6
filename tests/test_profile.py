"""python -m d3s_kernels.planning.profile: the counts do not depend on when a run was interrupted."""

import json
import math
import os
import random
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
Command = Callable[..., list[str]]

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
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Qwen2Config(**sizes, **heads, pad_token_id=PAD, eos_token_id=EOS)
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
def out(tmp_path: Path) -> Path:
    return tmp_path / "profile.jsonl"


@pytest.fixture
def command(model_folder: Path, tmp_path: Path) -> Command:
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


def test_a_profile_and_its_plan(command: Command, out: Path, capsys: Any) -> None:
    assert main(command()) == 0
    found = records(out)
    assert [record["index"] for record in found] == list(range(QUERIES))
    assert all(record["samples"] == 8 and record["mean_reward"] == record["successes"] / 8 for record in found)
    assert len({record["successes"] for record in found}) > 2  # otherwise this test shows little
    successes, samples = load_profile(out)
    assert successes.tolist() == [record["successes"] for record in found]
    assert samples.tolist() == [8] * QUERIES
    assert plan_rollouts(successes, samples).phase.shape == (QUERIES,)
    never, always = (successes == 0).sum(), (successes == 8).sum()
    assert f"{QUERIES} queries, {never} never solved, {always} always" in capsys.readouterr().out
    for changed, same in (({"seed": 1}, False), ({"reward": f"{out.with_name('rewards.py')}:later"}, True)):
        other = out.with_name(f"{same}.jsonl")
        assert main(command(**changed, out=other)) == 0
        assert (records(other) == found) is same


def test_interrupted_and_resumed(command: Command, out: Path, monkeypatch: Any, capsys: Any) -> None:
    """Interrupted in the middle of a block, and with a line half written. It goes on with another batch size: no two
    tokens of this model tie."""
    assert main(command()) == 0
    whole = out.read_bytes()
    out.unlink()

    def until(*arguments: Any) -> list[float]:
        if len(records(out)) == 4:
            raise KeyboardInterrupt
        return score(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("d3s_kernels.planning.profile.run.score", until)
        assert main(command()) == 130
    assert f"stopped after 4 of {QUERIES} queries" in capsys.readouterr().err
    part = out.read_bytes()
    assert part == b"".join(whole.splitlines(keepends=True)[:5])
    out.write_bytes(part + b'{"index": 1, "succ')
    assert main(command(**{"batch-size": 5})) == 0
    assert out.read_bytes() == whole
    monkeypatch.setattr("d3s_kernels.planning.profile.run.score", None)  # of a finished one no query is scored again
    assert main(command()) == 0
    assert out.read_bytes() == whole


def test_other_settings_are_refused(command: Command, out: Path, capsys: Any) -> None:
    """Also another dataset under the same name."""
    assert main(command()) == 0
    whole = out.read_bytes()

    def refused(name: str, **changed: Any) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(command(**changed))
        assert f"was written with {name}" in capsys.readouterr().err
        assert out.read_bytes() == whole

    refused("samples 8; got 4", samples=4)
    refused("chat_template_kwargs", **{"chat-template-kwargs": '{"closing": "e"}'})
    refused("dtype", dtype="float32")
    prompts = out.with_name("prompts.jsonl")
    *rows, last = map(json.loads, prompts.read_text().splitlines())
    lines(prompts, [*rows, {**last, "answer": 0}])
    refused("digest")


def test_messages_go_through_the_chat_template(command: Command, tmp_path: Path) -> None:
    """The template turns p into cpd, and the reward function gets messages."""
    chats = [[{"role": "user", "content": letter}] for letter in "pqrs"]
    lines(tmp_path / "text.jsonl", [{"prompt": f"c{letter}d", "answer": 60} for letter in "pqrs"])
    lines(tmp_path / "chat.jsonl", [{"prompt": chat, "answer": 60} for chat in chats])
    reward = f"{tmp_path / 'rewards.py'}:of_messages"
    assert main(command(dataset=tmp_path / "text.jsonl", out=tmp_path / "t.jsonl")) == 0
    assert main(command(dataset=tmp_path / "chat.jsonl", out=tmp_path / "c.jsonl", reward=reward)) == 0
    assert records(tmp_path / "c.jsonl") == records(tmp_path / "t.jsonl")
    other = {"out": tmp_path / "o.jsonl", "reward": reward, "chat-template-kwargs": '{"closing": "xyz"}'}
    assert main(command(dataset=tmp_path / "chat.jsonl", **other)) == 0
    assert records(tmp_path / "o.jsonl") != records(tmp_path / "t.jsonl")


def test_completions_without_a_reward_are_no_samples(command: Command, tmp_path: Path, out: Path) -> None:
    reward = f"{tmp_path / 'rewards.py'}:sometimes_none"
    assert main(command(reward=reward, threshold=0.5)) == 0
    found = records(out)
    assert found[-1] == {"index": QUERIES - 1, "successes": 0, "samples": 0, "mean_reward": None}
    assert any(record["samples"] for record in found)
    successes, samples = load_profile(out)
    with pytest.raises(ValueError, match="samples: got 0 at query"):
        plan_rollouts(successes, samples)
    assert plan_rollouts(successes[samples > 0], samples[samples > 0]).phase.numel() < QUERIES


def test_a_dataset_by_name(command: Command, tmp_path: Path, out: Path) -> None:
    """A folder with a JSONL file is a name that the datasets library can load."""
    pytest.importorskip("datasets")
    folder = tmp_path / "named"
    folder.mkdir()
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    lines(folder / "train.jsonl", [{"question": row["prompt"], "answer": row["answer"]} for row in rows])
    assert main(command()) == 0
    assert main(command(**{"dataset": folder, "prompt-column": "question", "out": tmp_path / "n.jsonl"})) == 0
    assert records(tmp_path / "n.jsonl") == records(out)


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
def test_bad_arguments(command: Command, out: Path, capsys: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command(**changed))
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_bad_datasets(command: Command, out: Path, capsys: Any) -> None:
    for content, message in (
        ("", "has no rows"),
        ('{"prompt": "b"}\nb\n', "has no JSON object in line 2"),
        ('{"prompt": "b"}\n\n{"prompt": ""}\n', "has no prompt in row 1"),
        ('{"prompt": "b"}\n{"answer": 1}\n', "has no prompt in row 1"),
    ):
        out.with_name("prompts.jsonl").write_text(content)
        with pytest.raises(SystemExit, match="2"):
            main(command())
        assert message in capsys.readouterr().err


# ---- the file --------------------------------------------------------------------------------------------------------

SETTINGS = {"queries": 3, "model": "ä", "samples": 8}
RECORDS = [Record(0, 1, 8, 0.125), Record(1, 0, 0, None), Record(2, 7, 8, 0.1 + 0.2)]


def write(path: Path, wanted: list[Record] = RECORDS) -> set[int]:
    with ProfileFile(path, SETTINGS) as file:
        before = set(file.done)
        for record in wanted:
            if record.index not in file.done:
                file.write(record)
    return before


def test_queries_are_rows_of_json_lines(out: Path) -> None:
    """The prompt takes the place of a column of its name. Lines do not end at a line separator inside a string."""
    lines(out, [{"question": "q", "prompt": "p", "answer": 1}])
    assert load_queries(str(out), None, "train", "question") == [{"prompt": "q", "answer": 1}]
    rows = [{"prompt": "a\u2028b"}, {"prompt": "c\x85d"}]
    out.write_bytes("\r\n".join([*(json.dumps(row, ensure_ascii=False) for row in rows), ""]).encode())
    assert load_queries(str(out), None, "train", "prompt") == rows


def test_a_file_is_repaired_wherever_it_breaks_off(out: Path) -> None:
    assert write(out) == set()
    whole = out.read_bytes()
    for length in range(len(whole)):
        out.write_bytes(whole[:length])
        assert len(write(out)) == max(whole[:length].count(b"\n") - 1, 0)
        assert out.read_bytes() == whole


def test_a_profile_is_loaded_whole_and_in_the_order_of_the_queries(out: Path) -> None:
    write(out, RECORDS[:0:-1])
    with pytest.raises(ValueError, match="has 2 of 3 queries"):
        load_profile(out)
    write(out)
    successes, samples = load_profile(str(out))
    assert (successes.tolist(), samples.tolist()) == ([1, 0, 7], [8, 0, 8])
    assert successes.dtype == samples.dtype == torch.int64


HEAD = '{"settings": {"queries": 3}}\n'
REST = ', "successes": 1, "samples": 8, "mean_reward": 1}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a letter to a friend", "is no profile"),
        ("a letter\nto a friend\n", "is no profile: its first line has no settings"),
        ('{"settings": {"samples": 8}}\n', "is no profile"),
        (HEAD + "more\n", "is damaged: line 2"),
        (HEAD + '{"index": 0}\n', "is damaged: line 2"),
        (HEAD + 2 * ('{"index": 0' + REST), "is damaged: line 3 has query 0"),
        (HEAD + '{"index": 3' + REST, "is damaged: line 2 has query 3"),
    ],
)
def test_what_is_no_profile_is_left_alone(out: Path, content: str, message: str) -> None:
    out.write_text(content)
    for load in (load_profile, lambda path: ProfileFile(path, {"queries": 3})):
        with pytest.raises(ValueError, match=message):
            load(out)
        assert out.read_text() == content


# ---- sampling --------------------------------------------------------------------------------------------------------


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
    sampler = Sampler(model, tokenizer, temperature=1.7, max_new_tokens=12, template={})
    prompts = [sampler.prompt_ids(prompt) for prompt in ("a", "qrstu", "a")]
    together = sampler.completions(prompts, "abc")
    assert together == [sampler.completions([ids], key)[0] for ids, key in zip(prompts, "abc", strict=True)]
    assert together[0] != together[2]  # the same prompt, drawn by another key

    many = sampler.completions([prompts[0]] * 400, map(str, range(400)))
    assert all(EOS not in ids[:-1] and len(ids) <= 12 for ids in many)
    assert any(ids[-1] == EOS for ids in many)
    first = torch.bincount(torch.tensor([ids[0] for ids in many]), minlength=VOCABULARY) / 400
    logits = model(torch.tensor([prompts[0]])).logits[0, -1]  # not scaled by the model's generation_config
    expected = (logits / 1.7).softmax(-1)
    assert torch.all((first - expected).abs() < 5 * (expected * (1 - expected) / 400).sqrt() + 0.005)


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_rewards_are_asked_for_as_trl_does() -> None:
    seen: dict[str, Any] = {}

    def reward(**arguments: Any) -> list[Any]:
        seen.update(arguments)
        arguments["log_metric"]("length", 3.0)
        arguments["log_extra"]("answer", arguments["answer"])
        return [True, None, torch.tensor(0.5)]

    row = {"prompt": "p", "answer": 7, "completion": "not handed on"}
    of_each = {"completions": ["a", "b", "c"], "completion_ids": [[1], [2], [3]]}
    assert score(reward, row, *of_each.values()) == [1.0, pytest.approx(math.nan, nan_ok=True), 0.5]
    assert seen.pop("trainer_state").global_step == 0
    del seen["log_extra"], seen["log_metric"]
    assert seen == {"prompts": ["p"] * 3, **of_each, "answer": [7] * 3}
    with pytest.raises(ValueError, match="reward: gave 1 rewards; takes one for each of 2 completions"):
        score(lambda **_: [1.0], {"prompt": "p"}, ["a", "b"], [[1], [2]])


def test_a_file_of_rewards_uses_what_lies_beside_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "d3s_test_neighbour.py").write_text("VALUE = 3.0\n")
    (tmp_path / "d3s_test_reward.py").write_text(
        "from d3s_test_neighbour import VALUE\ndef f(completions, **_):\n    return [VALUE] * len(completions)\n"
    )
    reward = load_reward(f"{tmp_path / 'd3s_test_reward.py'}:f")
    assert score(reward, {"prompt": "p"}, ["a"], [[1]]) == [3.0]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "d3s_test_lacking.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_reward("d3s_test_lacking:f")
