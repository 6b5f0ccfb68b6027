"""Nonsense of every kind: one sentence, exit code 2, nothing started.

Values out of range and words that are no choice: tests/unit/config/test_settings_list.py has them of every setting.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import ray

from asyncrlhf.cli.main import main
from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.orchestrator import run as run_module

CODE = """
import torch

def exits(*_, **__):
    raise SystemExit(0)

def shorter(inputs):
    return inputs.policy_logprobs[:1]

def fixed(inputs):
    return torch.zeros(4)

def two(inputs, more):
    return inputs.policy_logprobs

class Sink:
    pass

number = 3
"""
SUMS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(30)]
GOOD = b"".join(json.dumps(row).encode() + b"\n" for row in SUMS)
LINE = GOOD.splitlines(keepends=True)[0]
PLACES = ("checkpoints", "rollouts", "spans", "rollout_tokens", "weights", "report", "wandb")
FILES = {
    "good.jsonl": GOOD,
    "latin.jsonl": GOOD + '{"prompt": "café", "answer": "1"}\n'.encode("latin-1"),
    "half.jsonl": GOOD + b'{"prompt": "1+1=\\ud800", "answer": "2"}\n',
    "cut.jsonl": GOOD + b'{"prompt": "1+1=", "ans',
    "array.jsonl": b'["1+1=", "2"]\n',
    "number.jsonl": b"3\n",
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "nul.jsonl": b"\x00\x00\x00\x00\n",
    "blank.jsonl": b"\n\n\n",
    "null.jsonl": b'{"prompt": null}\n',
    "texts.txt": b"1+1=\n",
    "cut.parquet": b"PAR1\x00\x00",
    "texts.jsonl": b'{"text": "1+1=2"}\n' * 9,
    "mixed.jsonl": b'{"text": "1"}\n{"text": ["1"]}\n',
    "pairs.jsonl": b'{"chosen": "1", "rejected": 2}\n' * 9,
    "nonsense_code.py": CODE.encode(),
    "nonsense_broken.py": b"def f(:\n",
    "conf/algorithm/list.yaml": b"- 1\n- 2\n",
    "conf/algorithm/text.yaml": b"just words\n",
    "conf/algorithm/binary.yaml": b"\xff\xfe\x00name",
    "conf/algorithm/twice.yaml": b"name: a\nname: b\n",
    "run/config.yaml": b"steps: [",
    "run/metrics.jsonl": b"",
    "list_run/config.yaml": b"- 1\n",
    "broken_run/metrics.jsonl": b'{"step": 1}\nnonsense\n{"step": 2}\n',
    "sweep/sweep.json": b"{",
    "folder_run/status.json/anything": b"",
    **{f"file_run_{name}/{name}": b"" for name in PLACES},
}
TASK = "task=prompts task.path="
LOSS = "algorithm.loss.target="
REWARD = "reward.kind=python reward.target="
TRAIN = [
    # counts, names, paths
    ("generator.groups={a:{replicas:100000}}", "generator.groups.a.replicas=100000 is out of range"),
    ("name=..", "name='..' must be a folder's name"),
    ("name=.", "name='.' must be a folder's name"),
    ("name=/", "name='/' must be a folder's name"),
    ("name=a\x00b", "a\\x00b"),
    ("name=" + "n" * 300, "must be a folder's name"),
    ("run_dir=a\x00b", "a\\x00b"),
    ("run_dir=" + "n" * 300, "is not a path"),
    ("run_dir=good.jsonl/run", "run_dir=good.jsonl/run cannot be written"),
    ("run_dir=/proc/nothing", "run_dir=/proc/nothing cannot be written"),
    ("checkpoint.resume=a\x00b", "a\\x00b"),
    ("checkpoint.resume=good.jsonl", "checkpoint.resume=good.jsonl holds no checkpoint"),
    # numbers
    ("stall_timeout_seconds=inf", "stall_timeout_seconds=inf is out of range"),
    ("model.lora.r=1000000", "model.lora.r=1000000 is over the model's hidden size; allowed: at most 128."),
    ("run_dir=folder_run", "run_dir=folder_run cannot be used: its status.json is a folder, and no file."),
    *((f"run_dir=file_run_{name}", f"run_dir=file_run_{name} cannot be used: its {name} is a file") for name in PLACES),
    ("checkpoint.resume='~/no_such_run'", f"checkpoint.resume={Path.home()}/no_such_run holds no checkpoint"),
    ("reward=http reward.http.url=http://localhost:9/x reward.http.retries=2147483647", "reward.http.retries=21474836"),
    ("logging.wandb_project=a/b", "logging.wandb_project='a/b' is no name of a W&B project"),
    ("seed=1e3", "seed=1000.0"),
    ("seed=0x10", "seed=0x10"),
    ("eval_every=often", "eval_every=often"),
    ("generator.slots=null", "generator.slots=null"),
    ("task.operations=[/]", "task.operations=/ is not known"),
    ("task.operations=[]", "task.operations is empty"),
    # combinations
    ("weights.disk_path='~/x'", f"weights.disk_path={Path.home()}/x is used only by weights.transport=disk"),
    ("weights.transport=disk weights.disk_path=a\x00b", "a\\x00b"),
    ("logging.wandb_project=", "logging.wandb_project='' is no name of a W&B project"),
    ("learner.sharding=fsdp2 model.lora.r=2", "model.lora.r=2 does not work with"),
    ("learner.zero_stage=2", "learner.zero_stage=2 needs learner.backend=deepspeed"),
    ("learner.ranks=64", "learner.ranks=64 makes 64 shares"),
    ("runtime=local generator.max_replicas=4", "max_replicas needs runtime=ray"),
    ("learner.ranks=3 learner.tensor_parallel_size=3", "cannot deal out this model's 4 attention heads"),
    ("learner.ranks=2 learner.expert_parallel_size=2", "has no expert-parallel plan for a model of the kind llama"),
    ("learner.ranks=5 learner.pipeline_parallel_size=5", "is more than the model's 4 decoder layers"),
    ("algorithm.beta=0.1", "algorithm.beta=0.1 has no effect under the other settings of algorithm=decoupled_grpo"),
    ("algorithm=rloo algorithm.epsilon=0.3", "allowed: algorithm.coef=clip, geoclip or dprob, or epsilon=0.2"),
    ("algorithm.minibatches=17", "algorithm.minibatches=17 is more than the 16 groups"),
    ("generator.top_p=0.9 generator.engine=vllm", "generator.top_p=0.9"),
    # data
    (TASK + "latin.jsonl", "latin.jsonl line 31 is not UTF-8"),
    (TASK + "half.jsonl", "half.jsonl line 31 has half a surrogate pair"),
    (TASK + "cut.jsonl", "cut.jsonl line 31 is not valid JSON"),
    (TASK + "array.jsonl", "array.jsonl line 1 is not a JSON object"),
    (TASK + "number.jsonl", "number.jsonl line 1 is not a JSON object"),
    (TASK + "deep.jsonl", "deep.jsonl line 1 is not valid JSON"),
    (TASK + "nul.jsonl", "nul.jsonl line 1 is not valid JSON"),
    (TASK + "blank.jsonl", "task.path=blank.jsonl holds no prompts"),
    (TASK + "null.jsonl", "null.jsonl line 1"),
    (TASK + "texts.txt", "task.path=texts.txt"),
    (TASK + "cut.parquet", "cut.parquet is not a Parquet file"),
    (TASK + "nonsense_code:number", "task.path=nonsense_code:number"),
    (TASK + "nonsense_code:nothing", "has no 'nothing'"),
    (TASK + "a\x00b.jsonl", "a\\x00b.jsonl"),
    (TASK + "good.jsonl task.prompt_key=question", "'question'"),
    (TASK + "good.jsonl task.prompt_template=x", "task.prompt_template='x' has no place for the prompt"),
    ("task.mixture={a:{path:good.jsonl}}", "task.mixture needs task.kind=prompts"),
    ("task=prompts task.mixture={a:3}", "task.mixture"),
    ("task=prompts task.mixture={a:{path:good.jsonl,weight:-1}}", "task.mixture.a"),
    # models
    ("model.path=cut_model", "model.safetensors is cut off: it has"),
    ("model.path=headless_model", "model.safetensors is not a complete safetensors file"),
    ("model.path=shardless_model", "model-00001-of-00002.safetensors is not a complete safetensors file"),
    ("model.path=other_model", "model.path=other_model could not be loaded"),
    ("model.path=json_model", "model.path=json_model could not be loaded"),
    ("model.path=tokenless_model", "model.path=tokenless_model could not be loaded"),
    ("model.path=seq_model", "seq_model has the model type vit"),
    ("model.path=good.jsonl", "model.path=good.jsonl is a file"),
    ("model.path=a\x00b", "a\\x00b"),
    ("model.lora.r=2 model.lora.target_modules=[nothing]", "model.lora.target_modules"),
    # code
    (LOSS + "os:system", "algorithm.loss.target=os:system fails on two sequences of two tokens: TypeError"),
    (LOSS + "sys:exit", "algorithm.loss.target=sys:exit fails on two sequences of two tokens: SystemExit"),
    (LOSS + "nonsense_code:exits", "nonsense_code:exits fails"),
    (LOSS + "nonsense_code:shorter", "returned a tensor of shape [1] for 4 tokens"),
    (LOSS + "nonsense_code:fixed", "returned a loss without gradient"),
    (LOSS + "nonsense_code:two", "cannot be called with one argument"),
    (LOSS + "nonsense_code:number", "is not a function but int"),
    (LOSS + "nonsense_broken:f", "nonsense_broken:f cannot be imported: SyntaxError"),
    (LOSS + "nobody:f", "nobody:f cannot be imported"),
    (LOSS + "pickle:good.jsonl", "cannot be read back"),
    (LOSS + "words", "names no function; allowed: package.module:function"),
    (REWARD + "os:system", "reward.target=os:system"),
    (REWARD + "sys:exit", "reward.target=sys:exit"),
    (REWARD + "nonsense_code:exits", "nonsense_code:exits"),
    ("logging.sinks=[nonsense_code:nothing]", "has no 'nothing'"),
    ("logging.sinks=[wandb,wandb]", "names a sink twice"),
    ("logging.sinks=[console]", "logging.sinks=console is not known"),
    ("learner.optim=os:system", "learner.optim=os:system"),
    ("learner.optim=nobody:f", "nobody:f cannot be imported"),
    # hosts
    ("reward=http reward.http.url=ftp://host/score", "reward.http.url=ftp://host/score"),
    ("reward=http reward.http.url=http://", "reward.http.url=http://"),
    ("reward=http reward.http.url=http://host:99999/score", "reward.http.url=http://host:99999/score"),
    ("reward=http reward.http.url=http://host:port/score", "reward.http.url=http://host:port/score"),
    # configuration files
    ("--config-dir=conf algorithm=list", "list"),
    ("--config-dir=conf algorithm=text", "just words"),
    ("--config-dir=conf algorithm=binary", "A config file"),
    ("--config-dir=conf algorithm=twice", "twice"),
    ("--config-dir=good.jsonl", "--config-dir good.jsonl is not a folder"),
]
OTHERS = [
    ("sft sft.path=latin.jsonl", "latin.jsonl line 31 is not UTF-8"),
    ("sft sft.path=half.jsonl", "half.jsonl line 31 has half a surrogate pair"),
    ("sft sft.path=cut.parquet", "sft.path=cut.parquet could not be read"),
    ("sft sft.path=mixed.jsonl", "sft.path=mixed.jsonl"),
    ("sft sft.path=deep.jsonl", "deep.jsonl line 1 is not valid JSON"),
    ("sft sft.path=blank.jsonl", "sft.path=blank.jsonl holds no rows"),
    ("sft sft.path=texts.jsonl model.path=cut_model", "model.safetensors is cut off"),
    ("reward-model reward_model.path=pairs.jsonl", "reward_model.path=pairs.jsonl"),
    ("reward-model reward_model.path=nowhere.jsonl", "reward_model.path=nowhere.jsonl does not exist"),
    ("reward-model", "reward_model.path is empty"),
    ("preferences preferences.noise=white", "preferences.noise=white is not known"),
    ("preferences model.path=cut_model", "model.safetensors is cut off"),
    ("evaluate run=run", "run=run"),
    ("evaluate run=list_run", "run=list_run"),
    ("evaluate run=good.jsonl", "run=good.jsonl holds no config.yaml"),
    ("evaluate model.path=cut_model", "model.safetensors is cut off"),
    ("evaluate evaluation.pass_k=[0]", "evaluation.pass_k"),
    ("evaluate evaluation.pass_k=[a]", "evaluation.pass_k"),
    ("evaluate evaluation.sets=3", "evaluation.sets"),
    ("evaluate evaluation.against=./nowhere", "./nowhere does not exist"),
    ("report good.jsonl", "good.jsonl is not a folder"),
    ("report broken_run", "line 2 is not JSON"),
    ("report run", "metrics.jsonl"),
    ("report sweep", "sweep.json"),
    ("watch good.jsonl", "good.jsonl is a file"),
    ("bench", "nothing is not a benchmark"),
    ("bench overlap stpes=1", "stpes is not a setting"),
    ("bench overlap --rounds=x", "--rounds"),
    ("doctor stpes=1", "stpes is not a setting"),
    ("doctor generator.gpus=many", "generator.gpus=many"),
    ("doctor --everything", "--everything is not an option"),
    ("doctor --quick", "doctor: the following arguments are required: --gpu"),
    ("doctor --gpu --quick=5", "--quick"),
    ("doctor --gpu --quick steps=5", "steps=5"),
    ("doctor --gpu --all", "--all"),
    ("doctor --gpu --out", "--out"),
    ("schema nothing", "nothing"),
    ("sweep sweep.parts=3", "sweep.parts=3"),
    ("sweep sweep.parts={a:{overrides:3}}", "sweep.parts.a.overrides"),
    ("sweep async=sync async.max_staleness=2,4", "no job of the sweep can run"),
    ("sweep seed=1,1.5", "seed=1.5"),
    ("sweep algorithm=glob(nothing*)", "matches no option"),
    ("sweep run_dir=x", "run_dir cannot be set for a sweep"),
    ("sweep name=a/b", "name='a/b' must be a folder's name"),
    ("train -m async=sync,one_step async.max_staleness=4", "async.max_staleness=4 contradicts"),
    ("nonsense", "nonsense is not a command"),
    ("train\x00", "not a command"),
]
CASES = [*((f"train {typed}", words) for typed, words in TRAIN), *OTHERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind, and the packaged model damaged in several ways."""
    here = tmp_path_factory.mktemp("nonsense")
    for name, content in FILES.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content)
    tiny = Path(resolve("tiny"))
    for name in ("cut", "headless", "shardless", "other", "json", "tokenless", "seq"):
        shutil.copytree(tiny, here / f"{name}_model")
    weights = (tiny / "model.safetensors").read_bytes()
    (here / "cut_model" / "model.safetensors").write_bytes(weights[:-1000])
    (here / "headless_model" / "model.safetensors").write_bytes(weights[:100])
    (here / "shardless_model" / "model.safetensors").unlink()
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (here / "shardless_model" / "model.safetensors.index.json").write_text(json.dumps(shards))
    settings = json.loads((tiny / "config.json").read_text())
    (here / "other_model" / "config.json").write_text(json.dumps({**settings, "model_type": "nobody_knows"}))
    (here / "json_model" / "config.json").write_text("{")
    for file in (here / "tokenless_model").glob("token*"):
        file.unlink()
    (here / "seq_model" / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    return here


@pytest.mark.parametrize(("typed", "words"), CASES, ids=[ascii(typed)[1:70] for typed, _ in CASES])
@pytest.mark.more_but(every=4)
def test_nonsense_is_one_sentence_and_nothing_starts(
    typed: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run_module, "build_runtime", lambda *_: pytest.fail("a part was started"))
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    before = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    code = main(typed.split(" "))
    out, err = capsys.readouterr()
    assert code == 2, out + err
    assert err.startswith("asyncrlhf: ") and err.count("\n") == 1 and err[-2] in ".?", err
    assert words in err and "Traceback" not in err + out, err
    assert {path for path in folder.rglob("*") if "__pycache__" not in path.parts} == before
