"""The documentation is plain Markdown: every link leads somewhere, every named file and setting exists."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [p for p in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")]]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
# A setting as users write it: one of the groups, a dot, a key; `=value` may follow.
SETTING = re.compile(r"^([a-z_]+(?:\.[a-z_]+)+)(?:=\S*)?$")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def settings(schema: type, prefix: str = "") -> set[str]:
    hints = get_type_hints(schema)
    found = set()
    for field in fields(schema):
        name = prefix + ("async" if field.name == "async_" else field.name)
        found.add(name)
        if is_dataclass(hints[field.name]):
            found |= settings(hints[field.name], f"{name}.")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_settings_named_in_the_text_exist(page: Path) -> None:
    from asyncrlhf.config.run_config import RunConfig

    known = settings(RunConfig)
    groups = {name for name in known if any(other.startswith(f"{name}.") for other in known)}
    named = {m.group(1) for code in CODE.findall(FENCE.sub("", page.read_text())) if (m := SETTING.match(code))}
    assert sorted(n for n in named if n.split(".")[0] in groups and n not in known) == []


def test_every_preset_is_in_the_table_of_algorithms() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    presets = {path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml")}
    assert set(re.findall(r"^\| `([a-z0-9_]+)` \|", page, re.MULTILINE)) == presets


def test_every_event_of_the_journal_is_in_the_table_of_records() -> None:
    from asyncrlhf.records.write.journal import EVENTS

    page = (ROOT / "docs" / "records.md").read_text()
    part = page[page.index("## journal") : page.index("## verify")]
    assert re.findall(r"^\| `([a-z_]+)` \|", part, re.MULTILINE) == list(EVENTS)


def defined(file: Path) -> set[str]:
    """Functions of a module and methods of its classes, as ``f`` and ``Class.f``."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_the_walks_name_files_and_functions_that_exist() -> None:
    page = (ROOT / "docs" / "walks.md").read_text()
    rows = re.findall(r"^\| `([a-z_/]+\.py)` \| ([^|]*) \|", page, re.MULTILINE)
    assert len(rows) > 25
    missing = [
        f"{file}: {name}"
        for file, names in rows
        for name in re.findall(r"`([\w.]+)`", names)
        if not (ROOT / "asyncrlhf" / file).exists() or name not in defined(ROOT / "asyncrlhf" / file)
    ]
    assert missing == []


def around(file: Path) -> Iterator[Path]:
    """The files of its room, and of the rooms that this lies in."""
    folder = file.parent
    while folder != ROOT / "asyncrlhf":
        yield from folder.glob("*.py")
        folder = folder.parent
    yield file


def test_the_way_of_a_rollout_is_as_short_as_it_says() -> None:
    page = (ROOT / "docs" / "walks.md").read_text()
    way = page[page.index("## A rollout") : page.index("## A weight")]
    said = re.search(r"at most (\d+) files and (\d+) types: ([^.]*)\.", way)
    assert said is not None
    files = set(re.findall(r"^\| `([a-z_/]+\.py)` \|", way, re.MULTILINE))
    types = re.findall(r"`(\w+)`", said.group(3))
    assert len(files) <= int(said.group(1)) <= 20 and len(types) <= int(said.group(2)) <= 14
    handed_on = re.findall(r"\| ([^|]*) \|$", way, re.MULTILINE)
    wrapped = re.findall(r"`([A-Z]\w+)`", way[said.end() :].split("\n\n")[1])
    named = {name for cell in handed_on for name in re.findall(r"`([A-Z]\w+)`", cell)}
    assert sorted(named - {*types, *wrapped}) == []
    sources = [ROOT / "asyncrlhf" / "types.py", *(ROOT / "asyncrlhf" / file for file in files)]
    classes = {
        node.name
        for source in {path for file in sources for path in around(file)}
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert sorted({*types, *wrapped} - classes) == []


def test_the_core_can_be_read_in_an_afternoon() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    part = page[page.index("## The core") : page.index("## The floor plan")]
    names = set(re.findall(r"`([a-z_]+/|[a-z_/]+\.py)`", part))
    files = {
        f
        for n in names
        for f in ([ROOT / "asyncrlhf" / n] if n.endswith(".py") else (ROOT / "asyncrlhf" / n).glob("*.py"))
    }
    assert all(file.exists() for file in files)
    assert sum(len(file.read_text().splitlines()) for file in files) <= 6500


def test_the_floor_plan_draws_every_room_on_its_floor() -> None:
    from tests.test_architecture import LAYERS, PLANNER, rooms

    drawing = runpy.run_path(str(ROOT / "docs" / "images" / "draw_rooms.py"))
    inner = {room: tuple(names.split()) for _, floor in drawing["FLOORS"] for room, _, names in floor}
    drawn = {room: floor for floor, row in drawing["FLOORS"] for room, _, _ in row if floor}
    folders = {room.split(".")[1] for room in rooms()} - {PLANNER}
    assert drawn == {room: LAYERS[room] for room in folders | {"api"}}
    for room, names in inner.items():
        found = {other.split(".")[2] for other in rooms() if other.startswith(f"asyncrlhf.{room}.")}
        assert set(names) == found, room
    picture = (ROOT / "docs" / "images" / "floor_plan.svg").read_text()
    assert picture == drawing["floor_plan"](), "draw it again: python docs/images/draw_rooms.py"
    page = (ROOT / "docs" / "architecture.md").read_text()
    part = page[page.index("## The floor plan") : page.index("## One loss kernel")]
    assert {f"{room}/" for room in {*folders, PLANNER}} <= set(re.findall(r"`([a-z_]+/)`", part))


def test_names_of_other_frameworks_are_theirs() -> None:
    """Where `make install` put their sources: each flag of OpenRLHF and the end of each of verl's keys is in them."""
    references = Path(sys.prefix) / "references"
    theirs = references / "openrlhf" / "cli" / "train_ppo_ray.py"
    if not theirs.is_file():
        pytest.skip("OpenRLHF and verl are not installed")
    page = (ROOT / "docs" / "coming_from_openrlhf_and_verl.md").read_text()
    flags = theirs.read_text() + "".join(f"--{p}.{n}" for p in ("actor", "critic") for n in ("adam.lr", "max_norm"))
    named = {flag for flag in re.findall(r"`(--[a-z_.]+)", page)}
    assert len(named) > 40 and sorted(flag for flag in named if f"{flag}" not in flags) == []
    configs = (references / "verl" / "trainer" / "config", references / "verl" / "experimental" / "fully_async_policy")
    known = "\n".join(path.read_text() for folder in configs for path in folder.rglob("*.yaml"))
    keys = {key.replace("\\", "").split(".")[-1] for key in re.findall(r"[a-z]+(?:\\_[a-z]+)+(?:\.[a-z\\_]+)*", page)}
    assert len(keys) > 40 and sorted(key for key in keys if not re.search(rf"\b{key}:", known)) == []


def test_the_sites_navigation_has_every_page() -> None:
    named = sorted(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert named == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
