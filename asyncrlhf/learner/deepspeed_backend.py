"""The DeepSpeed training backend: the torch backend's step over weights and optimizer states that ZeRO shards."""

from __future__ import annotations

from asyncrlhf.learner.deepspeed_updater import DeepSpeedUpdater
from asyncrlhf.learner.optim import Updater
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.learner.ulysses import SequenceParallel


class DeepSpeedBackend(TorchBackend):
    """``learner.zero_stage`` 0 to 3 (ZeRO, 1910.02054): the same step as ``TorchBackend`` up to rounding.

    Critic and reference are sharded like the policy. The slow target network lies whole on every rank, and a rank
    loads the whole model into host memory before it keeps its shard. Policy and critic are split over tokens where
    ``learner.sequence_parallel_size`` asks for it; frozen models then pass the whole of a share on each of its ranks.
    """

    def _make_updater(self) -> Updater:
        updater = DeepSpeedUpdater(self.config, self.model, self.policy, self.critic, self.device, self.ranks)
        if self.sequence_peers.ranks > 1:
            sequence = SequenceParallel(self.model, self.sequence_peers, updater.ulysses())
            for module in (self.policy, *(() if self.critic is None else (self.critic,))):
                module.split(sequence)
        return updater
