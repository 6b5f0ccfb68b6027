"""Two processes take turns as learner and generator do under ``cluster.placement=flatten`` with ``cluster.offload``:
the private memory of the one that sleeps, by the system's own count."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.learner.asleep import RankSleep
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.types import GenerationRequest, Prompt, SamplingParams
from tests.unit.learner.test_asleep import anonymous
from tests.unit.learner.worlds import llama, random_batch

TURNS = 20
# 13 million parameters: 50 MB of weights, 200 MB of a learner's state.
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 5, "num_key_value_heads": 4}
WEIGHTS = 4 * 13_110_784


def model() -> LlamaForCausalLM:
    return llama(**SHAPE)


class Learner:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "weights.safetensors"
        self._backend = TorchBackend(
            model(), BackendSpec(learner=LearnerConfig(learning_rate=1e-3), algorithm=AlgorithmConfig(), steps=TURNS)
        )
        self._sleep = RankSleep(self._backend)

    def turn(self, number: int) -> None:
        self._sleep.wake()
        self._backend.train_step(random_batch(seed=number))
        save_file({name: tensor.clone() for name, tensor in self._backend.parameters().items()}, self._file)

    def sleep(self) -> None:
        self._sleep.sleep()


class Generator:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "weights.safetensors"
        self._engine = HFEngine(model().eval(), slots=8, offloads=True)

    def turn(self, number: int) -> None:
        self._engine.wake()
        self._engine.load_weights(number, load_file(self._file), "keep")
        prompt, sampling = Prompt("", "", np.arange(3, 9)), SamplingParams(max_completion_length=8)
        self._engine.submit([GenerationRequest(8 * number + i, i, prompt, i, sampling) for i in range(8)])
        while self._engine.in_flight():
            for rollout in self._engine.step(0.0).finished:
                assert set(rollout.policy_versions.tolist()) == {number}

    def sleep(self) -> None:
        self._engine.sleep()


def part(kind: Callable[[Path], Any], folder: Path, pipe: Any) -> None:
    """The process of one part: answers each turn with its private bytes awake and asleep."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    before = anonymous()
    own = kind(folder)
    own.sleep()
    pipe.send((before, anonymous()))
    while (number := pipe.recv()) is not None:
        own.turn(number)
        awake = anonymous()
        own.sleep()
        pipe.send((awake, anonymous()))


@pytest.mark.thorough
def test_two_processes_alternate_and_the_sleeper_holds_next_to_nothing(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes, before = [], [], []
    for kind in (Learner, Generator):
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=part, args=(kind, tmp_path, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
        before.append(ours.recv()[0])
    found: list[list[tuple[int, int]]] = [[], []]
    for number in range(TURNS):
        for side, pipe in enumerate(pipes):
            pipe.send(number)
            found[side].append(pipe.recv())
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(60)
    for name, start, turns, state in zip(("learner", "generator"), before, found, (4, 1), strict=True):
        awake, asleep = (max(values) - start for values in zip(*turns, strict=True))
        print(f"{name}: {awake / 2**20:.0f} MiB above its imports awake, {asleep / 2**20:.0f} MiB asleep")
        assert awake > 0.9 * state * WEIGHTS
        assert asleep < 0.5 * WEIGHTS, f"the sleeping {name} keeps {asleep / 2**20:.0f} MiB"
