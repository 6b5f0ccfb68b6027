"""Eviction from the hf engine's cache: log-probs are those of the tokens that are left, whatever happens meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from asyncrlhf.engines.cache_config import CacheConfig, read_cache
from asyncrlhf.engines.engine import named_weights
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.engines.hf import forward, slots
from asyncrlhf.engines.hf.cache_facts import is_separator
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.engines.hf.kept_group import KeptGroup
from asyncrlhf.engines.hf.kv_cache import Kept
from asyncrlhf.errors import ConfigError
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.unit.engines.slow_cache import NAME, SlowRow, slow_logprobs

VOCABULARY = 40
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 20.0}),
    "gpt_oss": ("GptOss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
LONGEST = 40
POLICIES = [
    CacheConfig("window", share=0.3, window=4, every=3),
    CacheConfig("heavy_hitters", tokens=14, window=5, every=2),
    CacheConfig("separators", tokens=13, window=4, every=4),
    CacheConfig("chunk_sink", tokens=12, window=6, every=3),
    CacheConfig("chunk_sink", tokens=16, window=8, every=1, keep="last"),
    CacheConfig("chunk_sink", tokens=15, window=6, every=5, keep="both"),
]
SEPARATORS = np.arange(VOCABULARY) % 5 == 0


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    kind, more = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**COMMON | more)
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    return model


def windows(model: PreTrainedModel) -> list[int | None]:
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    return [model.config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def make_engine(name: str, config: CacheConfig | None, slots: int = 5, seed: int = 0) -> HFEngine:
    engine = HFEngine(tiny(name, seed), slots=slots, cache=config, longest=LONGEST)
    engine.decode = lambda ids: "." if SEPARATORS[ids[0]] else "a"
    return engine


def requests(seed: int, prompts: int = 4, siblings: int = 2, **sampling: Any) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    made = []
    for group in range(prompts):
        prompt = Prompt("", "", rng.integers(1, VOCABULARY, int(rng.integers(1, 12))))
        for _ in range(siblings):
            limit = int(rng.integers(LONGEST // 2, LONGEST + 1))
            number = len(made)
            made.append(GenerationRequest(number, group, prompt, 50 + number, SamplingParams(limit, **sampling)))
    return made


class Schedule:
    """Steps an engine to the end of its requests, with loads and sleeps at random steps; notes before which token of
    which rollout everything was computed anew."""

    def __init__(self, engine: HFEngine, name: str, seed: int) -> None:
        self.engine, self.name = engine, name
        self.rng = np.random.default_rng(seed)
        self.anew: dict[int, set[int]] = {}
        self.versions = 1

    def run(self, asked: list[GenerationRequest], events: float) -> dict[int, Rollout]:
        waiting, done = list(asked), {}
        while waiting or self.engine.in_flight():
            if waiting and self.rng.random() < 0.3:
                self.engine.submit([waiting.pop(0) for _ in range(min(len(waiting), 2))])
            if self.rng.random() < events:
                self.disturb()
            for rollout in self.engine.step(0.0).finished:
                assert isinstance(rollout, Rollout), rollout
                done[rollout.rollout_id] = rollout
        return done

    def disturb(self) -> None:
        kind = self.rng.choice(["keep", "recompute", "sleep"])
        if kind == "sleep":
            self.engine.sleep()
            self.engine.wake()
        else:
            weights = named_weights(tiny(self.name, self.versions))
            self.engine.load_weights(self.versions, weights, str(kind))  # type: ignore[arg-type]
            self.versions += 1
        if kind != "keep":
            for number, tokens in self.engine._sampled():
                self.anew.setdefault(number, set()).add(len(tokens))

    def check(self, done: dict[int, Rollout], config: CacheConfig) -> float:
        """The largest difference to the slow reference."""
        models = {version: tiny(self.name, version) for version in range(self.versions)}
        spans = windows(models[0])
        for model in models.values():
            model.set_attn_implementation(NAME)
        worst = 0.0
        for rollout in done.values():
            row = SlowRow(config, config.budget(LONGEST), len(rollout.prompt.token_ids), spans, 2)
            slow = slow_logprobs(models, rollout, self.anew.get(rollout.rollout_id, set()), row, SEPARATORS)
            assert row.evicted or len(rollout.response_ids) <= config.budget(LONGEST)
            worst = max(worst, float(np.abs(slow - rollout.behavior_logprobs).max()))
        return worst


def difference(name: str, config: CacheConfig, seed: int = 1, events: float = 0.12) -> float:
    schedule = Schedule(make_engine(name, config), name, seed)
    done = schedule.run(requests(seed), events)
    assert schedule.versions > 1 or not events
    return schedule.check(done, config)


@pytest.mark.in_turn
@pytest.mark.parametrize("config", POLICIES, ids=lambda c: f"{c.policy}-{c.keep}")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.more_but("gpt_oss", "both", "heavy_hitters")
def test_logprobs_are_those_of_the_tokens_that_are_left(name: str, config: CacheConfig) -> None:
    assert difference(name, config) < 1e-4


def test_the_whole_cache_is_todays() -> None:
    """A budget that no response reaches changes no bit."""
    plain, roomy = make_engine("llama", None), make_engine("llama", CacheConfig("window", share=1.0, window=4))
    found = [Schedule(engine, "llama", 3).run(requests(3), 0.1) for engine in (plain, roomy)]
    for number, rollout in found[0].items():
        assert np.array_equal(rollout.response_ids, found[1][number].response_ids)
        assert np.array_equal(rollout.behavior_logprobs, found[1][number].behavior_logprobs)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_compared_rollout_tells_what_stayed(name: str) -> None:
    """By layer and head, as the slow reference has it, whatever happened meanwhile and in any row that it moved to."""
    config = CacheConfig("chunk_sink", tokens=14, window=6, every=3, compare_every=1)
    schedule = Schedule(make_engine(name, config), name, 4)
    done = schedule.run(requests(4), 0.1)
    models = {version: tiny(name, version) for version in range(schedule.versions)}
    spans, told = windows(models[0]), 0
    for model in models.values():
        model.set_attn_implementation(NAME)
    for rollout in done.values():
        row, first = SlowRow(config, 14, len(rollout.prompt.token_ids), spans, 2), len(rollout.prompt.token_ids)
        slow_logprobs(models, rollout, schedule.anew.get(rollout.rollout_id, set()), row, SEPARATORS)
        if rollout.stayed is None:
            assert not row.evicted or "cache_kl" not in rollout.measured
            continue
        told += 1
        assert list(rollout.stayed) == [f"layer {layer}, head {head}" for layer in row.full for head in (0, 1)]
        for place, bits in rollout.stayed.items():
            layer, head = (int(word) for word in place.replace("layer ", "").split(", head "))
            length = len(rollout.response_ids)
            assert bits.tolist() == [(layer, head, first + t) not in row.gone for t in range(length)], place
            assert bits.mean() == pytest.approx(rollout.measured["cache_kept_fraction"]) and bits[-6:].all()
    assert told > 2 and len({bits.tobytes() for r in done.values() if r.stayed for bits in r.stayed.values()}) > told


def test_eviction_is_felt() -> None:
    """Else every test above would pass on a cache that keeps all."""
    engine = make_engine("llama", CacheConfig("window", share=0.3, window=4, every=3, compare_every=1))
    done = Schedule(engine, "llama", 1).run(requests(1), 0.0)
    assert max(rollout.measured["cache_kl"] for rollout in done.values()) > 1e-3


def _one_more(self: KeptGroup, due: Any) -> None:
    """The newest free token goes in place of the one with the lowest score."""
    self._config = CacheConfig("window", tokens=12, window=6, every=3)
    evict(self, due)


def _shifted(self: Any, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary positions count what is left."""
    return rotation(self, torch.where(positions > 20, positions - 3, positions), longest)


def _other_head(self: KeptGroup, index: int, weights: torch.Tensor, newest: torch.Tensor) -> None:
    add(self, index, weights.flip(1), newest)


def _too_many(self: KeptGroup, last: torch.Tensor, attended: int) -> torch.Tensor:
    return bias(self, last + 1, attended)


def _copies_no_state(self: KeptGroup, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
    super(KeptGroup, self).copy_rows(source, target, length)


evict, add, bias = KeptGroup.evict, KeptGroup._add_boundaries, KeptGroup.bias
rotation = forward.LeanForward._rotation
FAULTS = [
    (KeptGroup, "evict", _one_more),
    (forward.LeanForward, "_rotation", _shifted),
    (KeptGroup, "_add_boundaries", _other_head),
    (KeptGroup, "bias", _too_many),
    (KeptGroup, "copy_rows", _copies_no_state),
]


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize(("where", "name", "fault"), FAULTS, ids=[fault.__name__ for _, _, fault in FAULTS])
def test_planted_faults_are_found(where: type, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CacheConfig("chunk_sink", tokens=12, window=6, every=3)
    schedule = Schedule(make_engine("llama", config), "llama", 1)  # which by itself compares, and refuses some faults
    monkeypatch.setattr(where, name, fault)
    assert schedule.check(schedule.run(requests(1), 0.12), config) > 1e-3


def test_memory_is_that_of_what_stays() -> None:
    """512-token answers of 64 sequences, a quarter kept; also after sleep, which frees it."""
    sizes = []
    for cache in (None, CacheConfig("chunk_sink", share=0.25)):
        engine = HFEngine(tiny("llama").to(torch.float32), slots=64, cache=cache, longest=512)
        engine._passes.reserve(20 + 512, 512)
        sizes.append(engine._passes.nbytes)
        engine.sleep()
        freed = engine._passes.nbytes
        engine.wake()
        assert engine._passes.nbytes == sizes[-1] > 3 * freed
    keys = 4 * 2 * 64 * 2 * 8 * 4  # bytes a place: layers, keys and values, slots, heads, width, float32
    assert sizes[0] == 536 * keys
    state = 4 * 64 * 2 * (152 + 536) * 4  # scores; and when each token went
    assert sizes[1] == 152 * keys + state and 152 / 536 < 0.3


def test_what_a_smaller_cache_does_is_measured_against_the_whole_one() -> None:
    """``cache_kl`` and the ratio's tail, recomputed from log-probs of transformers' own pass; by parts they average."""
    config = CacheConfig("chunk_sink", tokens=12, window=6, every=3, compare_every=2)
    engine = make_engine("llama", config)
    asked = requests(5, temperature=0.8)
    done = Schedule(engine, "llama", 5).run(asked, 0.0)
    model = tiny("llama")
    for request in asked:
        rollout = done[request.rollout_id]
        length, evicted = len(rollout.response_ids), -(-max(0, len(rollout.response_ids) - 1 - 12 + 0) // 3) * 3
        assert rollout.measured["cache_kept_fraction"] == pytest.approx(1 - evicted / length)
        assert ("cache_kl" in rollout.measured) == (request.rollout_id % 2 == 0)
        if "cache_kl" not in rollout.measured:
            continue
        text = torch.from_numpy(np.concatenate([request.prompt_ids, rollout.response_ids]))
        with torch.no_grad():
            logits = model(text[None]).logits[0, len(request.prompt_ids) - 1 : -1] / 0.8
        whole = logits.log_softmax(-1).gather(1, torch.from_numpy(rollout.response_ids)[:, None])[:, 0].numpy()
        ratio = np.exp(whole.astype(float) - rollout.behavior_logprobs)
        kl = ratio - 1 - np.log(ratio)
        assert rollout.measured["cache_kl"] == pytest.approx(kl.mean(), abs=1e-4)
        assert rollout.measured["cache_ratio_low"] == pytest.approx(np.exp(np.quantile(np.log(ratio), 0.05)), abs=1e-4)
        assert kl[:12].max() < 1e-6, "nothing has gone yet"
        assert rollout.measured["cache_kl/1"] == pytest.approx(kl[:10].mean(), abs=1e-4)


def test_a_model_without_anything_to_evict_is_refused() -> None:
    model = tiny("gemma2")
    model.config.layer_types = ["sliding_attention"] * 4
    for layer in model.model.layers:
        layer.self_attn.is_sliding, layer.self_attn.sliding_window = True, 8
        layer.attention_type = "sliding_attention"
    with pytest.raises(ConfigError, match=r"generator.cache=window has nothing to evict: all layers of Gemma2"):
        forward.SlotPasses(model, 2, Kept(CacheConfig("window"), 20, lambda ids: ids == 0))


NONSENSE = [
    ("chunksink", r"generator.cache.policy=chunksink is not known"),
    (3, r"generator.cache=3 is neither the name of a policy nor a mapping"),
    ({"policy": "window", "shares": 0.5}, r"generator.cache.shares is not a setting.*share"),
    ({"policy": "window", "share": 1.5}, r"generator.cache.share=1.5"),
    ({"policy": "window", "keep": "last"}, r"generator.cache.keep is for policy=chunk_sink"),
    ({"policy": "full", "share": 0.5}, r"policy=full has no further settings"),
    ({"policy": "window", "share": 0.1}, r"keeps 10 of at most 100 response tokens.* need 25"),
]


@pytest.mark.parametrize(("given", "sentence"), NONSENSE)
def test_nonsense_is_one_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_cache(given, 100)
    assert "\n" not in str(caught.value)


def test_other_engines_keep_every_token() -> None:
    with pytest.raises(ConfigError, match=r"generator.cache=window needs generator.engine=hf; vllm keeps every token"):
        GeneratorConfig(engine="vllm", cache="window", max_completion_length=200)


def test_punctuation_and_line_ends_separate() -> None:
    assert all(is_separator(text) for text in (".", ", ", " ;", "\n", " \n\n", "?!", "}"))
    assert not any(is_separator(text) for text in ("", " ", "a", "a.", "1", "é", "中"))


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("config", [POLICIES[1], POLICIES[3]], ids=lambda c: c.policy)
def test_rows_that_wait_for_their_prefill_score_nothing(config: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass along with the others on what their places happen to hold."""
    engine = make_engine("llama", config)
    monkeypatch.setattr(slots, "PREFILL_TOKENS", 24)
    schedule = Schedule(engine, "llama", 2)
    assert schedule.check(schedule.run(requests(2), 0.2), config) < 1e-4
