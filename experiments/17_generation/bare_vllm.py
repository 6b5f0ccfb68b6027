"""Bare vLLM as a process of its own: reads rounds of requests as JSON lines, answers with the seconds each took."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> int:
    """The first line holds the keywords of ``vllm.LLM``; each later one ``requests`` (their token ids and the keywords
    of ``SamplingParams``). Answers ``ready``, then the seconds and the sampled tokens of each round.
    """
    # vLLM and its processes print to stdout; the answers must stand alone there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        requests: list[dict[str, Any]] = json.loads(line)["requests"]
        prompts: Any = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
        sampling = [SamplingParams(**request["sampling"]) for request in requests]
        llm.reset_prefix_cache()  # both bare sides are given the same prompts, which ours has not seen either
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
