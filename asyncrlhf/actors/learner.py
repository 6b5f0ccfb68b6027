"""One rank of the learner group: a training backend, and on rank 0 the sender of its weights."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch

from asyncrlhf.actors.messages import Address, Offer, Told, resolved
from asyncrlhf.actors.part import PartActor
from asyncrlhf.actors.where import keep_to, name_interface
from asyncrlhf.data.checkpoint_manifest import Seals
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.packing import empty_batch, pack
from asyncrlhf.learner.settings.algorithm import check_earned
from asyncrlhf.learner.settings.learner_config import BackendSpec, StepResult
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.records.write.rollout_tokens import TokenRecord, sampled
from asyncrlhf.records.write.spans import SHORT_WAIT, Lane, SpanBatch
from asyncrlhf.transport.audit import tensor_digests
from asyncrlhf.transport.build_transport import build_sender, lay_out
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.transport.sender import WeightSender
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import Rollout, RolloutInfo, TrainSample

if TYPE_CHECKING:
    # Training imports take seconds. The driver of a Ray run uses only names of this module and does not need them: the
    # learner's process imports them when it builds the worker.
    from asyncrlhf.learner.step.plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class LearnerSpec(BackendSpec):
    """Everything that a rank needs to start on any machine."""

    model: ModelConfig
    runtime: str
    weights: WeightsConfig
    seed: int
    tokens_folder: Path | None = None  # of rollout_tokens/*.parquet; None: they are not written
    tokens_sampled: int = 0  # rollouts per step written there, over all ranks
    makes_room: bool = False  # for checkpoints; the run will write some
    offloads: bool = False  # offload between turns on devices shared with generators

    def recorded(self, rollouts: Sequence[RolloutInfo]) -> dict[str, list[int]]:
        """The argument ``recorded`` of :meth:`LearnerWorker.train`, the same for every rank."""
        if self.tokens_folder is None:
            return {}
        return {"recorded": sampled([r.rollout_id for r in rollouts], self.tokens_sampled, self.seed)}


def load_models(spec: LearnerSpec, device: str) -> dict[str, Any]:
    """``model``, ``reference`` and ``files`` of a :class:`TorchBackend`: without weights if it reads its shards itself,
    else whole. The trained model is float32, a frozen reference has the model's own dtype."""
    from asyncrlhf.models.pretrained import load_blank, load_policy
    from asyncrlhf.models.vocabulary import limit_vocabulary

    learner, own_reference = spec.learner, spec.algorithm.needs_reference and not spec.reference_served
    kinds = {"model": torch.float32} | ({"reference": getattr(torch, spec.model.dtype)} if own_reference else {})
    if learner.sharded and spec.algorithm.anchor != "ema":
        blank = {name: found for name, dtype in kinds.items() if (found := load_blank(spec.model, dtype))}
        if len(blank) == len(kinds):
            limit_vocabulary(spec.model, *(model for model, _ in blank.values()))
            return {name: model for name, (model, _) in blank.items()} | {"files": blank["model"][1]}
    # A rank that keeps a part cuts it out of host memory: the whole model may be too large for its device.
    place = "cpu" if learner.sharded else device
    return {name: load_policy(spec.model, place, dtype) for name, dtype in kinds.items()}


class LearnerWorker:
    """A rank without Ray. ``train`` and ``transfer`` may run in two threads: they share only the snapshot."""

    def __init__(self, spec: LearnerSpec, rank: int = 0, ranks: int = 1, address: str = "") -> None:
        from asyncrlhf.learner.asleep import RankSleep
        from asyncrlhf.learner.deterministic import deterministic
        from asyncrlhf.learner.ranks import init_process_group
        from asyncrlhf.learner.torch_backend import TorchBackend
        from asyncrlhf.transport.shard_snapshot import ShardSnapshot

        self.rank = rank
        self._model = spec.model
        # Fields that an empty share would otherwise lack.
        self._algorithm, self._by_turn = spec.algorithm, spec.algorithm.credit == "turn"
        self._no_share = empty_batch(reference=spec.reference_served, values=spec.critic_served, turns=self._by_turn)
        device = "cuda" if spec.learner.gpus > 0 else "cpu"
        if ranks > 1:
            init_process_group(rank, ranks, address, device=device)
        torch.manual_seed(spec.seed)
        self._deterministic = partial(deterministic, spec.learner.deterministic)
        with self._deterministic():
            self.backend = TorchBackend(spec=spec, **load_models(spec, device), rank=rank, ranks=ranks, device=device)
        self._sleep = RankSleep(self.backend)
        self._sharded: ShardSnapshot | None = None  # how weights are published that no rank holds whole
        if (shards := self.backend.shards) is not None:
            manifest, weights = lay_out(spec.weights, shards.layout()), spec.weights
            options: dict[str, Any] = {"seconds": weights.timeout_seconds, "keeps": weights.sparse}
            self._sharded = ShardSnapshot(shards, manifest, device, rank=rank, ranks=ranks, **options)
        self.sender: WeightSender | None = None
        self._critic_sender: WeightSender | None = None
        if rank == 0:
            if spec.critic_served:
                beside = spec.weights.beside_the_policy(spec.runtime)
                self._critic_sender = build_sender(beside, spec.runtime, self.backend.critic_parameters())
            self.sender = build_sender(spec.weights, spec.runtime, self._offered())
            self.backend.updater.before_update = lambda: self._fence()
        self._fence_seconds = 0.0
        self._tokens: TokenRecord | None = None
        self._makes_room = spec.makes_room
        self._token_parts: Sequence[Future[None]] = ()  # of the newest checkpoint
        if spec.tokens_folder is not None and self.backend.share_peers.rank == 0:
            self._tokens = TokenRecord(spec.tokens_folder, rank, partial(load_tokenizer, spec.model))

    @property
    def version(self) -> int:
        """The policy version."""
        return self.backend.policy_version

    def train(
        self, chosen: Sequence[tuple[Address, float, float, int]], *bundles: Any, recorded: Collection[int] = ()
    ) -> StepResult:
        """One learner step. ``chosen``: (address, reward, weight, masked_before_version) of each rollout of this rank's
        share of the batch; empty if there are fewer groups than shares. ``bundles``: of rollouts, and of the arrays
        that services computed for them, which are joined here. ``recorded``: ids of the rollouts whose tokens the rank
        that trains them records."""
        check_earned(self._algorithm, (reward for _, reward, *_ in chosen))
        self.wake()
        rollouts = resolved([address for address, *_ in chosen], bundles)
        samples = [
            TrainSample(rollout, reward, weight, masked)
            for rollout, (_, reward, weight, masked) in zip(rollouts, chosen, strict=True)
        ]
        self.backend.observe = partial(self._record, {i: r for r in rollouts if (i := r.rollout_id) in recorded})
        with self._deterministic():
            result = self.backend.train_step(pack(samples, turns=self._by_turn) if samples else self._no_share)
        if self._makes_room:
            self._makes_room = False
            self.backend.make_room()
        return result

    def _record(self, rollouts: Mapping[int, Rollout], plan: StepPlan) -> None:
        if self._tokens is not None and rollouts:
            from asyncrlhf.learner.step.token_facts import token_facts

            rows = token_facts(plan, self.backend.algorithm, rollouts)
            own = (rollouts[row["rollout_id"]] for row in rows)
            told = ({"prompt": rollout.prompt.text, "stayed": rollout.stayed} for rollout in own)
            self._tokens.add(self.version, [row | more for row, more in zip(rows, told, strict=True)])

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Offer:
        """Copy the present weights for publishing, while the next step's passes run; its update waits for the copy.

        Only rank 0 is asked, or all ranks together if they hold shards (``learner.sharded``): then each rank has copied
        its own parts when this returns, and rank 0 gathers them later, during the next steps.
        """
        started = time.monotonic()
        with self._awake():
            self._copy()
            seconds, self._fence_seconds = time.monotonic() - started + self._fence_seconds, 0.0
            return Offer(seconds, None if probe is None else self.backend.score(probe), self.backend.note)

    def _copy(self) -> None:
        if self.sender is not None:
            self.sender.begin_snapshot(self.backend.policy_version, self._offered())
        elif self._sharded is not None:
            self._sharded.take()
        if self._critic_sender is not None:
            self._critic_sender.begin_snapshot(self.backend.policy_version, self.backend.critic_parameters())

    def sleep(self) -> int:
        """End the learner's turn on a shared device and offload its tensors. Returns the
        bytes that stay there: copies that others still fetch. A call that needs the weights in between brings
        them back for its duration. Each rank does this independently."""
        if self.sender is not None:
            self._fence()
        self._sleep.sleep()
        senders = [sender for sender in (self.sender, self._critic_sender) if sender is not None]
        kept = [bucket for sender in senders for bucket in sender.buckets.memory]
        return self._sleep.kept_bytes([*kept, *(() if self._sharded is None else self._sharded.parts)])

    def wake(self) -> None:
        """Bring the offloaded tensors back, bit for bit."""
        self._sleep.wake()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        asleep = self._sleep.asleep
        self.wake()
        try:
            yield
        finally:
            if asleep:
                self.sleep()

    def _offered(self) -> Mapping[str, torch.Tensor]:
        return self.backend.parameters() if self._sharded is None else self._sharded

    def _fence(self) -> None:
        """Wait until no transfer or save reads the parameters any more."""
        self._fence_seconds += self.require_sender().fence()
        if self._critic_sender is not None:
            self._fence_seconds += self._critic_sender.fence()

    def require_sender(self) -> WeightSender:
        assert self.sender is not None, "only rank 0 sends weights"
        return self.sender

    def listen(self, host: str) -> str:
        """Open the rendezvous of the weight group on this machine's address ``host``; returns its endpoint."""
        return self.require_sender().listen(host)

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        """Form the weight group of ``epoch``. Raises LostReceiversError naming the receivers that did not join."""
        self.require_sender().connect(endpoint, list(receivers), epoch)

    def ticket(self) -> Ticket:
        """The ticket of the newest snapshot for the present weight group."""
        return self.require_sender().ticket()

    def transfer(self, ticket: Ticket) -> TransferStats:
        """Send the snapshot to all receivers of the group. Raises LostReceiversError naming the lost ones."""
        return self.require_sender().transfer(ticket)

    def critic_ticket(self) -> Ticket:
        """The ticket of the critic at the newest snapshot; valid as long as a copy of it exists."""
        assert self._critic_sender is not None, "there is no critic service"
        return self._critic_sender.ticket()

    def digests(self, dtype: str) -> dict[str, str]:
        """Digests of the newest version sent, in the dtype of a generator's engine, which must hold the same."""
        return tensor_digests(self.require_sender().tensors(), getattr(torch, dtype))

    def keep_to(self, cores: Collection[int]) -> None:
        """Bind all threads of this rank's process to the cores."""
        keep_to(cores)

    def sees(self, path: str) -> bool:
        """Whether this rank's machine has the path."""
        return Path(path).exists()

    def save(self, folder: Path) -> None:
        """Copy this rank's part of a checkpoint; the rank's next step need not wait for :meth:`saved`. It includes the
        tokenizer, so that ``from_pretrained`` can read ``folder/model``."""
        if self._tokens is not None:  # a part ends with each checkpoint
            self._token_parts = self._tokens.end_part()
        with self._awake():
            self.backend.begin_save(folder)
        if self.rank == 0:
            self.backend.writer.submit(lambda: load_tokenizer(self._model).save_pretrained(folder / "model"))

    def saved(self) -> Seals:
        """Wait until the copy of :meth:`save` is on disk; returns the seals of the files, by their paths within the
        folder. Raises CheckpointError if one could not be written."""
        for part in self._token_parts:
            part.result()
        return self.backend.writer.end()

    def load(self, folder: Path) -> None:
        if self.sender is not None:
            self._fence()
        with self._awake():
            self.backend.load(folder)

    def close(self) -> None:
        if self._tokens is not None:
            self._tokens.close()
        for sender in (self.sender, self._critic_sender):
            if sender is not None:
                sender.close()
        if self._sharded is not None:
            self._sharded.close()


class LearnerLanes:
    """The spans of a rank; on rank 0 also those of transfers beside its steps, as the part ``publisher``."""

    KINDS = frozenset(("train", "snapshot", "save"))  # methods, and the kinds of their spans

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic, short_wait: float = SHORT_WAIT) -> None:
        self._steps = Lane(f"learner-{rank}", clock, short_wait)
        self._transfers = Lane("publisher", clock, short_wait) if rank == 0 else None

    @contextmanager
    def during(self, method: str, worker: Any, arguments: Sequence[Any]) -> Iterator[None]:
        """Within this context the worker runs ``method``."""
        if method == "transfer" and self._transfers is not None:
            with self._transfers.during("transfer", arguments[0].version):
                yield
        elif method in self.KINDS:
            with self._steps.during(method, worker.version, len(arguments[0]) if method == "train" else 0):
                yield
        else:
            yield

    def take(self, asked: float | None = None) -> list[SpanBatch]:
        return [lane.take(asked) for lane in (self._steps, self._transfers) if lane is not None]


class LearnerActor(PartActor):
    """The Ray actor around one rank; it has several threads, so that a transfer runs beside the next step."""

    def __init__(self, spec: LearnerSpec, rank: int, ranks: int) -> None:
        torch.set_num_threads(spec.learner.threads)
        self._spec, self._rank, self._ranks = spec, rank, ranks
        self._worker: LearnerWorker
        self._snapshots = 0
        self._snapshot_made = threading.Condition()
        self._lanes = LearnerLanes(rank)

    def rendezvous(self) -> str:
        """``host:port`` on this rank's machine, where the ranks' process group can meet."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def setup(self, address: str) -> bool:
        """Join the learner's process group at ``address`` (all ranks together) and load the model."""
        if self._ranks > 1:
            name_interface()
        self._worker = LearnerWorker(self._spec, self._rank, self._ranks, address)
        return True

    def call(self, method: str, *arguments: Any, snapshots: int = 0, **keywords: Any) -> Any:
        """``snapshots``: how many were requested before this call, which waits for them: calls may begin in any
        order."""
        with self._snapshot_made:
            self._snapshot_made.wait_for(lambda: self._snapshots >= snapshots)
        torch.set_num_threads(self._spec.learner.threads)  # OpenMP counts by thread, and each call may have another
        try:
            with self._lanes.during(method, self._worker, arguments):
                return super().call(method, *arguments, **keywords)
        finally:
            if method == "snapshot":
                with self._snapshot_made:
                    self._snapshots += 1
                    self._snapshot_made.notify_all()

    def step(self, *arguments: Any, snapshots: int, **keywords: Any) -> Told[StepResult]:
        """As :meth:`call` of ``train``; the answer includes the rank's spans since its previous step."""
        asked = time.monotonic()
        result = self.call("train", *arguments, snapshots=snapshots, **keywords)
        return Told(result, self._lanes.take(asked))

    def close(self) -> list[SpanBatch]:
        return [*super().close(), *self._lanes.take()]
