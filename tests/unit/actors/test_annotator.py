"""What a reward worker's process loads: a rule needs no torch, and a worker of rules starts without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCORE = """
import pickle, sys
import numpy as np
from asyncrlhf.actors.annotator import RewardSpec
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.types import Rollout

worker = RewardSpec(RewardConfig(), TaskConfig(), ModelConfig(), 8).build()
tokenizer = load_tokenizer(ModelConfig())
prompt = build_task(TaskConfig(), tokenizer).train_source(0).next()
ids = np.array(tokenizer.encode(prompt.answer, add_special_tokens=False))
zeros = np.zeros(len(ids))
rollout = Rollout(0, 0, prompt, ids, zeros, zeros.astype(int), "stop", response_text=prompt.answer)
((annotation,), _) = worker.annotate([pickle.loads(pickle.dumps(rollout))])
assert annotation.reward == 1.0, annotation
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "deepspeed", "vllm", "ray"}))
"""


def test_a_reward_by_rule_imports_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCORE],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[-2] == "['ray']", "only Ray, for the actor around it"


@pytest.mark.in_turn
@pytest.mark.more
def test_the_limit_of_threads_holds_for_a_torch_that_a_users_function_imports() -> None:
    code = (
        "from asyncrlhf.actors.annotator import limit_threads\n"
        "limit_threads(1)\n"
        "import torch\n"
        "print(torch.get_num_threads())\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.strip() == "1", done.stderr[-2000:]
