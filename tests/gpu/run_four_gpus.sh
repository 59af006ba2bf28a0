#!/bin/bash
# Trainings and tests that need four GPUs of one host, as short tables; each part takes at most ten minutes.
#
#   PYTHONPATH=... bash tests/gpu/run_four_gpus.sh DIRECTORY PART...
#
# DIRECTORY gets logs and reports; benches write models and shards below it: 6 GB for steps, 40 for experts, 50 for large.
# They are written first, and measured after the other parts have ended. Parts:
#   pairs FIRST SECOND  parts of run_two_gpus.sh at once, FIRST on GPUs 0 and 1, SECOND on 2 and 3; commas between parts
#   tests    layouts of four ranks against one GPU            steps  tokens/s of 2B by layout, and of one GPU
#   experts  ranks that divide the experts                    large  8B and 9B whole, Qwen3.5-4B with cp 4
#   flow     `athanor run` with a save, stopped, resumed in another layout
set -uo pipefail

readonly directory=$1
export gpus=4
shift
mkdir -p "$directory"
# shellcheck source=tests/gpu/parts.sh
source "$(dirname "$0")/parts.sh"

pair() {
  local -a parts
  IFS=, read -ra parts <<<"$2"
  CUDA_VISIBLE_DEVICES=$1 bash "$(dirname "$0")/run_two_gpus.sh" "$directory/gpus-$1" "${parts[@]}" >"$directory/gpus-$1.txt" 2>&1
}

# Runs the default recipe on four ranks. Arguments: a layout, then further ones of `athanor run`.
flow() {
  python3 -m flows.cli.main run embedded --root "$directory/flow" --set train.global_batch_size=4 --set train.num_steps=250 \
    --set plan_bins.pad_multiple=8 --set execution.cluster.processes=4 --set execution.checkpoint.save_interval=40 \
    --set "execution.parallel=$1" "${@:2}"
}

flow_resumed() {
  local run
  flow '{pp: 2}' >"$directory/flow-first.txt" 2>&1 &
  run=$!
  until ls -d "$directory"/flow/scratch/train-*/checkpoints/step-* >/dev/null 2>&1 || ! kill -0 $run 2>/dev/null; do sleep 0.2; done
  pkill -TERM -f "run embedded --root $directory/flow"
  wait $run
  printf 'stopped with exit %s\n' $?
  flow '{tp: 2, sequence_parallel: true}' >"$directory/flow-second.txt" 2>&1
  printf 'resumed: exit %s\n' $?
  grep -hE '^  [a-z_]+ +(made|reused) |stages made|rror' "$directory/flow-second.txt" | cut -c 1-200
  grep -hiE 'resum|checkpoint: step' "$directory"/flow/*/train/*/logs/trainer.log | cut -c 1-200 | head -n 12
}

while [ $# -gt 0 ]; do
  printf '\n## %s, after %s s\n' "$1" "$SECONDS"
  case $1 in
    pairs)
      pair 0,1 "$2" &
      pair 2,3 "$3"
      wait
      cat "$directory/gpus-0,1.txt" "$directory/gpus-2,3.txt"
      shift 2
      ;;
    tests) suite layouts tests/equivalence/test_layouts_gpu.py -k on-4 ;;
    steps)
      prepare qwen3_vl_2b --model qwen3_vl_2b --seq-len 4096 --global-batch 64 --bins 160 --steps 5 --warmup 2 --one-gpu \
        --parallel '{}' --parallel '{"pp": 2}' --parallel '{"pp": 2, "vision": "dealt"}' --parallel '{"vision": {"ranks": 2}}' \
        --parallel '{"tp": 2, "pp": 2, "sequence_parallel": true, "vision": "dealt"}'
      ;;
    experts)
      prepare experts-4-layers --model qwen3_vl_30b_a3b:4 --seq-len 4096 --global-batch 32 --bins 96 --steps 4 --warmup 2 \
        --trace-steps 1 --parallel '{}' --parallel '{"ep": 2}' --parallel '{"ep": 4}'
      prepare experts-24-layers --model qwen3_vl_30b_a3b:24 --seq-len 4096 --global-batch 32 --bins 96 --steps 4 --warmup 2 \
        --trace-steps 1 --parallel '{"ep": 4}'
      ;;
    large)
      prepare qwen3_vl_8b --model qwen3_vl_8b --global-batch 16 --bins 64 --steps 4 --warmup 2 \
        --parallel '{"recompute_vision": true}' --parallel '{"sharding": "fsdp", "recompute_vision": true}'
      prepare qwen3_5_9b --model qwen3_5_9b --global-batch 16 --bins 64 --steps 4 --warmup 2 \
        --parallel '{"tp": 2, "sequence_parallel": true, "recompute_vision": true}' \
        --parallel '{"sharding": "fsdp", "recompute_vision": true}'
      prepare qwen3_5_4b --model qwen3_5_4b --global-batch 4 --bins 32 --steps 4 --warmup 2 --parallel '{"cp": 4}'
      ;;
    flow) flow_resumed ;;
  esac
  shift
done
measure
