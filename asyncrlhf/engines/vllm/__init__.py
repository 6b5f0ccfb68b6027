"""The vllm engine: its start, its weights, its adapters, and the share of a GPU's memory that it takes."""

DOORS = ("core", "memory_share", "vllm_engine")
