"""docs/coming_from_trl.md has every field of TRL's GRPOConfig: a setting that exists, or why it has no meaning here."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrlhf.config.run_config import RunConfig
from tests.test_docs import settings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "coming_from_trl.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)


def fields_of(package: str, *path: str, name: str) -> set[str]:
    """The annotated fields of a class, read and not imported: transformers' arguments take seconds."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    source = Path(found.submodule_search_locations[0]).joinpath(*path).read_text()
    (body,) = (n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    names = {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return {n for n in names if not n.startswith("_")}


def rows() -> list[tuple[str, str]]:
    text = PAGE.read_text()
    return ROW.findall(text[text.index("## Every field") :])


def test_every_field_is_there_once_and_none_is_made_up() -> None:
    fields = fields_of("trl", "trainer", "grpo_config.py", name="GRPOConfig")
    fields |= fields_of("trl", "trainer", "base_config.py", name="_BaseConfig")
    fields |= fields_of("transformers", "training_args.py", name="TrainingArguments")
    assert len(fields) > 150
    named = [name for name, _ in rows()]
    assert sorted(named) == sorted(fields)


def test_each_has_a_setting_that_exists_or_a_reason() -> None:
    known, before = settings(RunConfig), ""
    for name, said in rows():
        setting = re.match(r"`([a-z0-9_.]+)", said)
        if setting is None or setting.group(1) not in known:
            assert re.match(r"nothing: [\w`]", said), (name, said)
            assert "as above" not in said or before.startswith("nothing"), (name, said)
        before = said
