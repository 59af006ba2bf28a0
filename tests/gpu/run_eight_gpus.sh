#!/bin/bash
# Trainings that need eight GPUs of one host, as short tables; each part takes at most ten minutes.
#
#   PYTHONPATH=... bash tests/gpu/run_eight_gpus.sh DIRECTORY PART...
#
# DIRECTORY gets logs and reports; benches write models and shards below it, 80 GB at a time. Parts:
#   scaling  tokens/s a GPU of 2B on 1, 2, 4 and 8 GPUs       vision  2B, by the ranks that encode images
#   large    32B whole by layout                              hybrid  Qwen3.5-27B whole
#   experts  30B-A3B and 35B-A3B whole, ep 8                  hosts   two agents of four ranks, over sockets
set -uo pipefail

readonly directory=$1
export gpus=8
shift
mkdir -p "$directory"
# shellcheck source=tests/gpu/parts.sh
source "$(dirname "$0")/parts.sh"

readonly short=(--seq-len 4096 --steps 4 --warmup 2)

for part in "$@"; do
  printf '\n## %s, after %s s\n' "$part" "$SECONDS"
  case $part in
    scaling)
      for gpus in 2 4 8; do
        bench "qwen3_vl_2b-$gpus" --model qwen3_vl_2b --global-batch $((8 * gpus)) --bins $((24 * gpus)) --steps 6 --warmup 3 --one-gpu
      done
      ;;
    vision)
      bench qwen3_vl_2b-vision --model qwen3_vl_2b --global-batch 64 --bins 160 --steps 5 --warmup 2 --parallel '{}' \
        --parallel '{"pp": 2, "vision": "dealt"}' --parallel '{"vision": {"ranks": 2}}' --parallel '{"tp": 2, "pp": 2, "cp": 2}'
      ;;
    large)
      bench qwen3_vl_32b --model qwen3_vl_32b "${short[@]}" --global-batch 32 --bins 96 --trace-steps 1 \
        --parallel '{"tp": 4, "pp": 2, "sequence_parallel": true, "vision": "dealt", "recompute": "full"}' \
        --parallel '{"sharding": "fsdp", "recompute": "full", "recompute_vision": true}'
      ;;
    hybrid)
      bench qwen3_5_27b --model qwen3_5_27b "${short[@]}" --global-batch 32 --bins 96 --trace-steps 1 \
        --parallel '{"tp": 4, "pp": 2, "sequence_parallel": true, "vision": "dealt", "recompute": "full"}'
      ;;
    experts)
      for model in qwen3_vl_30b_a3b qwen3_5_35b_a3b; do
        bench "$model" --model "$model" "${short[@]}" --global-batch 64 --bins 192 --trace-steps 1 \
          --parallel '{"ep": 8, "recompute": "full"}'
      done
      ;;
    hosts) timeout 400 python3 -m tests.gpu.run_two_hosts "$directory" 4 | tail -n 40 ;;
  esac
done
