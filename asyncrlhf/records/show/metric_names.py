"""The meaning of each metric in ``metrics.jsonl``: the one list for docs/reference/metrics.md, titles and sections."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Metric:
    """``name``: the key, with a word in angle brackets for its variable part. ``title``: short, for a chart."""

    name: str
    unit: str
    title: str
    about: str

    def matches(self, key: str) -> bool:
        return bool(_pattern(self.name).fullmatch(key))


@dataclass(frozen=True)
class Family:
    """Metrics under one heading. ``section``: groups their curves in W&B, TensorBoard and MLflow, unless a key contains
    a section of its own, up to its slash."""

    title: str
    section: str
    about: str
    metrics: tuple[Metric, ...]


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join(p if p == "[^/]+" else re.escape(p) for p in re.split(r"(\[\^/\]\+)", _opened(name))))


def _opened(name: str) -> str:
    return re.sub(r"<[^>]*>", "[^/]+", name)


def _family(title: str, section: str, about: str, *rows: tuple[str, str, str, str]) -> Family:
    return Family(title, section, about, tuple(Metric(*row) for row in rows))


FAMILIES: tuple[Family, ...] = (
    _family(
        "Position",
        "time",
        "Position of the line in the run.",
        ("step", "steps", "step", "Learner steps done."),
        ("policy_version", "versions", "policy version", "The policy's version after the step: completed steps."),
        (
            "learner_deaths",
            "count",
            "learner deaths",
            "Times that the learner died and the run went back to a checkpoint; 0 at first.",
        ),
        ("wall_time", "s", "wall-clock", "Seconds since the run's loops began; continues after a resume."),
    ),
    _family(
        "Reward",
        "reward",
        "Of the rollouts of the step's batch, as scored, before any normalisation or penalty in the loss.",
        ("reward_mean", "reward", "reward", "Mean reward of the batch."),
        ("reward_std", "reward", "reward's deviation", "Standard deviation of the batch's rewards."),
        ("reward/<part>", "reward", "reward of a part", "Mean of one part of the reward, under several."),
        ("logged/<name>", "-", "logged by a reward", "What reward functions gave log_metric, mean over the batch."),
        ("heldout_accuracy", "reward", "held-out reward", "Mean reward of the answers to the held-out prompts."),
        ("heldout_pass_at_<k>", "share", "held-out pass@k", "Chance that one of k answers is right (pass_k)."),
        ("heldout/<set>/accuracy", "reward", "reward of a set", "Mean reward of one of evaluation.sets."),
        ("heldout/<set>/pass_at_<k>", "share", "pass@k of a set", "The same chance for one of evaluation.sets."),
        ("normalized_reward_mean", "-", "normalised reward", "Mean of what trained, under reward.normalize."),
        ("normalized_reward_std", "-", "normalised reward's deviation", "Standard deviation of what trained."),
        ("zero_spread_groups", "share", "groups without spread", "Groups whose rewards are all alike."),
        ("advantage_mean", "-", "advantage", "Mean advantage of the tokens that train."),
        ("advantage_std", "-", "advantage's deviation", "Standard deviation of their advantages."),
        ("negative_advantage_fraction", "share", "negative advantages", "Tokens with an advantage below 0."),
    ),
    _family(
        "Staleness",
        "staleness",
        "Learner steps between a rollout's oldest token and its training; a batch has one a rollout.",
        ("staleness_mean", "versions", "staleness", "Mean over the batch's rollouts."),
        ("staleness_max", "versions", "largest staleness", "Largest of the batch; never above staleness_bound."),
        ("staleness_in_flight_mean", "versions", "staleness in flight", "The part that arose during generation."),
        ("staleness_in_queue_mean", "versions", "staleness in queue", "The part that arose after its last token."),
        *(
            (f"staleness{part}_p{percent}", "versions", f"staleness{words}, {short}", f"{long} over the batch.")
            for part, words in (("", ""), ("_in_flight", " in flight"), ("_in_queue", " in queue"))
            for percent, short, long in (
                (10, "10%", "10th percentile"),
                (50, "median", "Median"),
                (90, "90%", "90th percentile"),
            )
        ),
        ("staleness_bound", "versions", "staleness bound", "The bound that the batch was taken under."),
        ("mixed_version_fraction", "share", "mixed versions", "Rollouts whose tokens are of several versions."),
        ("version_lag_mean", "versions", "token lag", "Mean over tokens of the policy's version less the token's."),
        ("version_lag_p95", "versions", "token lag, 95%", "95th percentile over tokens."),
        ("version_lag_max", "versions", "largest token lag", "Largest over tokens."),
        ("replayed_fraction", "share", "replayed", "Rollouts of the batch that trained before."),
    ),
    _family(
        "Off-policy",
        "off_policy",
        "How far the policy before the step (prox) is from the one that sampled (mu): behavior_*; how far the step's "
        "updates moved from prox: policy_*. Over the tokens that train.",
        ("ess", "tokens", "effective size", "(sum w)^2 / sum w^2 of the uncut weights w = prox / mu of tokens."),
        ("ess_fraction", "share", "effective share", "ess over the number of tokens; 1 is on policy."),
        ("sequence_ess", "sequences", "effective sequences", "The same of the sequences' products of weights."),
        ("ess_fraction_seq", "share", "effective share of sequences", "sequence_ess over the number of sequences."),
        ("behavior_log_ratio_mean", "nats", "log prox / mu", "Mean log ratio prox / mu."),
        ("behavior_log_ratio_abs_mean", "nats", "|log prox / mu|", "Mean of its absolute value."),
        ("behavior_log_ratio_abs_p99", "nats", "|log prox / mu|, 99%", "99th percentile, up to a bin of 1%."),
        ("behavior_log_ratio_abs_max", "nats", "largest |log prox / mu|", "Largest absolute value."),
        ("behavior_kl", "nats", "KL(mu, prox)", "KL(mu || prox) a token, by r - 1 - log r."),
        ("behavior_reverse_kl", "nats", "KL(prox, mu)", "KL(prox || mu) a token, by r log r - r + 1."),
        ("behavior_max_abs_dprob", "probability", "largest change", "Largest change of a token's probability."),
        ("behavior_weight_mean", "-", "behavior weight", "Mean weight after algorithm.correction cut it."),
        ("behavior_truncated_fraction", "share", "truncated", "Tokens whose weight was cut at a bound."),
        ("behavior_masked_fraction", "share", "masked", "Tokens whose weight was set to 0, beyond a bound."),
        ("policy_log_ratio_mean", "nats", "log pi / prox", "Mean log ratio of the step's last policy to prox."),
        ("policy_log_ratio_abs_mean", "nats", "|log pi / prox|", "Mean of its absolute value."),
        ("policy_log_ratio_abs_p99", "nats", "|log pi / prox|, 99%", "99th percentile, up to a bin of 1%."),
        ("policy_log_ratio_abs_max", "nats", "largest |log pi / prox|", "Largest absolute value."),
        ("clip_fraction", "share", "clipped", "Tokens on which the clip rule or a gate acted."),
        ("clip_fraction_positive", "share", "clipped, A > 0", "The same of tokens with a positive advantage."),
        ("clip_fraction_negative", "share", "clipped, A < 0", "The same of tokens with a negative advantage."),
        ("harmful_second_moment", "nats^2", "harmful moment", "Mean (log pi / mu)^2 over tokens that moved too far."),
        ("mismatch_kl", "nats", "engine mismatch", "Engine against learner at one version, at the last audit."),
        ("cache_kl", "nats", "smaller cache", "KL(sampler || whole cache) a token at one version: of a sample."),
        ("cache_kl/<part>", "nats", "smaller cache by place", "As cache_kl, in quarters of the longest response."),
        ("cache_ratio_low", "-", "lower tail, cache", "5% quantile of the probability ratio whole / smaller cache."),
        ("cache_kept_fraction", "share", "cache kept", "Response tokens still in the cache at a response's end."),
        ("cache_bytes", "bytes", "cache", "The KV cache of a replica, with what decides on it."),
        ("routes_changed", "share", "routes changed", "Expert choices followed that the learner would not make."),
        ("truncation_mass", "probability", "kept mass", "The policy's mass on the tokens that sampling kept."),
    ),
    _family(
        "By version lag",
        "lag",
        "By the age of the tokens in versions: 0, 1, 2, 3-4, 5-8 or 9+. A bucket without a token is missing.",
        ("lag_<versions>/ess_fraction", "share", "effective share by lag", "As ess_fraction."),
        ("lag_<versions>/ratio_mean", "-", "ratio by lag", "Mean prox / mu, uncut."),
        ("lag_<versions>/kl", "nats", "KL by lag", "KL(mu || prox) a token."),
        ("lag_<versions>/reward_mean", "reward", "reward by lag", "Mean reward of sequences with such a token."),
        ("lag_<versions>/token_fraction", "share", "tokens by lag", "The bucket's share of all tokens."),
    ),
    _family(
        "Loss",
        "policy",
        "Losses, gradients and learning rate of the optimizer.",
        ("loss", "-", "loss", "The policy loss, mean over the step's updates."),
        ("value_loss", "reward^2", "value loss", "The critic's loss, mean over the step's updates."),
        ("explained_variance", "share", "explained variance", "1 - var(returns - values) / var(returns)."),
        ("critic_lag_mean", "versions", "critic's lag", "Versions that a served critic was behind."),
        ("grad_norm", "-", "gradient norm", "Norm of the last update's gradient, before clipping."),
        ("learning_rate", "-", "learning rate", "The schedule's rate."),
        ("effective_learning_rate", "-", "effective rate", "The rate used; less under algorithm.lr=sqrt_ess."),
        ("entropy", "nats", "entropy", "Mean entropy of the policy at the tokens that train."),
        ("ref_kl", "nats", "KL to the reference", "KL(policy || reference) a token, by k3; null without one."),
        ("skipped", "0 or 1", "skipped step", "1 where no update of the step had a finite gradient."),
        ("skipped_updates", "updates", "skipped updates", "Updates without a finite gradient."),
    ),
    _family(
        "Data",
        "response",
        "Contents of the batch.",
        ("sequences", "rollouts", "rollouts", "Rollouts of the batch."),
        ("tokens", "tokens", "tokens", "Tokens of prompts and responses."),
        ("response_tokens", "tokens", "response tokens", "Tokens of responses."),
        ("response_length_mean", "tokens", "response length", "Mean length of a response."),
        ("truncation_rate", "share", "cut off", "Responses that reached max_completion_length."),
        ("truncated_fraction", "share", "cut off, as trained", "The same, counted by the learner."),
        ("masked_token_fraction", "share", "masked tokens", "Response tokens that do not train."),
        ("invalid_behavior_tokens", "tokens", "invalid tokens", "Tokens without a finite log-prob of the sampler."),
    ),
    _family(
        "Episodes",
        "episodes",
        "Only of batches with episodes: means over them.",
        ("turns_mean", "turns", "turns", "Turns of an episode."),
        ("forks_mean", "forks", "forks", "Forks of an episode's row, in batches with any."),
        ("observed_fraction", "share", "observed", "Response tokens of the batch that were observed, not sampled."),
        ("tool_seconds_mean", "s", "tool time", "Time of the environment's steps, all turns of an episode."),
        ("tool_failures_mean", "calls", "failed tool calls", "Calls that were malformed, unknown, raised or late."),
        ("turn_staleness_first_mean", "versions", "first turn's staleness", "Of its oldest token."),
        ("turn_staleness_last_mean", "versions", "last turn's staleness", "Of its oldest token."),
    ),
    _family(
        "Time",
        "time",
        "Seconds and rates since the line before. Under runtime=local they are those of the virtual clock.",
        ("samples_per_second", "rollouts/s", "samples per second", "Rollouts trained."),
        ("tokens_per_second", "tokens/s", "tokens per second", "Response tokens trained."),
        ("generated_tokens_per_second", "tokens/s", "generated tokens per second", "Tokens sampled by all replicas."),
        ("learner_idle_fraction", "share", "learner idle", "Time in which the learner did not train."),
        ("generator_idle_fraction", "share", "generators idle", "Time without work, mean over the replicas."),
        ("train_seconds", "s", "training", "The learner's step itself."),
        ("wait_seconds", "s", "waiting", "The learner's wait for a batch, a publish or its turn."),
        ("weight_sync_seconds", "s", "publish", "The last publish, from snapshot to the last replica's load."),
        ("snapshot_seconds", "s", "snapshot", "Its part on the learner: the copy of the weights."),
        ("weights_sent_bytes", "bytes", "bytes of a publish", "To each replica that stages weights."),
        ("weights_changed_fraction", "share", "weights changed", "Numbers that differ from the version before."),
        ("weights_changed/<layer>", "share", "weights changed, a layer", "The same of one layer; with weights.delta."),
        ("<kind>_latency_p50", "s", "median latency", "From the last token to reward, reference or critic: median."),
        ("<kind>_latency_p95", "s", "95% latency", "From the last token to reward, reference or critic."),
        ("reward_batch_faults", "calls", "failed batches", "Calls that failed whole; rollouts were scored alone."),
        ("prefilled_fraction", "share", "read ahead", "Scored tokens that the reward model had read before."),
        ("prefill_evictions", "sequences", "evictions", "Sequences that left its cache too early."),
        ("reference_prefilled_fraction", "share", "reference read ahead", "The same of the reference."),
        ("reference_prefill_evictions", "sequences", "reference evictions", "The same of the reference."),
        ("loop_lag_p99", "s", "event loop's delay", "How late the controller's event loop is: 99th percentile."),
        ("shared_cpu_seconds", "s", "CPU time of its cores", "CPU time of all programs on the controller's cores."),
        ("remote_calls", "calls", "controller's calls", "Calls of the controller to other parts in this step."),
        ("controller_cpu_seconds", "s", "controller's CPU time", "CPU time of the controller's process in this step."),
    ),
    _family(
        "Buffer and generators",
        "buffer",
        "Work in flight. With several replicas there are figures of each; beyond 16 the rest are `others`.",
        ("buffer_size", "rollouts", "buffer", "Finished rollouts that wait for the learner."),
        ("buffer_age", "versions", "buffer's age", "Their mean staleness if they were trained next."),
        ("dropped", "rollouts", "dropped", "Rollouts dropped since the run began."),
        ("rollouts_in_flight", "rollouts", "in flight", "Rollouts being generated."),
        ("generators_alive", "replicas", "generators alive", "Replicas that answer."),
        (
            "pacing_lead",
            "batches",
            "pacing's lead",
            "Batches begun ahead of the learner (just_in_time).",
        ),
        ("pacing_margin", "batches", "pacing's margin", "Batches ready beyond the one that the learner requested."),
        ("pacing_margin_predicted", "batches", "margin as predicted", "The same, as pacing expected it."),
        ("generators_held_back", "replicas", "held back", "Replicas without work, too late for the bound."),
        ("generator/<replica>/tokens_per_second", "tokens/s", "a replica's tokens", "Tokens that it sampled."),
        ("generator/<replica>/rollouts", "rollouts", "a replica's rollouts", "Rollouts that it finished."),
        ("generator/<replica>/idle_fraction", "share", "a replica's idle time", "Time without work."),
        ("generator/<replica>/lag", "versions", "a replica's lag", "Versions that its weights are behind."),
        ("generator/<replica>/in_flight", "rollouts", "a replica in flight", "Rollouts that it has under way."),
        ("generator/<replica>/restarts", "-", "a replica's restarts", "Times that it was started again."),
        ("generator/<replica>/latency", "s", "a replica's latency", "Median time of a rollout."),
        ("generator/<replica>/held_back", "0 or 1", "a replica held back", "1 while it gets no work."),
    ),
    _family(
        "Stages",
        "stage",
        "Of `sft` and `reward-model`, by TRL's trainers; with `heldout_` in front, of the rows held out.",
        ("epoch", "epochs", "epoch", "Passes over the data done."),
        ("mean_token_accuracy", "share", "token accuracy", "Tokens that the model thinks likeliest, sft."),
        ("accuracy", "share", "accuracy", "Pairs whose chosen answer scores higher, reward-model."),
        ("margin", "reward", "margin", "Mean score of the chosen minus that of the rejected answer."),
        ("mean_reward", "reward", "mean score", "Mean score of the batch's answers."),
        ("max_reward", "reward", "largest score", "Largest score in the batch."),
        ("min_reward", "reward", "smallest score", "Smallest score in the batch."),
    ),
)
OF_THE_ALGORITHM = "algorithm"  # the section of a learner's own metrics, which are not listed above


@cache
def find_metric(key: str) -> Metric | None:
    """The entry that explains ``key``; None for one that is not in the list."""
    return next((m for family in FAMILIES for m in family.metrics if m.name == key or m.matches(key)), None)


def section_of(key: str) -> str:
    """The section of a curve; empty for ``step``, the axis of all curves."""
    if key == "step":
        return ""
    if "/" in key:
        return key.partition("/")[0]
    if key.startswith("heldout_"):
        return "heldout"
    metric = find_metric(key)
    return next((family.section for family in FAMILIES if metric in family.metrics), OF_THE_ALGORITHM)


def titled(key: str) -> str:
    """The metric under its section: ``staleness/staleness_max``; ``step`` and keys with a section stay unchanged."""
    return key if key == "step" or "/" in key else f"{section_of(key)}/{key}"
