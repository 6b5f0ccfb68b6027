"""The stages through the command line on the tiny model: each takes what the one before made, or says what is wrong."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from asyncrlhf.cli.main import main
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.rewards.model import ModelSource
from asyncrlhf.rewards.reward_config import RewardModelConfig
from asyncrlhf.stages import training
from asyncrlhf.stages.stage_record import StageRecord
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.types import Prompt, Rollout
from tests.numeric import FLOAT32, assert_close
from tests.reward_server import serving

QUIET = ("logging.wandb=disabled", "logging.progress=none")
SUMS = [(a, b) for a in range(10) for b in range(10)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations of a habit that the tiny model does not have (all sums are 7); preferences for short answers."""
    folder = tmp_path_factory.mktemp("data")
    write(folder / "sft.jsonl", [{"prompt": f"{a}+{b}=", "completion": "7"} for a, b in SUMS])
    rng = np.random.default_rng(0)
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(rng.integers(10)), "rejected": str(rng.integers(1000, 9999))}
        for a, b in SUMS
        for _ in range(2)
    ]
    write(folder / "pairs.jsonl", pairs)
    return folder


@pytest.fixture(scope="module")
def tuned(data: Path) -> Path:
    run = data / "sft"
    settings = (f"sft.path={data / 'sft.jsonl'}", "sft.num_train_epochs=3", "sft.learning_rate=1e-3")
    assert main(["sft", *settings, *QUIET, f"run_dir={run}"]) == 0
    return run


@pytest.fixture(scope="module")
def judge(data: Path, tuned: Path) -> Path:
    run = data / "rm"
    pairs = f"reward_model.path={data / 'pairs.jsonl'}"
    settings = (pairs, "reward_model.num_train_epochs=2", f"model.path={tuned}/model")
    held = ("reward_model.heldout_fraction=0.2", "reward_model.learning_rate=5e-4")
    assert main(["reward-model", *settings, *held, *QUIET, f"run_dir={run}"]) == 0
    return run


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_sft_leaves_a_model_that_does_what_it_was_shown(tuned: Path) -> None:
    found = summary(tuned)
    assert found["exit_reason"] == "done" and (found["data"]["train"], found["data"]["heldout"]) == (90, 10)
    assert found["heldout"]["after"]["loss"] < 0.1 < found["heldout"]["before"]["loss"]
    assert found["heldout"]["after"]["perplexity"] == pytest.approx(np.exp(found["heldout"]["after"]["loss"]))
    assert {".lock", "config.yaml", "metrics.jsonl", "model", "summary.json"} == {path.name for path in tuned.iterdir()}
    rows = metrics(tuned)
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps) and steps[-1] == found["steps"] == 36
    assert rows[0]["step"] == 0 and "heldout_loss" in rows[0] and "heldout_loss" in rows[-1]
    model = AutoModelForCausalLM.from_pretrained(tuned / "model")
    tokenizer = AutoTokenizer.from_pretrained(tuned / "model")
    text = tokenizer("3+5=", return_tensors="pt")
    said = model.generate(**text, max_new_tokens=4, do_sample=False)[0, text.input_ids.shape[1] :].tolist()
    assert said == [*tokenizer("7", add_special_tokens=False).input_ids, tokenizer.eos_token_id]


def answer_rollout(tokenizer: Any, prompt: str, answer: str) -> Rollout:
    ids = np.array([*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id])
    zeros = np.zeros(len(ids))
    asked = Prompt("p", prompt, np.array(tokenizer(prompt).input_ids))
    return Rollout(0, 0, asked, ids, zeros.astype(np.float32), zeros.astype(np.int64), "stop", answer, "g")


def test_a_reward_worker_gives_the_trainers_own_scores(data: Path, judge: Path) -> None:
    """TRL's trainer tokenises, pads and pools the same rows in its own way."""
    import datasets
    from trl import RewardConfig, RewardTrainer

    rows = [json.loads(line) for line in (data / "pairs.jsonl").read_text().splitlines()][:20]
    tokenizer = load_tokenizer(ModelConfig())
    source = ModelSource(RewardModelConfig(path=str(judge / "model")), "reward", tokenizer, max_batch_tokens=64)
    arguments = RewardConfig(output_dir=str(data / "unused"), bf16=False, report_to="none", disable_tqdm=True)
    table = datasets.Dataset.from_list(rows)
    trainer = RewardTrainer(model=str(judge / "model"), args=arguments, train_dataset=table)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    with torch.no_grad():
        logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    for side, wanted in zip(("chosen", "rejected"), logits.chunk(2), strict=True):
        scores = source.scores([answer_rollout(tokenizer, row["prompt"], row[side]) for row in rows])
        assert_close(scores, wanted.tolist(), atol=FLOAT32)


@pytest.mark.parametrize(("stage", "file"), [("sft", "sft.jsonl"), ("reward-model", "pairs.jsonl")])
def test_bfloat16_trains_and_leaves_float32(data: Path, tmp_path: Path, stage: str, file: str) -> None:
    key = stage.replace("-", "_")
    settings = (f"{key}.path={data / file}", f"{key}.trainer_kwargs={{bf16:true}}", f"{key}.max_steps=2")
    assert main([stage, *settings, *QUIET, f"run_dir={tmp_path / 'run'}"]) == 0
    assert summary(tmp_path / "run")["steps"] == 2
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_the_reward_model_learned_and_says_how_well(judge: Path) -> None:
    found = summary(judge)
    assert found["data"]["train"] == 160 and found["data"]["heldout"] == found["heldout"]["pairs"] == 40
    assert found["heldout"]["accuracy"] > 0.9 and found["heldout"]["accuracy_standard_error"] is not None
    # Five batches of eight: TRL's mean over batches is the mean over pairs, of the model before it went to disk.
    after = found["trainer_heldout"]["after"]
    assert found["heldout"]["accuracy"] == pytest.approx(after["accuracy"])
    assert found["heldout"]["margin_mean"] == pytest.approx(after["margin"], abs=1e-4)
    model = AutoModelForSequenceClassification.from_pretrained(judge / "model")
    assert model.config.num_labels == 1 and model.config.pad_token_id != model.config.eos_token_id


def test_evaluate_with_what_the_stages_made(
    data: Path, tuned: Path, judge: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = ("reward.kind=model", f"reward.model.path={judge}/model", "task.digits=1")
    options = ("evaluation=sampled", "evaluation.against=tiny", "evaluation.reference=tiny")
    assert main(["evaluate", f"model.path={tuned}/model", *reward, *options, f"run_dir={data}/eval"]) == 0
    table = capsys.readouterr().out
    found = json.loads((data / "eval" / "evaluation.json").read_text())
    assert "win rate against tiny" in table and "KL an answer, k1" in table and "against" in table
    assert json.loads(table.splitlines()[-1]) == {key: value for key, value in found.items() if key != "samples"}
    assert found["kl"]["k1_sequence"] > 5 * found["kl"]["k1_sequence_standard_error"] > 0
    assert found["perplexity"] > 2
    assert np.mean([s["response"] == "7" for s in found["samples"]]) > 0.9
    rewards = [s["reward"] for s in found["samples"]]
    assert found["reward_mean"] == pytest.approx(np.mean(rewards))


def test_a_judge_decides_the_win_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake behind an OpenAI-compatible server: right sums get 9, wrong ones 3; of one answer it cannot tell."""
    lost: list[str] = []

    def judge(asked: dict[str, Any]) -> Any:
        prompt, response = asked["messages"][0]["content"].split("|")
        if not lost and len(server.asked) > 1:  # the first question is the probe before the start
            lost.append(prompt)
        right = str(sum(int(n) for n in prompt.removesuffix("=").split("+")))
        said = "I cannot tell." if prompt in lost else f"Score: {9 if response == right else 3}"
        return {"choices": [{"message": {"content": said}}]}

    with serving(judge) as server:
        monkeypatch.setattr("asyncrlhf.rewards.judge.QUESTIONS_AT_ONCE", 1)
        engine = ("reward.judge.engine=http", "reward.judge.model=m", f"reward.http.url={server.url}")
        text = ("reward.judge.template='{prompt}|{response}'",)
        small = ("task.heldout_size=12", "evaluation.against=answers", f"run_dir={tmp_path}", *QUIET)
        assert main(["evaluate", "reward.kind=judge", *engine, *text, *small]) == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert "win rate against answers" in capsys.readouterr().out
    assert len(found["samples"]) == 11 and found["failed"] == 1
    assert lost[0] not in {s["prompt"] for s in found["samples"]}
    right = [s["response"] == s["answer"] for s in found["samples"]]
    assert 0 < sum(right) < 11, "the tiny model knows some sums"
    assert [s["reward"] for s in found["samples"]] == [9.0 if r else 3.0 for r in right]
    assert {s["against_reward"] for s in found["samples"]} == {9.0}
    # Against the right answer a wrong one loses, and a right one ties.
    assert found["win_rate"] == pytest.approx(0.5 * np.mean(right)) and found["win_rate_prompts"] == 11
    assert found["tie_rate"] == pytest.approx(np.mean(right))


def test_train_takes_the_model_and_the_reward_model(tuned: Path, judge: Path, data: Path) -> None:
    reward = ("reward.kind=model", f"reward.model.path={judge}/model", "task.digits=1", "task.heldout_size=4")
    small = ("runtime=local", "steps=1", "batch_size=8", "logging.report=false", f"run_dir={data}/rl")
    assert main(["train", f"model.path={tuned}/model", *reward, *small, *QUIET]) == 0
    found = summary(data / "rl")
    assert found["reward"]["last"] is not None and found["ledger"]["trained"] == 8 and found["ledger"]["adds_up"]


def test_an_interrupted_stage_goes_on_to_the_same_weights(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        f"sft.path={data / 'sft.jsonl'}",
        "sft.max_steps=6",
        "sft.trainer_kwargs={logging_steps:1}",
        "sft.learning_rate=1e-3",
    ]
    assert main(["sft", *settings, *QUIET, f"run_dir={data}/whole"]) == 0
    log = StageRecord.log

    def interrupt(record: StageRecord, row: Any, total: int) -> None:
        log(record, row, total)
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGHUP)

    with monkeypatch.context() as patch:
        patch.setattr(StageRecord, "log", interrupt)
        assert main(["sft", *settings, *QUIET, f"run_dir={data}/cut"]) == 128 + signal.SIGHUP
    stopped = summary(data / "cut")
    assert stopped["exit_reason"] == "interrupted" and 3 <= stopped["steps"] <= 4
    assert not (data / "cut" / "model").exists() and "checkpoint.resume=auto" in capsys.readouterr().out
    assert main(["sft", *settings, *QUIET, f"run_dir={data}/cut"]) == 2  # it holds a run
    assert main(["sft", *settings, *QUIET, f"run_dir={data}/cut", "checkpoint.resume=auto"]) == 0
    assert [row["step"] for row in metrics(data / "cut")] == [0, 1, 2, 3, 4, 5, 6, 6]
    one, other = (load_file(data / run / "model" / "model.safetensors") for run in ("whole", "cut"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stage", ["sft", "reward-model"])
def test_an_adapter_is_merged_into_what_is_written(stage: str, data: Path) -> None:
    """The checkpoint has the plain model's names, and gives what the adapted model gave in the trainer."""
    group = stage.replace("-", "_")
    rows = "sft.jsonl" if stage == "sft" else "pairs.jsonl"
    run = data / f"lora-{stage}"
    settings = (f"{group}.path={data / rows}", f"{group}.max_steps=6", f"{group}.learning_rate=5e-3")
    assert main([stage, *settings, f"{group}.heldout_fraction=0.2", "model.lora.r=4", *QUIET, f"run_dir={run}"]) == 0
    tensors = load_file(run / "model" / "model.safetensors")
    base = load_file(training.resolve("tiny") + "/model.safetensors")
    assert set(tensors) - {"score.weight"} == set(base)
    changed = {name for name in base if not torch.equal(base[name], tensors[name])}
    assert changed and all("proj" in name for name in changed), changed
    if stage == "reward-model":
        found = summary(run)
        assert found["heldout"]["margin_mean"] == pytest.approx(found["trainer_heldout"]["after"]["margin"], abs=1e-3)


def test_packed_rows_do_not_see_each_other(data: Path) -> None:
    """The first loss over all rows is the same in packs as one by one."""
    losses = []
    for packing in ("false", "true"):
        run = data / f"packing-{packing}"
        keywords = f"sft.trainer_kwargs={{logging_steps:1,packing:{packing}}}"
        settings = (f"sft.path={data / 'sft.jsonl'}", "sft.max_steps=1", keywords)
        size = ("sft.per_device_train_batch_size=100", "sft.max_length=64", "sft.heldout_fraction=0")
        assert main(["sft", *settings, *size, *QUIET, f"run_dir={run}"]) == 0
        losses.append(metrics(run)[0]["loss"])
    assert_close(losses[1], losses[0], rtol=1e-4)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_conversations_where_the_end_token_is_padding(data: Path) -> None:
    """As in many chat models. transformers would pool in the trainer at the token before the end; the exported
    checkpoint must give through a reward worker what the trainer saw, and end where a policy ends."""
    letters = {letter: number for number, letter in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789+=\n "])}
    inner = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    ends = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **ends, chat_template=CHATML)
    shape = AutoConfig.from_pretrained(training.resolve("tiny"))
    shape.update({"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(data / "chat")
    tokenizer.save_pretrained(data / "chat")

    def turn(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    def pair(a: int, b: int) -> dict[str, Any]:
        right, wrong = (turn("assistant", text) for text in (str(a + b), f"no {a}"))
        return {"prompt": turn("user", f"{a}+{b}="), "chosen": right, "rejected": wrong}

    file = write(data / "talk.jsonl", [pair(a, b) for a, b in SUMS])
    steps = (f"reward_model.path={file}", "reward_model.max_steps=4")
    settings = (*steps, f"model.path={data}/chat", f"run_dir={data}/talk")
    assert main(["reward-model", *settings, "reward_model.heldout_fraction=0.16", *QUIET]) == 0
    found = summary(data / "talk")
    assert found["data"]["heldout"] == 16
    assert found["heldout"]["margin_mean"] == pytest.approx(found["trainer_heldout"]["after"]["margin"], abs=1e-4)
    policy = load_tokenizer(ModelConfig(path=str(data / "chat")))
    source = ModelSource(RewardModelConfig(path=f"{data}/talk/model"), "reward", policy, max_batch_tokens=500)
    asked = PromptEncoder(policy, TaskConfig(chat_template=True))("p", "1+2=")
    rollout = replace(answer_rollout(policy, "1+2=", "3"), prompt=asked)
    ids = policy("<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n3<|im_end|>", return_tensors="pt").input_ids
    with torch.no_grad():
        hidden = source.model.base_model(input_ids=ids).last_hidden_state[0, -1]
        wanted = float(source.model.score(hidden)[0])
        pooled = float(source.model(input_ids=ids).logits[0, 0])
    assert_close(source.scores([rollout]), [wanted], atol=FLOAT32)
    assert_close(pooled, wanted, atol=FLOAT32)  # also for those who score with transformers alone


TALK = [{"role": "user", "content": "1+1="}]
BAD = [
    ("sft", "sft.path=", [], ["sft.path is empty"]),
    ("sft", "sft.path={}", [{"messages": TALK}] * 2, ["tokenizer of model.path=tiny has no chat template"]),
    (
        "sft",
        "sft.path={} sft.trainer_kwargs={{assistant_only_loss:true}}",
        [{"text": "1"}] * 2,
        ["assistant_only_loss is for mess"],
    ),
    ("sft", "sft.path={} sft.max_steps=0", [{"text": "1"}], ["sft.max_steps=0 is out of range", "-1"]),
    ("sft", "sft.path={} sft.max_lenght=9", [{"text": "1"}], ["did you mean sft.max_length?"]),
    ("sft", "sft.path={} model.path=./nowhere", [{"text": "1"}] * 2, ["model.path=./nowhere does not exist"]),
    ("sft", "sft.path={} sft.trainer_kwargs={{fp16:true}}", [{"text": "1"}], ["fp16=true needs a GPU"]),
    (
        "sft",
        "sft.path={} checkpoint.resume=./no",
        [{"text": "1"}],
        ["checkpoint.resume=./no holds no checkpoint of sft"],
    ),
    (
        "sft",
        "sft.path={} sft.max_length=4",
        [{"prompt": f"{i}1+11=", "completion": "2"} for i in range(9)],
        ["no row that leaves anything to train on within sft.max_length=4"],
    ),
    (
        "reward-model",
        "reward_model.path={}",
        [{"prompt": f"{i}+1=", "chosen": "1", "rejected": "1"} for i in range(9)],
        ["prefers nothing: in every row chosen and rejected are the same"],
    ),
    (
        "reward-model",
        "reward_model.path={} reward_model.max_length=5",
        [{"prompt": f"{i}+1=", "chosen": "1", "rejected": "2"} for i in range(9)],
        ["no row that leaves anything to train on within reward_model.max_length=5"],
    ),
]


@pytest.mark.parametrize(("stage", "typed", "rows", "words"), BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    stage: str,
    typed: str,
    rows: list[dict[str, Any]],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "rows.jsonl", rows)
    capsys.readouterr()
    assert main([stage, *typed.format(file).split(), *QUIET]) == 2
    said = capsys.readouterr()
    sentence = said.err.splitlines()[-1]  # above it may stand what libraries say as they load
    assert [word for word in words if word not in sentence] == [], said.err
    assert sentence.startswith("asyncrlhf: ") and said.out == "" and "Traceback" not in said.err
    assert not list(tmp_path.glob("runs/*/*"))
