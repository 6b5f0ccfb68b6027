"""Preference data in each of TRL's formats and kinds of file: TRL's own token ids, and one sentence for nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrlhf.config.stage_config import RewardTrainingConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.stages.data import check_rows, hold_out
from asyncrlhf.stages.preference_data import PairEncoder, about, read_pairs

datasets = pytest.importorskip("datasets")

# The end token is the last thing it writes, so that TRL's ids and ours need no trimming to be the same.
TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t['name'] }}{% endfor %}]{% endif %}{% if loud %}!{% endif %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz0123456789+=: []!?.")}
    inner = Tokenizer(models.WordLevel(letters | {"<unk>": len(letters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="<pad>", unk_token="<unk>", chat_template=TEMPLATE
    )


def turn(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def plain(i: int) -> dict[str, Any]:
    return {"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "none"}


def chat(i: int) -> dict[str, Any]:
    asked = [*turn("system", "be brief"), *turn("user", f"what is {i}+1?")]
    return {"prompt": asked, "chosen": turn("assistant", str(i + 1)), "rejected": turn("assistant", "none")}


def implicit(row: dict[str, Any]) -> dict[str, Any]:
    return {side: row["prompt"] + row[side] for side in ("chosen", "rejected")}


# The four of TRL's documentation, `apply_chat_template`'s extras, and a margin, which the trainer takes as it is.
FORMATS = {
    "plain": [plain(i) for i in range(12)],
    "plain, implicit prompt": [implicit(plain(i)) for i in range(12)],
    "conversations": [chat(i) for i in range(12)],
    "conversations, implicit prompt": [implicit(chat(i)) for i in range(12)],
    "tools": [{**chat(i), "tools": json.dumps([{"name": "sum"}])} for i in range(12)],
    "template options": [{**chat(i), "chat_template_kwargs": {"loud": True}} for i in range(12)],
    "margin and scores": [{**plain(i), "margin": 0.5, "score_chosen": 9} for i in range(12)],
}
CONTAINERS = ("jsonl", "parquet", "folder", "saved", "splits")


def store(rows: list[dict[str, Any]], container: str, folder: Path) -> str:
    text = ["".join(json.dumps(row) + "\n" for row in part) for part in (rows[:5], rows[5:])]
    path = folder / f"data.{container}"
    if container == "jsonl":
        path.write_text("".join(text))
    elif container == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif container == "folder":
        path.mkdir()
        for number, part in enumerate(text):
            (path / f"{number}.jsonl").write_text(part)
    elif container == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    else:
        table = datasets.Dataset.from_list(rows)
        datasets.DatasetDict({"train": table, "test": table.select([3])}).save_to_disk(path)
    return str(path)


@pytest.fixture(scope="module")
def trl_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[Any]]:
    """What TRL's RewardTrainer makes of each format."""
    from trl import RewardTrainer

    arguments = SimpleNamespace(dataset_num_proc=None, max_length=None)
    found = {}
    for name, rows in FORMATS.items():
        table = datasets.Dataset.from_list(rows)
        made = RewardTrainer._prepare_dataset(None, table, tokenizer, arguments, "train")
        found[name] = [(row["chosen_ids"], row["rejected_ids"]) for row in made]
    return found


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_format_in_every_kind_of_file_becomes_trls_ids(
    container: str, tokenizer: PreTrainedTokenizerFast, trl_ids: dict[str, list[Any]], tmp_path: Path
) -> None:
    encode = PairEncoder(tokenizer)
    for number, (name, rows) in enumerate(FORMATS.items()):
        (tmp_path / str(number)).mkdir()
        table, conversational = read_pairs(store(rows, container, tmp_path / str(number)), "train")
        made = [encode(row) for row in table]
        assert [(ids["chosen_ids"], ids["rejected_ids"]) for ids in made] == trl_ids[name], name
        assert conversational == isinstance(rows[0]["chosen"], list)
        assert len({json.dumps(about(row)) for row in table}) == 12, f"{name}: prompts are told apart"


def test_a_prompt_as_text_beside_conversations_that_hold_it(
    tokenizer: PreTrainedTokenizerFast, trl_ids: dict[str, list[Any]], tmp_path: Path
) -> None:
    """As UltraFeedback is published; TRL's own `maybe_extract_prompt` passes over such a column as well."""
    rows = [{**implicit(chat(i)), "prompt": f"what is {i}+1?"} for i in range(12)]
    table, _ = read_pairs(store(rows, "jsonl", tmp_path), "train")
    made = [PairEncoder(tokenizer)(row) for row in table]
    assert [(ids["chosen_ids"], ids["rejected_ids"]) for ids in made] == trl_ids["conversations, implicit prompt"]


def test_saved_splits_have_names(tmp_path: Path) -> None:
    path = store(FORMATS["plain"], "splits", tmp_path)
    settings = RewardTrainingConfig(path=path, heldout_split="test")
    table, _ = read_pairs(path, "train")
    found = hold_out(table, settings, "reward_model", lambda name: read_pairs(path, name)[0], about)
    assert len(found.train) == 12 and found.heldout.to_list() == [plain(3)]
    with pytest.raises(ConfigError, match=r"data\.splits has no split tests; allowed: train, test\.$"):
        read_pairs(path, "tests")


BESIDE = {"prompt": "1+1=", "chosen": turn("assistant", "2"), "rejected": turn("assistant", "3")}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*FORMATS["plain"][:6], {**plain(6), "chosen": ""}], "row 2 of 1.jsonl has no text in the column 'chosen'"),
        ([*FORMATS["plain"][:6], {"prompt": "1", "chosen": "2"}], "row 2 of 1.jsonl has no text in the column 'rej"),
        ([*FORMATS["conversations"][:3], {**chat(3), "rejected": []}], "row 4 of 0.jsonl has no list of messages"),
        ([{**chat(0), "chosen": [{"role": "user", "content": None}]}], "row 1 of 0.jsonl has no list of messages"),
        ([*FORMATS["plain"][:7], chat(7)], "1.jsonl line 3 has list in the column 'prompt' where str stood before"),
        ([BESIDE] * 3, "row 1 of 0.jsonl has its prompt as text, but its answers as messages; give both as messages"),
        (
            [{**row, **implicit(row)} for row in FORMATS["conversations"]],
            "has its prompts in the column 'prompt' and once more at the beginning of every answer",
        ),
        ([{**row, **implicit(row)} for row in FORMATS["plain"]], "once more at the beginning of every answer"),
        ([{"prompt": "1", "completion": "2"}], "has the columns prompt, completion; needed: prompt and chosen and"),
    ],
)
def test_nonsense_is_one_sentence_with_file_and_row(rows: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_pairs(store(rows, "folder", tmp_path), "train")
    said = str(caught.value)
    assert words in said and said.startswith("reward_model.path=") and "\n" not in said


def test_rows_of_parquet_files_in_a_folder_are_named_too(tmp_path: Path) -> None:
    for number in range(3):
        pq.write_table(pa.Table.from_pylist(FORMATS["plain"][:4]), tmp_path / f"{number}.parquet")
    table = datasets.Dataset.from_list([*FORMATS["plain"][:10], {**plain(1), "rejected": None}])
    with pytest.raises(ConfigError, match=r"row 3 of 2\.parquet has no text in the column 'rejected'"):
        check_rows(table, ["rejected"], "k", str(tmp_path))
