"""How an episode with tools is opened: as an answer of the same task, but for the tools."""

from __future__ import annotations

import pytest

from asyncrlhf.actors.episodes import EpisodeSpec
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.episodes.driver import Driver
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.tasks.task import PromptEncoder
from tests import worlds

MODEL = ModelConfig(path="tiny_tools")


@pytest.mark.parametrize("given", ["3*4=", [{"role": "user", "content": "3*4="}]], ids=["text", "conversation"])
def test_template_and_system_prompt_stay(given: object) -> None:
    """The chat template of this model shows no tools, so that both openings are the same tokens."""
    template = "compute {prompt}" if isinstance(given, str) else "{prompt}"
    task = TaskConfig(chat_template=True, system_prompt="be right", prompt_template=template)
    prompt = PromptEncoder(load_tokenizer(MODEL), task)("p", given)  # type: ignore[arg-type]
    driver = EpisodeSpec(EpisodeConfig(tools=["calculator"]), task, MODEL, 128).driver(inline=True)
    assert isinstance(driver, Driver)
    opened, asked = driver._opening(prompt, driver._world.environment({}), None)
    assert opened.token_ids.tolist() == prompt.token_ids.tolist()
    assert opened.messages == prompt.messages
    assert [message["role"] for message in asked] == ["system", "user"]


def test_the_environment_of_the_check_before_a_run_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[worlds.Sums] = []

    async def close(self: worlds.Sums) -> None:
        closed.append(self)

    monkeypatch.setattr(worlds.Sums, "close", close)
    driver = EpisodeSpec(EpisodeConfig(environment="tests.worlds:Sums"), TaskConfig(), MODEL, 128).driver(inline=True)
    driver.check(PromptEncoder(load_tokenizer(MODEL), TaskConfig())("p", "3*4="))
    assert len(closed) == 1


def test_a_row_that_chooses_no_environment_is_a_wrong_input() -> None:
    task = TaskConfig(chat_template=True)
    driver = EpisodeSpec(EpisodeConfig(environment="tests.worlds:SEVERAL"), task, MODEL, 128).driver(inline=True)
    with pytest.raises(ConfigError, match="column environment says None"):
        driver.check(PromptEncoder(load_tokenizer(MODEL), task)("p", "3*4="))
