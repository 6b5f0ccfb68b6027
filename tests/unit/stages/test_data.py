"""Training data of the stages: what is read, what is refused in one sentence, and which rows are held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrlhf.config.stage_config import SftConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.stages.data import check_columns, check_rows, hold_out, read_rows

datasets = pytest.importorskip("datasets")
ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(40)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_jsonl_parquet_and_folders_are_read_alike(here: Path) -> None:
    (here / "a.jsonl").write_text(lines(ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), here / "a.parquet")
    (here / "folder").mkdir()
    (here / "folder" / "1.jsonl").write_text(lines(ROWS[:15]))
    (here / "folder" / "2.jsonl").write_text(lines(ROWS[15:]))
    (here / "folder" / "3.jsonl").write_text("\n")
    (here / "folder" / "notes.txt").write_text("no data")
    for path in ("a.jsonl", "a.parquet", "folder", str(here / "folder")):
        assert read_rows(path, "train", "sft.path").to_list() == ROWS, path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", ["sft.path is empty"]),
        ("nowhere.jsonl", ["sft.path=nowhere.jsonl does not exist"]),
        ("./nowhere", ["sft.path=./nowhere does not exist"]),
        ("no-such-dataset", ["sft.path=no-such-dataset is neither a local file nor a dataset that loads"]),
        ("empty.jsonl", ["sft.path=empty.jsonl holds no rows"]),
        ("blank.jsonl", ["sft.path=blank.jsonl holds no rows"]),
        ("broken.jsonl", ["sft.path=broken.jsonl could not be read: broken.jsonl line 3 is not valid JSON: Expecting"]),
        ("folder", ["could not be read: b.jsonl line 2 has list in the column 'text' where str stood before"]),
        ("list.jsonl", ["could not be read: list.jsonl line 1 is not a JSON object"]),
        ("not.parquet", ["sft.path=not.parquet could not be read", "Parquet"]),
        ("notes.txt", ["sft.path=notes.txt is of no known format", ".jsonl or .parquet"]),
        ("bare", ["The folder sft.path=bare holds no .jsonl or .parquet file"]),
        ("mixed", ["sft.path=mixed holds .jsonl and .parquet files"]),
    ],
)
def test_what_cannot_be_read_is_one_sentence(path: str, words: list[str], here: Path) -> None:
    (here / "empty.jsonl").write_text("")
    (here / "blank.jsonl").write_text("\n \n")
    (here / "broken.jsonl").write_text('{"text": "a"}\n\n{"text" "b"}\n')
    (here / "list.jsonl").write_text('"a"\n')
    (here / "folder").mkdir()
    (here / "folder" / "a.jsonl").write_text(lines([{"text": "a"}] * 3))
    (here / "folder" / "b.jsonl").write_text(lines([{"text": "a"}, {"text": [1]}]))
    (here / "not.parquet").write_text("text")
    (here / "notes.txt").write_text("text")
    (here / "bare").mkdir()
    (here / "mixed").mkdir()
    (here / "mixed" / "a.jsonl").write_text(lines(ROWS))
    (here / "mixed" / "b.parquet").write_text("x")
    with pytest.raises(ConfigError) as caught:
        read_rows(path, "train", "sft.path")
    said = str(caught.value)
    assert [word for word in words if word not in said] == [], said
    assert "\n" not in said


def table(rows: list[dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list(rows)


def test_columns_decide_the_format() -> None:
    formats = (("messages",), ("prompt", "completion"), ("text",))
    assert check_columns(table(ROWS), formats, "sft.path", "x") == ("prompt", "completion")
    assert check_columns(table([{"text": "a", "id": 1}]), formats, "sft.path", "x") == ("text",)
    with pytest.raises(ConfigError, match="has the columns question, prompt; needed: messages, or prompt and comp"):
        check_columns(table([{"question": "a", "prompt": "b"}]), formats, "sft.path", "x")


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ([{"text": "a"}, {"text": ""}], "row 2 has no text in the column 'text'"),
        ([{"text": "a"}, {"text": None}], "row 2 has no text in the column 'text'"),
        ([{"text": 3}, {"text": 4}], "row 1 has no text in the column 'text'"),
        ([{"text": turns("a")}, {"text": []}], "row 2 has no list of messages in the column 'text'"),
        ([{"text": [{"who": "a", "content": "b"}]}], "row 1 has no list of messages in the column 'text'"),
    ],
)
def test_a_bad_row_is_named(rows: list[dict[str, Any]], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rows(table(rows), ["text"], "sft.path", "x.jsonl")
    assert place in str(caught.value)


def test_good_rows_are_texts_or_conversations() -> None:
    assert check_rows(table(ROWS), ["prompt", "completion"], "k", "x") is False
    assert check_rows(table([{"m": turns("a", "b")}, {"m": turns("c")}]), ["m"], "k", "x") is True


def split(rows: list[dict[str, Any]], **settings: Any) -> Any:
    config = SftConfig(path="no-such-file", **settings)
    return hold_out(table(rows), config, "sft", lambda name: table([{"prompt": name}]), lambda row: row["prompt"])


def test_siblings_of_a_prompt_are_on_one_side_and_order_does_not_matter() -> None:
    rows = [{"prompt": f"p{i % 20}", "answer": str(i)} for i in range(60)]
    found = split(rows, heldout_fraction=0.2)
    heldout, train = set(found.heldout["prompt"]), set(found.train["prompt"])
    assert len(heldout) == 4 and len(train) == 16 and not heldout & train
    assert len(found.heldout) == 12 and len(found.train) == 48
    # The same number means the same prompt, and only that.
    pairs = set(zip(found.heldout_prompts, found.heldout["prompt"], strict=True))
    assert len(pairs) == 4 and {number for number, _ in pairs} == set(range(4))
    assert set(split(rows[::-1], heldout_fraction=0.2).heldout["prompt"]) == heldout
    # More prompts move none of them from training to the other side and back by chance alone: larger shares contain it.
    assert heldout < set(split(rows, heldout_fraction=0.5).heldout["prompt"])


def test_shares_at_their_ends() -> None:
    rows = [{"prompt": f"p{i}"} for i in range(5)]
    assert len(split(rows, heldout_fraction=0).heldout) == 0
    assert len(split(rows, heldout_fraction=0.01).heldout) == 1
    with pytest.raises(ConfigError, match=r"holds 5 prompts, and sft.heldout_fraction=0.95 leaves none to train on"):
        split(rows, heldout_fraction=0.95)
    with pytest.raises(ConfigError, match="holds 1 prompt, and"):
        split([{"prompt": "a"}, {"prompt": "a"}], heldout_fraction=0.1)


def test_a_split_of_its_own_takes_nothing_away(here: Path) -> None:
    found = split(ROWS, heldout_split="test")
    assert len(found.train) == 40 and found.heldout.to_list() == [{"prompt": "test"}] and found.heldout_prompts == [0]
    (here / "a.jsonl").write_text(lines(ROWS))
    config = SftConfig(path="a.jsonl", heldout_split="test")
    with pytest.raises(ConfigError, match="heldout_split is for data with splits"):
        hold_out(table(ROWS), config, "sft", table, lambda row: row["prompt"])
