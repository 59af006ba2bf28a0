#!/bin/bash
# Trainings and tests that need two GPUs of one host, as short tables; each part takes at most ten minutes.
#
#   PYTHONPATH=... bash tests/gpu/run_two_gpus.sh DIRECTORY PART...
#
# DIRECTORY gets logs and reports; benches write models and shards below it, 12 GB at a time. Parts:
#   tests   layouts, CUDA graphs, FSDP2, two ranks beside one         hosts   two agents in two network namespaces
#   steps   tokens/s of 2B by layout                                  heavy   the same for 4B
#   starts  memory while FSDP2 starts
set -uo pipefail

readonly directory=$1
shift
mkdir -p "$directory"

suite() {
  local name=$1
  shift
  timeout 540 python3 -m pytest -p no:cacheprovider -v -rfE -s "$@" >"$directory/$name.txt" 2>&1
  printf '\n%s: ' "$name"
  grep -E '^=+ .*(passed|failed|error)' "$directory/$name.txt" | tail -n 1
  grep -E '^(FAILED|ERROR)' "$directory/$name.txt" | cut -c 1-300 | head -n 20
  grep -E 'bf16 costs|the same twice|resumed on|NCCL .*(error|warn)' "$directory/$name.txt" | head -n 50
}

bench() {
  local name=$1
  shift
  timeout 580 python3 -m tests.bench.bench_train_step --gpus 2 --dir "$directory" --out "$directory/$name.md" \
    --loader-workers 4 --trace-steps 0 "$@" >"$directory/$name.txt" 2>&1
  printf '\n%s: exit %s\n' "$name" $?
  grep -E 'useful tokens/s/GPU$|Error|Ended' "$directory/$name.txt" | tail -n 16
}

for part in "$@"; do
  printf '\n## %s, after %s s\n' "$part" "$SECONDS"
  case $part in
    tests)
      suite layouts tests/equivalence/test_layouts_gpu.py &
      suite graphs tests/equivalence/test_layer_graphs_gpu.py -k 'tp2 or cp2 or dp2' &
      suite ranks tests/equivalence/test_fsdp.py tests/parity/test_qwen3_vl_gpu.py tests/equivalence/test_killed_gpu.py -k 'gpu' &
      wait
      ;;
    hosts) timeout 300 python3 -m tests.gpu.run_two_hosts "$directory" | tail -n 40 ;;
    steps)
      bench qwen3_vl_2b --model qwen3_vl_2b --global-batch 16 --bins 48 --steps 6 --warmup 3 \
        --parallel '{}' --parallel '{"pp": 2}' --parallel '{"pp": 2, "vision": "dealt"}' \
        --parallel '{"vision": {"ranks": 1}}' --parallel '{"sharding": "fsdp"}'
      ;;
    heavy)
      bench qwen3_vl_4b --model qwen3_vl_4b --global-batch 16 --bins 32 --steps 4 --warmup 2 \
        --parallel '{}' --parallel '{"pp": 2, "vision": "dealt"}' --parallel '{"vision": {"ranks": 1}}'
      ;;
    starts) timeout 300 python3 -m tests.bench.bench_start_memory 2>&1 | tail -n 12 ;;
  esac
done
