"""Groups of replicas: what each inherits, what each is called, and one sentence for what cannot be read."""

from __future__ import annotations

import pytest

from asyncrlhf.cluster.parts import generator_specs
from asyncrlhf.config.compose import load_config
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.errors import ConfigError


def test_a_plain_run_keeps_its_names() -> None:
    (kind,) = replica_kinds(load_config(["generator.replicas=3"]).generator)
    assert [kind.replica(i) for i in range(kind.config.replicas)] == ["generator-0", "generator-1", "generator-2"]


def test_groups_inherit_what_they_do_not_set() -> None:
    override = "generator.groups={fast:{replicas:2},slow:{engine:fake,slots:4,fake:{latency_median:1.5}}}"
    config = load_config([override, "runtime=local", "generator.threads=2", "generator.fake.length_mean=5"])
    specs = {spec.name: spec for spec in generator_specs(config)}
    assert list(specs) == ["generator-fast-0", "generator-fast-1", "generator-slow-0"]
    fast, slow = specs["generator-fast-1"].generator, specs["generator-slow-0"].generator
    assert (fast.engine, fast.slots, fast.fake.latency_median) == ("hf", 128, 0.05)
    assert (slow.engine, slow.slots, slow.fake.latency_median) == ("fake", 4, 1.5)
    assert (slow.threads, slow.fake.length_mean, slow.temperature) == (2, 5.0, 1.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["generator.replicas=two"], "generator.replicas=two is not a whole number >= 1"),
        (["generator.replicas=2.5"], "generator.replicas=2.5 is not a whole number >= 1"),
        (["generator.replicas=true"], "is not a whole number >= 1"),
        (["generator.replicas=null"], "is not a whole number >= 1"),
        (["generator.replicas=0"], "generator.replicas=0 is not a whole number >= 1"),
        (["generator.replicas=[{name:a},{name:b}]"], "are set by name, such as generator.groups="),
        (["generator.groups={a:{slot:3}}"], "slot is not a setting .did you mean slots?"),
        (["generator.groups=3"], "generator.groups=3 does not map names to groups"),
        (["generator.groups={a:3}"], "does not map names to groups"),
        (["generator.groups={a:{engine:hff}}"], "generator.groups.a: generator.engine=hff is not known .did you mean"),
        (["generator.groups={a:{slots:many}}"], "generator.groups.a.slots=many is of the wrong kind"),
        (["generator.groups={a:{fake:{latency:1}}}"], "generator.groups.a.fake.latency is not a setting"),
        (["generator.groups={a:{temperature:1}}"], "generator.groups.a.temperature is not a setting"),
        (["generator.groups={a:{}}", "generator.replicas=2"], "set it in each group"),
        (["generator.groups={a:{replicas:3,max_replicas:2}}"], "max_replicas=2 is less than"),
        (["generator.groups={a:{max_replicas:2}}", "runtime=local"], "max_replicas needs runtime=ray"),
        (["generator.groups.a.replicas=2"], "write it with two plus signs"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        load_config(overrides)
    assert "\n" not in str(refused.value)
