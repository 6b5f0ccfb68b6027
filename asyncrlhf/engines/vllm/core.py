"""vLLM inside this process: its start, and the calls to it that an engine needs."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psutil
import torch

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import misfit
from asyncrlhf.engines.generator_config import VLLM_MAX_TOP_K, GeneratorConfig
from asyncrlhf.engines.vllm.adapter import (
    adapter_arguments,
    adapter_files,
    adapter_request,
    check_applied,
    ignored_layers,
    remove_adapter,
    write_adapter,
    zero_adapter,
)
from asyncrlhf.engines.vllm.transfer import BACKEND, merge_shares, register, sample_below, worker_tensors
from asyncrlhf.errors import ConfigError, WeightSyncError
from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.rewards.judge import end_with_parent, starting_vllm
from asyncrlhf.types import GenerationRequest, IntArray, SamplingParams

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

SCORE_SLOTS = 4  # texts scored at once, in further slots: an audit does not wait for a sequence to end
RAY_BUNDLES = "VLLM_RAY_BUNDLE_INDICES"  # vLLM's own; beside it VLLM_RAY_PER_WORKER_GPUS, 1 unless told
TIES = 8  # log-probs requested beyond top_k: vLLM keeps all tokens that tie with the last
# The extension of vLLM's workers, by name: this layer does not import transports.
WORKER_EXTENSION = "asyncrlhf.transport.vllm_workers.WeightReceiving"
MEMORY_SHARE = 0.9  # of a GPU that only the replica uses
CHUNK_BYTES = 64 << 20  # of one update to workers in other processes, which copies its tensors


class VllmCore:
    """An ``LLMEngine`` that the caller's thread steps.

    Not ``AsyncLLM``: its core steps in a separate process, so the tokens before and after an update are known
    only after the outputs were drained. Here no code runs between two steps; an update is exact by construction,
    weights pass by reference to a worker in this process, and no token crosses a socket. ``AsyncLLM`` prepares the next
    step during the model's work; on GPUs vLLM's asynchronous scheduling does that here too.
    """

    def __init__(
        self, config: GeneratorConfig, model: ModelConfig, routes: bool = False, sampled: int | None = None
    ) -> None:
        """``routes``: results report the experts of each token. ``sampled``: ids from this one on have no probability;
        None: all have some."""
        with starting_vllm("generator.engine=vllm", config.vllm.workers if config.gpus == 0 else 1):
            from vllm import SamplingParams
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
            from vllm.v1.executor import Executor

            register()
            settings = _known(EngineArgs, engine_arguments(config, model, routes)).create_engine_config()
            self._generation_kwargs = dict(config.generation_kwargs or {})
            _known(SamplingParams, self._generation_kwargs)
            self._llm = LLMEngine(settings, Executor.get_class(settings), log_stats=False, multiprocess_mode=False)
        self.context = int(settings.model_config.max_model_len)
        self._vocabulary = int(settings.model_config.get_vocab_size())
        self.folder = str(settings.model_config.model)
        self.trust_remote_code = model.trust_remote_code
        self.in_process = settings.parallel_config.world_size == 1
        self.adapts = settings.lora_config is not None
        self.routes = routes
        self._lora = model.lora
        self._adapter: Any = None  # of each request
        self._sleep_level = config.vllm.sleep_level or 0
        self.can_sleep = self._sleep_level > 0
        if not self.in_process:
            self._llm.collective_rpc(end_with_parent)
        self._llm.collective_rpc("init_weight_transfer_engine", args=({},))
        if sampled is not None and sampled < self._vocabulary:
            call: Callable[..., Any] = self._llm.collective_rpc
            call(sample_below, args=(sampled,))
            self._vocabulary = sampled
        if self.adapts:  # a request that started without an adapter would go on without
            zero = zero_adapter(model)
            self._shapes = {name: tuple(tensor.shape) for name, tensor in zero.items()}
            self.load_adapter(0, zero)
            check_applied(self._llm.collective_rpc(ignored_layers))

    def generate(self, request: GenerationRequest, salt: str) -> None:
        """Queue a request under its rollout id; its prompt shares cached blocks with others of the same ``salt``."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        own = sampling_arguments(request, self._vocabulary)
        params = SamplingParams(**{**self._generation_kwargs, **own}, output_kind=RequestOutputKind.DELTA)
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=salt)
        self._llm.add_request(str(request.rollout_id), prompt, params, lora_request=self._adapter)

    def score(self, name: str, text: IntArray) -> None:
        """Queue a text whose own log-probs are wanted, at temperature 1."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        self._llm.add_request(name, tokens_input(text.tolist()), params, lora_request=self._adapter)

    def step(self) -> list[RequestOutput]:
        return self._llm.step()  # type: ignore[return-value]

    def abort(self, names: list[str]) -> None:
        self._llm.abort_request(names)

    def drain(self, take: Callable[[], None]) -> None:
        """Call ``take`` (which steps) until no batch is being computed, without starting another: with asynchronous
        scheduling or pipeline stages a batch is sampled before the step that returns its tokens."""
        core: Any = self._llm.engine_core.engine_core  # type: ignore[attr-defined]
        core.pause_scheduler(mode="keep", clear_cache=False)
        try:
            while core.batch_queue:
                take()
        finally:
            core.resume_scheduler()

    def join(self, weights: Any, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        """Have the workers join the weight group of ``epoch`` from ``rank`` on, by ``weights``; returns at once."""
        self._llm.collective_rpc("join_weights", args=(weights, endpoint, rank, world_size, epoch, name))

    def receive_weights(self, ticket: Any, names: Mapping[str, str], seconds: float) -> None:
        """Have the workers receive the weights of ``ticket`` from the group and load them, bucket by bucket, within
        ``seconds``. ``names``: each tensor's in the checkpoint. Raises WeightSyncError; the model is then torn."""
        try:
            errors = self._llm.collective_rpc("receive_weights", seconds, (ticket, dict(names)))
        except (RuntimeError, TimeoutError) as error:  # vLLM's error for a worker that died or hangs
            raise WeightSyncError(f"vLLM's workers did not load version {ticket.version}: {error}.") from error
        failed = [f"worker {i}: {error}" for i, error in enumerate(errors) if error]
        if failed:
            raise WeightSyncError(f"vLLM's workers did not load version {ticket.version}: {'; '.join(failed)}")
        self._llm.set_weight_version(str(ticket.version))

    def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load whole tensors by their checkpoint names through vLLM's weight-transfer interface."""
        call = self._llm.collective_rpc
        call("start_weight_update")
        for chunk in [tensors] if self.in_process else _chunks(tensors):
            call("update_weights", args=({"tensors": dict(chunk)},))
        call("finish_weight_update")
        self._llm.set_weight_version(str(version))
        if self.adapts:  # vLLM forgot the adapter of the former weights
            self.load_adapter(version, {name: torch.zeros(shape) for name, shape in self._shapes.items()})

    def load_adapter(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the adapter by these tensors, under PEFT's names, also for the requests in flight. Raises
        WeightSyncError if it is not the one of ``model.lora``, or if vLLM refuses it."""
        apart = misfit(self._shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        if apart:
            raise WeightSyncError(f"The adapter of version {version} is not that of model.lora: {apart}.")
        folder = os.path.join(tempfile.gettempdir(), f"asyncrlhf-adapter-{uuid.uuid4().hex}")
        call: Callable[..., Any] = self._llm.collective_rpc
        call(write_adapter, args=(folder, adapter_files(tensors, self._lora)))
        try:
            self._llm.add_lora(adapter_request(folder, load_inplace=True))
        except (ValueError, RuntimeError) as error:
            why = f"{error}; generator.vllm.enable_lora=false merges it into the weights instead"
            raise WeightSyncError(f"vLLM did not load the adapter of version {version}: {why}.") from error
        finally:
            call(remove_adapter, args=(folder,))
        self._adapter = adapter_request(folder)
        self._llm.set_weight_version(str(version))

    def forget_cache(self, *, running: bool) -> None:
        """Drop the prefix cache; with ``running`` also the keys and values of running requests, which are then
        prefilled again. Without it vLLM keeps their blocks while they run, and the salt hides them from others."""
        if running or not self._llm.has_unfinished_requests():
            self._llm.reset_prefix_cache(reset_running_requests=running)

    def sleep(self, *, keep_weights: bool = True) -> bool:
        """vLLM's sleep: it drops all keys and values; requests stay and are prefilled again. At level 1 the weights
        move to the host's memory; at level 2, used only without ``keep_weights``, they are dropped. Without
        ``sleep_level`` the devices keep everything. Returns whether the engine still has its weights."""
        level = 1 if keep_weights or self.adapts else self._sleep_level  # a load brings no base weights back
        if self.can_sleep:
            self._llm.sleep(level=level, mode="keep")
        return level == 1 or not self.can_sleep

    def wake(self, *, weights_only: bool = False) -> None:
        """Undo :meth:`sleep`. With ``weights_only`` vLLM steps no request."""
        if self.can_sleep:
            self._llm.wake_up(["weights"] if weights_only else None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by their checkpoint names, on the CPU, as the workers' kernels use them."""
        return merge_shares(self._llm.collective_rpc(worker_tensors))

    def close(self) -> None:
        self._llm.engine_core.shutdown()


def engine_arguments(config: GeneratorConfig, model: ModelConfig, routes: bool = False) -> dict[str, Any]:
    """The keywords of vLLM's ``EngineArgs``."""
    own = config.vllm
    on_cpu = config.gpus == 0
    folder = resolve(model.path)
    arguments: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype if own.dtype == "auto" else own.dtype,
        "generation_config": "vllm",  # no sampling defaults and no stop tokens from the checkpoint
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": VLLM_MAX_TOP_K + TIES,
        "max_num_seqs": config.slots + SCORE_SLOTS,
        "max_model_len": own.max_model_len or None,
        "gpu_memory_utilization": own.gpu_memory_utilization or MEMORY_SHARE,
        "enforce_eager": on_cpu,  # compiling takes minutes there
        "enable_prefix_caching": True,  # siblings share their prompt's
        # vLLM 0.32 reverts the draw of a partly prefilled request with a seed, which torch's CPU generator cannot do.
        "enable_chunked_prefill": False if on_cpu else None,
        "tensor_parallel_size": own.tensor_parallel_size,
        "pipeline_parallel_size": own.pipeline_parallel_size,
        # Several workers: on this machine, or in a placement group with a bundle per worker, named in the environment.
        "distributed_executor_backend": "uni" if own.workers == 1 else "ray" if os.environ.get(RAY_BUNDLES) else "mp",
        "enable_sleep_mode": bool(own.sleep_level),
        **adapter_arguments(config, model),
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_return_routed_experts": routes,
        "disable_log_stats": True,
    }
    arguments |= {"load_format": "safetensors", **(own.engine_kwargs or {})}
    if own.kv_cache_gb or on_cpu:
        arguments["kv_cache_memory_bytes"] = int(own.kv_cache_gb * 2**30) or _cpu_cache_bytes(config, folder, model)
    return arguments


def _known(kind: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """``kind``, a class of vLLM's, with these keywords; raises ConfigError for an unknown one."""
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        which = "generation_kwargs" if kind.__name__ == "SamplingParams" else "vllm.engine_kwargs"
        raise ConfigError(f"generator.{which} is refused by vLLM: {error}.") from error


def tells_kept(sampling: SamplingParams) -> bool:
    """Whether vLLM's log-probs name every token that truncated sampling kept: those that are finite. Under top-p or
    min-p their number, which would have to be requested, is unknown."""
    top_k_alone = 0 < sampling.top_k <= VLLM_MAX_TOP_K and sampling.top_p == 1 and sampling.min_p == 0
    return top_k_alone and sampling.temperature > 0


def sampling_arguments(request: GenerationRequest, vocabulary: int = 2**31) -> dict[str, Any]:
    """The keywords of vLLM's ``SamplingParams``: what a request samples, which log-probs it returns, when it ends."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": request.seed & (2**63 - 1),
        "max_tokens": sampling.max_completion_length,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # only the request's stop tokens end it
        # In addition to the sampled token's.
        "logprobs": min(sampling.top_k + TIES, vocabulary) if tells_kept(sampling) else 0,
        "detokenize": False,
    }


def _cpu_cache_bytes(config: GeneratorConfig, folder: str, model: ModelConfig) -> int:
    """Keys and values of all slots at full length, if a quarter of the free memory holds them; vLLM preempts if not."""
    from transformers import AutoConfig

    own = config.vllm
    shape: Any = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code).get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    itemsize = getattr(torch, model.dtype if own.dtype == "auto" else own.dtype).itemsize
    block = (own.engine_kwargs or {}).get("block_size") or 128
    blocks = -(-(own.max_model_len or shape.max_position_embeddings) // block)
    tokens = (config.slots + SCORE_SLOTS + 1) * blocks * block
    wanted = 2 * shape.num_hidden_layers * heads * width * itemsize * tokens // own.workers
    return min(wanted, psutil.virtual_memory().available // 4)


def _chunks(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    chunks: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if chunks[-1] and size + tensor.nbytes > CHUNK_BYTES:
            chunks.append({})
            size = 0
        chunks[-1][name] = tensor.cpu()
        size += tensor.nbytes
    return chunks
