"""Generation engines: what all share (``engine.py``), the fake one, and one inner room each for hf and vllm.
``build_engine.py`` finds them by name.
"""

DOORS = ("build_engine", "engine", "generator_config", "hf.hf_engine", "vllm.memory_share", "vllm.vllm_engine")
