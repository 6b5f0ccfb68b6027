"""Planted secrets reach the service that they are for, and nothing that a run leaves behind or shows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrlhf import redaction
from asyncrlhf.cli.main import main
from asyncrlhf.cli.stages import config_of_run
from asyncrlhf.config.compose import load_config, quoted
from asyncrlhf.config.conversion import to_plain
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator import run as run_module
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.redaction import HIDDEN, hide, redact, redacted
from asyncrlhf.sweeps.plan import plan_sweep
from asyncrlhf.sweeps.record import SweepRecord
from tests.loop import FAKE, QUIET
from tests.reward_server import rewards_by_length, serving
from tests.wandb_file import _payloads

PASSWORD, QUERY, PATH_PART, BEARER, OPTION = (
    f"planted-{word}-7c1f" for word in ("pw", "query", "path", "bearer", "opt")
)
PLANTED = (PASSWORD, QUERY, PATH_PART, BEARER, OPTION)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", {})
    monkeypatch.setenv("PLANTED_PATH", PATH_PART)
    monkeypatch.setenv("PLANTED_TOKEN", BEARER)


def settings(url: str) -> list[str]:
    """All kinds of secrets at once."""
    address = url.replace("http://", f"http://me:{PASSWORD}@") + f"/${{oc.env:PLANTED_PATH}}/score?api_key={QUERY}"
    return [
        "reward=http",
        f"reward.http.url={quoted(address)}",
        "reward.http.token_env=PLANTED_TOKEN",
        "reward.http.retries=0",
        "logging.wandb_kwargs={notes:'by ${oc.env:PLANTED_PATH}'}",
        f"task.chat_template_kwargs={{service_key:{OPTION}}}",
    ]


def everything(folder: Path) -> dict[str, bytes]:
    """Each file below the folder, as it is, and W&B's own without its borders."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return found | {
        f"{name} decoded": b"".join(_payloads(data)) for name, data in found.items() if name.endswith(".wandb")
    }


def test_no_file_of_a_run_and_no_line_shows_a_planted_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(asked: dict[str, Any]) -> Any:
        broken = len(server.asked) > 12
        return (401, {}, f"Bearer {BEARER} may not".encode()) if broken else rewards_by_length(asked)

    with serving(some) as server:
        words = [*FAKE, "runtime=local", "steps=8", *settings(server.url), "task.heldout_size=8", f"run_dir={tmp_path}"]
        words = [word for word in words if "wandb_kwargs" not in word and "chat_template" not in word]
        monkeypatch.setattr("sys.argv", ["asyncrlhf", "train", *words])
        assert main(["train", *words, "logging.wandb=offline", "logging.progress=plain"]) == 1, "its rewards fail"
    assert server.paths[0] == f"/{PATH_PART}/score?api_key={QUERY}"
    sent = {base64.b64encode(f"me:{PASSWORD}".encode()).decode(), BEARER}
    assert any(word in server.headers[0]["Authorization"] for word in sent), "the service got the true values"

    files, said = everything(tmp_path), capsys.readouterr()
    assert {"config.yaml", "summary.json", "error.txt", "metrics.jsonl"} <= files.keys()
    assert any(name.endswith(".wandb decoded") for name in files)
    shown = {**files, "stdout": said.out.encode(), "stderr": said.err.encode()}
    assert {name for name, data in shown.items() for secret in PLANTED if secret.encode() in data} == set()
    assert "401 Unauthorized" in said.err, "the cause is told"
    http = yaml.safe_load(files["config.yaml"])["reward"]["http"]
    assert http["url"].endswith("/${oc.env:PLANTED_PATH}/score?api_key=***") and http["token_env"] == "PLANTED_TOKEN"


def test_the_trace_of_an_error_shows_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries put the addresses that they were given into their errors."""

    async def refused(*_: Any) -> None:
        raise OSError(f"no answer from https://me:{PASSWORD}@store.example/{PATH_PART}?sig={QUERY}")

    hide(PATH_PART)
    monkeypatch.setattr(LearnLoop, "_step", refused)
    words = [*FAKE, *QUIET, "runtime=local", f"run_dir={tmp_path}"]
    assert main(["train", *words]) == 1
    trace, said = (tmp_path / "error.txt").read_text(), capsys.readouterr()
    assert "OSError" in trace and "store.example" in trace
    shown = {**everything(tmp_path), "stdout": said.out.encode(), "stderr": said.err.encode()}
    assert {name for name, data in shown.items() for secret in PLANTED if secret.encode() in data} == set()


def test_a_config_that_is_shown_hides_what_is_secret_and_nothing_else() -> None:
    config = load_config(settings("http://host:80"))
    assert config.reward.http.url == f"http://me:{PASSWORD}@host:80/{PATH_PART}/score?api_key={QUERY}"
    shown = to_plain(config)
    assert shown["reward"]["http"]["url"] == f"http://{HIDDEN}@host:80/${{oc.env:PLANTED_PATH}}/score?api_key={HIDDEN}"
    assert shown["logging"]["wandb_kwargs"] == {"notes": "by ${oc.env:PLANTED_PATH}"}
    assert shown["task"]["chat_template_kwargs"] == {"service_key": HIDDEN}
    del shown["reward"], shown["logging"]["wandb_kwargs"], shown["task"]["chat_template_kwargs"]
    plain = to_plain(load_config([]))
    del plain["reward"], plain["logging"]["wandb_kwargs"], plain["task"]["chat_template_kwargs"]
    assert shown == plain


def test_what_was_hidden_is_not_read_back_as_a_value(tmp_path: Path) -> None:
    text = yaml.safe_dump(to_plain(load_config(settings("http://host:80"))))
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "controller.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"does not show the value of \S+, which is secret; give \S+=VALUE again"):
        config_of_run(tmp_path, [])
    given = ["reward.http.url=http://other:81/", "task.chat_template_kwargs.service_key=new"]
    config = config_of_run(tmp_path, given)
    assert config.reward.http.url == "http://other:81/"
    assert config.logging.wandb_keywords["notes"] == f"by {PATH_PART}", "what came out of the environment does so again"


def test_a_sweep_writes_no_secret_and_a_changed_one_is_another_job(tmp_path: Path) -> None:
    overrides = [*settings("http://host:80"), "sweep.seeds=1", "steps=3,4"]
    plan = plan_sweep(overrides)
    tmp_path.joinpath("x").mkdir()
    SweepRecord(tmp_path / "x", plan).save()
    text = (tmp_path / "x" / "sweep.json").read_text()
    assert [secret for secret in PLANTED if secret in text] == []
    assert len(json.loads(text)["jobs"]) == 2
    other = plan_sweep([word.replace(QUERY, "another-key") for word in overrides])
    assert {job.hash for job in plan.jobs}.isdisjoint(job.hash for job in other.jobs)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://u:p@ss@host/x?a=1 now", "at https://***@host/x?a=1 now"),
        ("https://hf_abc@host", "https://***@host"),
        ("GET http://h/p?a=1&api_key=abcd&b=2 failed", "GET http://h/p?a=1&api_key=***&b=2 failed"),
        ("'http://h/?access_token=ab.cd'.", "'http://h/?access_token=***'."),
        ("Authorization: Bearer abc.def-12", "Authorization: Bearer ***"),
        (
            "mail me@host, learner.token_budget=5, http://host/path",
            "mail me@host, learner.token_budget=5, http://host/path",
        ),
    ],
)
def test_credentials_in_any_text_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_short_and_ordinary_words_are_not_taken_for_secrets() -> None:
    for word in ("", "abc", "true", "None", "8000"):
        hide(word)
    assert redact("abc true None 8000") == "abc true None 8000"
    hide("a longer one")
    assert redacted({"path": ["see a longer one"], "count": 3}) == {"path": ["see ***"], "count": 3}


def test_a_secret_that_contains_another_is_hidden_whole() -> None:
    for secret in ("sesame-1", "sesame-1-and-more"):
        hide(secret)
    assert redact("first sesame-1-and-more, then sesame-1") == "first ***, then ***"


def test_a_folder_out_of_the_environment_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_FOLDER", str(tmp_path / "run"))
    done = run_module.train(
        load_config([*QUIET, *FAKE, "runtime=local", "steps=1", "run_dir=${oc.env:PLANTED_FOLDER}"])
    )
    assert done["run_dir"] == str(tmp_path / "run")
