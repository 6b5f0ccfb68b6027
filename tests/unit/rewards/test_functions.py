"""Loading a reward function by name: what works, and one sentence for each thing that can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.plugins import load_function

SOURCE = """
def good(prompts, completions, **kwargs):
    return [float(c == a) for c, a in zip(completions, kwargs["answer"])]

class Callable:
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)

an_object = Callable()
a_number = 3"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_reward_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unit_test_reward.py").write_text(SOURCE)
    (tmp_path / "unit_test_broken_reward.py").write_text("import no_such_module_anywhere")
    monkeypatch.chdir(tmp_path)
    # load_function puts the working directory on the path; monkeypatch takes it off again.
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_function_of_the_working_directory_loads() -> None:
    function = load_function("reward.target", "unit_test_reward:good")
    assert function(prompts=["p", "p"], completions=["1", "2"], answer=["1", "1"]) == [1.0, 0.0]
    assert load_function("reward.target", "unit_test_reward:an_object")(prompts=["p"], completions=["1"]) == [1.0]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("unit_test_reward", "not of the form package.module:function"),
        (":good", "not of the form package.module:function"),
        ("unit_test_reward:", "not of the form package.module:function"),
        ("/some/where/mine.py:good", r"names a file; allowed: its module, mine:good, with /some/where/ as the working"),
        ("unit_test_no_such_file:good", "cannot be imported: ModuleNotFoundError"),
        ("unit_test_broken_reward:good", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module"),
        ("unit_test_reward:goood", "has no 'goood'"),
        ("unit_test_reward:a_number", "is not a function but int"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_function("reward.target", target)
    assert target in str(caught.value)
    assert "\n" not in str(caught.value)
