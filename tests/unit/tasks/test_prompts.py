"""The user's own prompts: every format, a split that does not leak, and bad files named by line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.tasks.prompts import PromptsTask, check_rows

TOKENIZER = load_tokenizer(ModelConfig())
ROWS = [{"prompt": f"{i}+1=", "answer": i + 1, "level": i % 3} for i in range(40)]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(path: Path | str, **settings: Any) -> PromptsTask:
    task = build_task(TaskConfig(kind="prompts", path=str(path), **settings), TOKENIZER)
    assert isinstance(task, PromptsTask)
    return task


def texts(task: PromptsTask) -> tuple[set[str], set[str]]:
    source = task.train_source(seed=0)
    train = [source.next().text for _ in range(source.state()["length"])]
    assert len(set(train)) == len(train)
    return set(train), {p.text for p in task.heldout()}


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    jsonl = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ROWS[:15])
    pq.write_table(pa.Table.from_pylist(ROWS[15:]), folder / "b.parquet")
    (folder / "notes.txt").write_text("not prompts")
    train, heldout = texts(make(jsonl))
    assert texts(make(parquet)) == texts(make(folder)) == (train, heldout)
    assert train | heldout == {row["prompt"] for row in ROWS}
    assert not train & heldout
    assert len(heldout) == 4


def test_a_dataset_by_name_has_its_own_heldout_split(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": ROWS[:10], "test": ROWS[8:20]}
    asked = []

    def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, subset))
        return splits[split]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    train, heldout = texts(make("someone/sums", subset="main", heldout_split="test", heldout_size=12))
    assert heldout == {row["prompt"] for row in ROWS[8:20]}
    assert train == {row["prompt"] for row in ROWS[:8]}
    assert set(asked) == {("someone/sums", "main")}
    make("someone/sums")
    assert asked[-1] == ("someone/sums", None)


def test_a_dataset_that_does_not_load_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="nor a dataset that loads") as caught:
        make("someone/no-such-sums")
    assert "\n" not in str(caught.value)


def test_the_split_ignores_order_and_duplicates(tmp_path: Path) -> None:
    first = make(write_jsonl(tmp_path / "a.jsonl", ROWS))
    second = make(write_jsonl(tmp_path / "b.jsonl", [*reversed(ROWS), *ROWS]))
    assert {p.text for p in first.heldout()} == {p.text for p in second.heldout()}
    source = second.train_source(seed=0)
    heldout = {p.text for p in second.heldout()}
    assert all(source.next().text not in heldout for _ in range(80))


def test_answers_columns_and_keys(tmp_path: Path) -> None:
    rows = [{"question": f"{i}*2=", "solution": f"{2 * i}", "level": i} for i in range(20)]
    task = make(write_jsonl(tmp_path / "a.jsonl", rows), prompt_key="question", answer_key="solution")
    for prompt in task.heldout():
        level = prompt.metadata["level"]
        assert (prompt.text, prompt.answer) == (f"{level}*2=", str(2 * level))
        assert task.reward(prompt, f"it is {2 * level}.") == 1.0
        assert task.reward(prompt, f"it is {2 * level + 1}.") == 0.0


def test_the_template_is_for_the_model_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1="}, {"prompt": "2+2="}])
    (prompt,) = make(path, prompt_template="3+{prompt}").heldout()
    assert TOKENIZER.decode(prompt.token_ids.tolist(), skip_special_tokens=True) == f"3+{prompt.text}"
    with pytest.raises(ConfigError, match=r"task\.prompt_template='3\+' has no place for the prompt"):
        make(path, prompt_template="3+")


def test_long_prompts_are_refused_or_left_out_and_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:9], {"prompt": "1+" * 9 + "1="}, *ROWS[9:]])
    with pytest.raises(ConfigError, match=r"a\.jsonl line 10 has \d+ tokens"):
        make(path, max_prompt_length=10)
    task = make(path, max_prompt_length=10, skip_long_prompts=True)
    train, heldout = texts(task)
    assert train | heldout == {row["prompt"] for row in ROWS}
    assert task.notes == ["Left out 1 prompts of more than 10 tokens."]
    with pytest.raises(ConfigError, match=r"no prompt of up to task\.max_prompt_length=2 tokens"):
        make(path, max_prompt_length=2, skip_long_prompts=True)


def test_without_answers_the_rule_has_no_score(tmp_path: Path) -> None:
    task = make(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1="}, {"prompt": "2+2="}]))
    (prompt,) = task.heldout()
    assert prompt.answer is None
    with pytest.raises(RewardError, match=r"reward\.kind=python"):
        task.reward(prompt, "2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ('{"prompt": "1+1="}\n', "holds one prompt only"),
        ('{"prompt": "1+1="}\n{"text": "2+2="}\n', "rows.jsonl line 2 has no key 'prompt'.*its keys are: text"),
        ('{"prompt": "1+1="}\n{"prompt": " "}\n', "rows.jsonl line 2 has no text under the key 'prompt'"),
        ('{"prompt": "1+1="}\n{"prompt": 5}\n', "rows.jsonl line 2 has no text under the key 'prompt'"),
        ('{"prompt": "1+1="}\n\n{"prompt": \n', "rows.jsonl line 3 is not valid JSON"),
        ('["1+1="]\n', "rows.jsonl line 1 is not a JSON object"),
        ('{"prompt": "1+1="}\n{"prompt": "111111+1="}\n', "rows.jsonl line 2 has 10 tokens; allowed: at most .*=8"),
        ('{"prompt": "What is love?"}\n', "knows only 3 of the 14 tokens of the prompt rows.jsonl line 1"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    limit = 8 if "allowed" in message else 512
    with pytest.raises(ConfigError, match=message) as caught:
        make(path, max_prompt_length=limit)
    assert "\n" not in str(caught.value)


def test_bad_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        make(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="does not exist"):
        make("none.parquet")
    with pytest.raises(ConfigError, match=r"holds no \.jsonl or \.parquet file"):
        make(tmp_path)
    (tmp_path / "rows.csv").write_text("prompt\n")
    with pytest.raises(ConfigError, match=r"neither \.jsonl nor \.parquet"):
        make(tmp_path / "rows.csv")
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(ConfigError, match="is not a Parquet file"):
        make(tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="heldout_split is for datasets by name"):
        make(write_jsonl(tmp_path / "rows.jsonl", ROWS), heldout_split="test")


def test_chat_settings_need_a_chat_template(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match="has no chat template"):
        make(path, chat_template=True)
    with pytest.raises(ConfigError, match=r"needs task\.chat_template=true"):
        make(path, system_prompt="Reply with a number.")


def test_the_chat_template_wraps_tokens_and_leaves_the_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}={% endfor %}{% if add_generation_prompt %}-{% endif %}"
    )
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    config = TaskConfig(kind="prompts", path=str(path), chat_template=True, system_prompt="7")
    for prompt in build_task(config, tokenizer).heldout():
        assert tokenizer.decode(prompt.token_ids) == f"<bos>7={prompt.text}=-"


@pytest.mark.parametrize("path", ["none.json", "none.csv", "folder/none.jsonl"])
def test_a_missing_file_is_not_looked_up_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrlhf.data.rows._load_dataset", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(ConfigError, match=f"^task.path={path} does not exist.$"):
        check_rows(TaskConfig(kind="prompts", path=path))
