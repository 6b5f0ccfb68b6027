#!/bin/bash
# Installs packages at exact versions, without their dependencies: by uv, or by pip where uv fails or is not there.
# The arguments are those of `pip install --no-deps`. `make install` sets PIP and UV.
set -euo pipefail
if [ -x "${UV%% *}" ] && $UV --no-deps "$@"; then exit 0; fi
$PIP --no-deps "$@"
