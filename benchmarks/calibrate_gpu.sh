#!/bin/sh
# Measures step times of an 8B target with a 1B draft on this GPU host, without the models, in two minutes or so:
#   benchmarks/calibrate_gpu.sh [DIRECTORY]
# The files that it writes are what trtspec/plan/curves is for. Not yet run on a GPU.
set -eu
out=${1:-.cache/plan}
trtspec plan calibrate --device cuda --shape Llama-3.1-8B --draft-shape Llama-3.2-1B --dtype bfloat16 \
    --max-batch-size 64 --seconds 100 --out "$out/llama-3.1-8b-1b.json"
