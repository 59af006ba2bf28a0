#!/bin/bash
# Trainings and tests that need two GPUs of one host, as short tables; each part takes at most ten minutes.
#
#   PYTHONPATH=... bash tests/gpu/run_two_gpus.sh DIRECTORY PART...
#
# DIRECTORY gets logs and reports; benches write models and shards below it, 12 GB at a time. Parts:
#   tests    layouts of Qwen3-VL against one GPU                 others  the same for Qwen3.5 and for models with experts
#   graphs   CUDA graphs, FSDP2, two ranks beside one            hosts   two agents in two network namespaces
#   steps    tokens/s of 2B by layout                            cached  2B with frozen vision, features computed and read
#   heavy    tokens/s of 4B by layout                            vision  an encoder of 45 layers with Qwen3-0.6B
#   experts  ranks that divide the experts, with the exchange    starts  memory while FSDP2 starts
set -uo pipefail

readonly directory=$1
export gpus=2
shift
mkdir -p "$directory"
# shellcheck source=tests/gpu/parts.sh
source "$(dirname "$0")/parts.sh"

for part in "$@"; do
  printf '\n## %s, after %s s\n' "$part" "$SECONDS"
  case $part in
    tests) suite layouts tests/equivalence/test_layouts_gpu.py -k 'not hybrid and not experts' ;;
    others) suite other-layouts tests/equivalence/test_layouts_gpu.py -k 'hybrid or experts' ;;
    graphs)
      suite graphs tests/equivalence/test_layer_graphs_gpu.py -k 'tp2 or cp2 or dp2 or pp2'
      suite ranks tests/equivalence/test_fsdp.py tests/parity/test_qwen3_vl_gpu.py tests/parity/test_experts_gpu.py -k 'gpu'
      ;;
    hosts) timeout 300 python3 -m tests.gpu.run_two_hosts "$directory" | tail -n 40 ;;
    steps)
      bench qwen3_vl_2b --model qwen3_vl_2b --global-batch 16 --bins 48 --steps 6 --warmup 3 \
        --parallel '{}' --parallel '{"pp": 2}' --parallel '{"pp": 2, "vision": "dealt"}' --parallel '{"vision": {"ranks": 1}}'
      ;;
    cached)
      timeout 400 python3 -m tests.bench.bench_cached --model qwen3_vl_2b --gpus 2 --global-batch 16 \
        --bins 48 --steps 6 2>&1 | tail -n 8
      ;;
    heavy)
      # Dealt images in bins of 8,192 take more than 140 GB.
      bench qwen3_vl_4b --model qwen3_vl_4b --seq-len 6144 --global-batch 16 --bins 32 --steps 4 --warmup 2 \
        --parallel '{}' --parallel '{"pp": 2, "vision": "dealt"}' \
        --parallel '{"vision": {"ranks": 1}}'
      ;;
    vision)
      bench vision_heavy --model vision_heavy --seq-len 5120 --global-batch 16 --bins 40 --steps 3 --warmup 2 \
        --parallel '{}' --parallel '{"pp": 2, "vision": "dealt"}' \
        --parallel '{"vision": {"ranks": 1}}'
      ;;
    experts)
      bench experts --model qwen3_vl_30b_a3b:4 --seq-len 4096 --global-batch 16 --bins 48 --steps 4 --warmup 2 --trace-steps 1 \
        --parallel '{}' --parallel '{"ep": 2}'
      ;;
    starts) timeout 300 python3 -m tests.bench.bench_start_memory 2>&1 | tail -n 12 ;;
  esac
done
