#!/bin/bash
# Models with experts on one GPU of 80 GB, as short tables; each part takes at most ten minutes.
#
#   PYTHONPATH=... bash tests/gpu/run_experts.sh DIRECTORY PART...
#
# DIRECTORY gets logs and reports. Models of 30B and 35B are written to /dev/shm: 62 and 71 GB, on a host of 128 GB. Parts:
#   tests    every gradient in bf16, twice the same bits, in a CUDA graph; models in float32
#   kernels  the experts of a layer: athanor, grouped_mm, the loop, Transformer Engine, beside the matrix rate
#   proxy    the proxy of 4 layers in full training, transformers beside it
#   layers   4 layers of 30B-A3B in full training, transformers beside it; 4 of 35B-A3B take 80 GB by the plan
#   whole30  Qwen3-VL-30B-A3B whole, adapters on every expert beside a float8 base; whole35: Qwen3.5-35B-A3B
#   peer30   PEFT's adapters in transformers on the same samples; peer35
#   memory   peaks of both beside the plan, with the memory of the host
set -uo pipefail

readonly directory=$1
export gpus=1
shift
mkdir -p "$directory"
# shellcheck source=tests/gpu/parts.sh
source "$(dirname "$0")/parts.sh"

readonly adapter='{"rank": 16, "alpha": 32, "base": "float8", "targets": ["attention", "experts"]}'
readonly again='{"recompute": "full", "recompute_vision": true}'

# Arguments: name, model, then those of bench_train_step.
full_training() {
  bench "$1" --model "$2" --moments bfloat16 --global-batch 4 --bins 24 --steps 5 --warmup 2 \
    --parallel '{"recompute_vision": true}' --peer --peer-batch 16 --peer-steps 3 --peer-warmup 1 --peer-micro-batch 2 4
}

adapted() {
  local name=$1
  shift
  bench "$name" --adapter "$adapter" --parallel "$again" --dir /dev/shm --global-batch 4 --bins 16 --steps 4 --warmup 2 "$@"
}

for part in "$@"; do
  printf '\n## %s, after %s s\n' "$part" "$SECONDS"
  case $part in
    tests)
      suite products tests/parity/test_experts_gpu.py
      suite models tests/parity/test_plain_gpu.py -k moe
      ;;
    kernels) timeout 300 python3 -m tests.bench.bench_experts --trace 2>&1 | tee "$directory/kernels.txt" | grep -E '^(\||[A-Z])' ;;
    proxy) full_training proxy qwen3_5_moe_proxy ;;
    layers) full_training layers qwen3_vl_30b_a3b:4 ;;
    whole30) adapted whole30 --model qwen3_vl_30b_a3b ;;
    whole35) adapted whole35 --model qwen3_5_35b_a3b ;;
    peer30) adapted peer30 --model qwen3_vl_30b_a3b --no-ours --peer --peer-micro-batch 1 2 --peer-batch 8 --peer-steps 2 --peer-warmup 1 ;;
    peer35) adapted peer35 --model qwen3_5_35b_a3b --no-ours --peer --peer-micro-batch 1 2 --peer-batch 8 --peer-steps 2 --peer-warmup 1 ;;
    memory)
      timeout 590 python3 -m tests.bench.bench_plan_memory --dir /dev/shm --out "$directory/memory.md" \
        30b-a3b-float8 35b-a3b-float8 2>&1 | grep -E '^\|' | tail -n 4
      ;;
  esac
done
