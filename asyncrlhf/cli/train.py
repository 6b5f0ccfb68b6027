"""``asyncrlhf train``: one run, or Hydra's multirun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from asyncrlhf.cli.compose import CONFIG_NAME, checked, load_config, search_path_override, split_config_dir
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.orchestrator.config import RunConfig, conf_folder, register_schema

# What only Hydra's own command line answers.
HYDRA_FLAGS = {"-m", "--multirun", "--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help", "--version"}


def main(arguments: Sequence[str]) -> int:
    rest, folder = split_config_dir(arguments)
    if any(argument.split("=")[0] in HYDRA_FLAGS for argument in rest):
        return _with_hydra(rest, folder)
    return run(load_config(arguments))


def run(config: RunConfig) -> int:
    from asyncrlhf.orchestrator.run import train
    from asyncrlhf.orchestrator.summary import plain_words

    try:
        summary = train(config)
    except AsyncRLHFError:
        raise
    except KeyboardInterrupt:
        return 130
    print(plain_words(summary))
    return 130 if summary["exit_reason"] == "interrupted" else 0


def _with_hydra(arguments: Sequence[str], folder: Path | None) -> int:
    """Hydra composes, launches and names the jobs' folders; a job that fails gives the sweep its exit code."""
    register_schema()
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=CONFIG_NAME)
    def job(config: DictConfig) -> int:
        output = Path(HydraConfig.get().runtime.output_dir)
        with open_dict(config):
            config.run_dir = config.run_dir or str(output)
        try:
            codes.append(run(checked(config)))
        except AsyncRLHFError as error:
            print(f"asyncrlhf: {HydraConfig.get().job.override_dirname}: {error}", file=sys.stderr)
            codes.append(error.exit_code)
            if isinstance(error, ConfigError):
                raise SystemExit(error.exit_code) from None
        return codes[-1]

    sys.argv = ["asyncrlhf train", *search_path_override(folder), *arguments]
    job()
    return max(codes, default=0)
