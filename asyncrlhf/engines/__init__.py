"""Generation engines: fake, hf and vllm."""
