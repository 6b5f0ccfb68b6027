"""Moving weights from the learner to the generators: flat buckets with checksums, each way that a cluster offers."""

DOORS = ("audit", "build_transport", "protocol", "receiver", "sender", "shard_snapshot", "weights_config")
