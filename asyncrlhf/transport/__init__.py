"""Moving weights from the learner to the generators: flat buckets with checksums, each way that a cluster offers."""

DOORS = (
    "audit", "build_transport", "memory_file", "protocol", "receiver", "relay", "sender", "shard_snapshot",
    "weights_config",
)  # fmt: skip
