"""The hf engine: continuous batching of a transformers model. Requests sit in slots, each layer has a cache of the
shape that it needs, and the wall compares every pass with transformers' own before the first request.
"""

DOORS = ("hf_engine",)
