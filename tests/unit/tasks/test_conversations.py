"""Datasets as TRL's users have them: conversations, saved folders, objects, streams and mixtures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.pretrained import load_tokenizer
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.tasks.task import Task

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ {'system': '*', 'user': '+', 'assistant': '-'}[m.role] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}{% if digit %}{{ digit }}{% endif %}"
)
ROWS = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(40)]
TALKS = [{"prompt": [{"role": "user", "content": f"{i}"}], "solution": str(i)} for i in range(40)]
A_LIST = [{"prompt": f"{i}*2=", "answer": 2 * i} for i in range(20)]
A_NUMBER = 3


def a_function() -> dict[str, list[dict[str, Any]]]:
    return {"train": A_LIST[:15], "test": A_LIST[15:]}


def fails() -> None:
    raise ValueError("no such table")


def make(path: Path | str = "", chat: bool = True, **settings: Any) -> Task:
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.chat_template = TEMPLATE if chat else None
    return build_task(TaskConfig(kind="prompts", path=str(path), **settings), tokenizer)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(prompt: Any) -> str:
    return str(load_tokenizer(ModelConfig()).decode(prompt.token_ids))


def test_a_conversation_goes_through_the_template_and_stays_a_conversation(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", TALKS)
    for prompt in make(path).heldout():
        assert read(prompt) == f"<bos>+{prompt.text}=" and prompt.messages == [{"role": "user", "content": prompt.text}]
        assert prompt.metadata == {"solution": prompt.text}
    (first, *_) = make(path, system_prompt="7", chat_template_kwargs={"digit": "5"}).heldout()
    assert read(first) == f"<bos>*7+{first.text}=5"
    own = [{"role": "system", "content": "9"}, {"role": "user", "content": "1"}, {"role": "assistant", "content": "3-"}]
    begun = jsonl(tmp_path / "begun.jsonl", [{"prompt": own}, {"prompt": [*own[:1], {"role": "user", "content": "2"}]}])
    texts = {read(prompt) for prompt in (lambda task: [*task.heldout(), task.train_source(0).next()])(
        make(begun, system_prompt="7")
    )}  # fmt: skip
    assert texts == {"<bos>*9+1-3-", "<bos>*9+2="}, "the assistant's turn is gone on with; a system's own stays alone"


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([*TALKS, *ROWS], {}, "are texts and conversations"),
        ([{"prompt": []}], {}, "line 1 has no list of messages"),
        ([{"prompt": [{"role": "user"}]}], {}, "line 1 has no list of messages"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
            {},
            "line 1 has an image under the key 'content'",
        ),
        (TALKS, {"chat": False}, "is a conversation, but the tokenizer .* has no chat template"),
        (TALKS, {"prompt_template": "1{prompt}"}, "prompt_template is for texts"),
        ([{"prompt": [{"role": "judge", "content": "1"}]}] * 2, {}, "line 1 is refused by the chat template"),
    ],
)
def test_conversations_that_cannot_be_used_are_one_sentence(
    tmp_path: Path, rows: list[dict[str, Any]], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(jsonl(tmp_path / "rows.jsonl", rows), **settings)
    assert "\n" not in str(caught.value)


def test_every_row_has_every_column_and_what_no_checkpoint_holds_is_left_out(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"prompt": f"{i}=", "blob": b"x", "level": i % 2 or None} for i in range(30)])
    table.save_to_disk(str(tmp_path / "table"))
    task = make(tmp_path / "table")
    assert {tuple(p.metadata) for p in task.heldout()} == {("level",)}
    assert task.notes == [
        "Left out the column 'blob': its values are of the kind bytes, which no checkpoint could hold."
    ]
    ragged = jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "9+9=", "level": 3}])
    source = make(ragged).train_source(0)
    assert {tuple(source.next().metadata) for _ in range(36)} == {("solution", "level")}


def test_saved_folders_have_their_splits(tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(ROWS[:30]), "test": datasets.Dataset.from_list(ROWS[28:])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "splits"))
    task = make(tmp_path / "splits", heldout_split="test", answer_key="solution")
    assert {p.text for p in task.heldout()} == {row["prompt"] for row in ROWS[28:]}
    assert task.train_source(0).state()["length"] == 28
    assert task.reward(task.heldout()[0], f"it is {task.heldout()[0].answer}") == 1.0
    with pytest.raises(ConfigError, match="has no split valid; allowed: train, test"):
        make(tmp_path / "splits", split="valid")


def test_objects_of_the_users_own() -> None:
    here = "tests.unit.tasks.test_conversations"
    task = make(f"{here}:a_function", heldout_split="test")
    assert {p.text for p in task.heldout()} == {row["prompt"] for row in A_LIST[15:]}
    assert {p.metadata["answer"] for p in task.heldout()} == {2 * i for i in range(15, 20)}, "a column keeps its type"
    assert len(make(f"{here}:A_LIST").heldout()) == 2
    for name, message in (
        ("A_NUMBER", "gave int; it must give a dataset"),
        ("fails", "could not be called: ValueError: no such table"),
        ("nobody", "has no 'nobody'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(f"{here}:{name}")


def test_a_stream_keeps_no_rows_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrlhf.tasks.prompts.SHUFFLE_BUFFER", 5)
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    settings: dict[str, Any] = {"streaming": True, "heldout_size": 4}
    task = make(path, **settings)
    assert [p.text for p in task.heldout()] == [row["prompt"] for row in ROWS[:4]]
    source = task.train_source(seed=1)
    first = [source.next().text for _ in range(36)]
    assert sorted(first) == sorted(row["prompt"] for row in ROWS[4:]) and first != [row["prompt"] for row in ROWS[4:]]
    assert all(first.index(row["prompt"]) >= i - 5 for i, row in enumerate(ROWS[4:])), "five places early at most"
    second = [source.next().text for _ in range(36)]
    assert sorted(second) == sorted(first) and second != first
    again = make(path, **settings).train_source(seed=1)
    again.restore({"position": 30, "seed": 1, "length": None})
    assert [again.next().text for _ in range(42)] == [*first[30:], *second]


def test_a_stream_of_datasets_is_asked_for_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, original, asked = jsonl(tmp_path / "rows.jsonl", ROWS), datasets.load_dataset, []

    def load_dataset(name: str, subset: str | None, **options: Any) -> Any:
        asked.append((name, subset, options))
        return original("json", data_files=str(path), **{**options, "split": "train"})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    task = make("someone/sums", streaming=True, heldout_split="test", heldout_size=3)
    assert {task.train_source(0).next().text, *(p.text for p in task.heldout())} <= {row["prompt"] for row in ROWS}
    assert asked[0] == ("someone/sums", None, {"split": "test", "streaming": True})


def test_a_mixture_draws_by_weight_and_leaks_nothing(tmp_path: Path) -> None:
    sums, products = ROWS, [{"prompt": f"{i}*3=", "level": 1} for i in range(40)]
    one, other = jsonl(tmp_path / "a.jsonl", sums), jsonl(tmp_path / "b.jsonl", [*products, *ROWS])
    mixture = {"sums": {"path": str(one), "weight": 3}, "more": {"path": str(other), "streaming": True}}
    task = make(mixture=mixture, heldout_size=8)
    heldout = {p.text for p in task.heldout()}
    source = task.train_source(seed=0)
    drawn = [source.next() for _ in range(2000)]
    assert not heldout & {p.text for p in drawn}
    kinds = Counter("level" in p.metadata for p in drawn if "*" in p.text or "solution" in p.metadata)
    of_more = sum(p.prompt_id.startswith("b.jsonl") for p in drawn)
    assert abs(of_more / 2000 - 0.25) < 0.03, (of_more, kinds)
    again = make(mixture=mixture, heldout_size=8).train_source(seed=0)
    again.restore({"position": 1500, "seed": 0, "length": None})
    assert [again.next().text for _ in range(500)] == [p.text for p in drawn[1500:]]


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ([1], "does not map names to sources"),
        ({"a": {"weight": 2}}, "does not map names to sources"),
        ({"a": {"path": "x.jsonl", "weight": 0}}, r"task.mixture.a.weight=0 is out of range"),
        ({"a": {"path": "x.jsonl", "weight": "many"}}, "weight=many is of the wrong kind"),
        ({"a": {"path": "x.jsonl", "splitt": "t"}}, r"task.mixture.a.splitt is not a setting \(did you mean split"),
        ({"a": {"path": "x.jsonl", "heldout_size": 4}}, "task.mixture.a.heldout_size applies to all sources"),
        ({"a": {"path": "none.jsonl"}}, "In task.mixture.a: task.path=none.jsonl does not exist"),
    ],
)
def test_a_mixture_that_cannot_be_used_is_one_sentence(mixture: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(mixture=mixture)


def test_a_mixture_has_texts_or_conversations(tmp_path: Path) -> None:
    one, other = jsonl(tmp_path / "a.jsonl", ROWS), jsonl(tmp_path / "b.jsonl", TALKS)
    with pytest.raises(ConfigError, match=r"task.mixture has texts in a, conversations in b"):
        make(mixture={"a": {"path": str(one)}, "b": {"path": str(other)}})
