"""What every benchmark needs: medians with their spread, files, and the workload that both sides share."""

from __future__ import annotations

import json
import statistics
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.tasks.arithmetic import ArithmeticTask


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, smallest, largest and number of repeats."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
        "values": list(values),
    }


def show(title: str, rows: dict[str, dict[str, Any]], unit: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for column in ("median", "smallest", "largest"):
        table.add_column(f"{column} {unit}".strip(), justify="right")
    table.add_column("repeats", justify="right")
    for name, row in rows.items():
        table.add_row(name, f"{row['median']:.3g}", f"{row['min']:.3g}", f"{row['max']:.3g}", str(row["repeats"]))
    Console(width=110).print(table)


def write(result: dict[str, Any], out: Path | None) -> dict[str, Any]:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"Figures: {out}")
    return result


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local checkpoint, padded on the left as batched generation wants it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.padding_side = "left"
    return tokenizer


def prompt_rows(model: str, count: int, seed: int, digits: int) -> list[dict[str, Any]]:
    """The first ``count`` training prompts of ``task=arithmetic`` under ``seed``: rows of ``prompt`` and ``answer``."""
    source = ArithmeticTask(TaskConfig(digits=digits), load_tokenizer(model)).train_source(seed)
    prompts = [source.next() for _ in range(count)]
    return [{"prompt": prompt.text, "answer": prompt.answer} for prompt in prompts]


def exact_match(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where the completion, stripped, is the answer, else 0: the rule of ``ArithmeticTask.reward``."""
    return [float(text.strip() == answer) for text, answer in zip(completions, answers, strict=True)]


def begins_right(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where the completion begins with the answer: for responses of a fixed length, which cannot end there."""
    return [float(text.strip().startswith(answer)) for text, answer in zip(completions, answers, strict=True)]


def coin(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """0 or 1 by the text's checksum: a reward whose groups nearly all have spread, so that every step is full work."""
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]


def prefix_match(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """``begins_right`` with the signature of a reward function."""
    return begins_right(completions, answer)
