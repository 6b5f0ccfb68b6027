"""The weight benchmark: its sizes, its ratios, what it refuses, and one run whose versions arrive."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from asyncrlhf.errors import ConfigError

study = importlib.import_module("experiments.14_weight_publish.bench")


@pytest.mark.parametrize(("name", "millions"), [("0.7M", 0.7), ("10M", 10.4), ("135M", 134.5)])
def test_sizes_are_what_their_names_say(name: str, millions: float) -> None:
    shape = study.SHAPES[name]
    block = 2 * shape.hidden**2 + 2 * shape.key_value * shape.hidden + 3 * shape.intermediate * shape.hidden
    count = shape.vocabulary * shape.hidden + shape.layers * (block + 2 * shape.hidden) + shape.hidden
    assert count / 1e6 == pytest.approx(millions, abs=0.05)
    if name != "135M":
        assert sum(tensor.numel() for tensor in shape.tensors().values()) == count


def test_ratios_are_taken_round_by_round() -> None:
    def row(raw: float, publish: float) -> dict[str, dict[str, float]]:
        return {"raw": {"publish": raw}, "disk": {"publish": publish, "stall": publish / 4, "fenced": publish / 10}}

    found = study.summarize([row(1.0, 2.0), row(3.0, 4.0), row(10.0, 10.0)], 10**9, 2)
    way = found["ways"]["disk"]
    assert (way["ratio_min"], way["ratio_median"], way["ratio_max"]) == (0.5, 0.75, 1.0)
    assert way["gb_per_second"] == 0.25 and way["stall_seconds"] == 1.0
    assert way["fenced_stall_share"] == pytest.approx(0.1) and found["raw_gb_per_second"] == pytest.approx(1 / 3)


def test_every_transport_comes_with_and_without_checksums() -> None:
    labels = [variant.label for variant in study.variants(["collective", "disk"])]
    assert labels == ["collective", "collective, no checksum", "disk", "disk, no checksum"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sizes", "7B"], "--sizes=7B is not known"),
        (["--transports", "pigeon"], "--transports=pigeon is not known"),
        (["--receivers", "0"], "--receivers=0 is out of range"),
        (["--disk-path", "/no/such/folder"], "is not a folder"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        study.run(arguments)


@pytest.mark.usefixtures("ray_local")
@pytest.mark.more
def test_a_run_checks_what_arrives_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    result = study.run(["--sizes", "0.7M", "--repeats", "2", "--receivers", "1", "--out", str(out)])
    (size,) = result["sizes"]
    assert json.loads(out.read_text()) == result
    assert len(size["rounds"]) == 2 and len(size["ways"]) == 6
    assert all(way["publish_seconds"] >= way["stall_seconds"] > 0 for way in size["ways"].values())
    assert "collective" in capsys.readouterr().out
