#!/bin/bash
# What plain modules do on a GPU host without Transformer Engine, beside those with it, as short tables.
#
#   bash tests/gpu/run_plain.sh WITH WITHOUT DIRECTORY PART...
#
# WITH and WITHOUT are PYTHONPATHs with the engine and without. DIRECTORY gets roots, logs and reports: 40 GB. Parts:
# flows (the default recipe by itself and with the fallback for older GPUs), tests, more (features, adapters), bench.
set -uo pipefail

readonly with=$1 without=$2 directory=$3
shift 3
mkdir -p "$directory"

# Arguments: name, then those of `athanor run`.
flow() {
  local name=$1 began=$SECONDS
  shift
  PYTHONPATH=$without timeout 420 python3 -m flows.cli.main run --root "$directory/$name" "$@" >"$directory/$name.txt" 2>&1
  printf '%s: exit %s, %s s\n' "$name" $? $((SECONDS - began))
  grep -E 'training will use|stages made|exact_match +[0-9]' "$directory/$name.txt" | head -n 6
  find "$directory/$name" -name 'trainer.log' -path '*train*' -exec grep -h 'modules:' {} + | sort -u | head -n 3
  find "$directory/$name/artifacts/evaluate" -name '*.json' -exec grep -h -m 2 -A 3 '"overall"' {} + | head -n 8
}

suite() {
  local name=$1 path=$2
  shift 2
  PYTHONPATH=$path timeout 400 python3 -m pytest -p no:cacheprovider -v -rf -s "$@" >"$directory/$name.txt" 2>&1
  printf '\n%s: ' "$name"
  grep -E '^(FAILED|ERROR)' "$directory/$name.txt" | cut -c 1-230 | head -n 30
  grep -E '^=+ .*(passed|failed)' "$directory/$name.txt"
  grep -E 'relative to float32|relative distance' "$directory/$name.txt" | head -n 40
}

bench() {
  local model=$1
  shift
  PYTHONPATH=$with timeout 400 python3 -m tests.bench.bench_train_step --model "$model" --bins 24 --steps 6 --warmup 3 \
    --trace-steps 1 --bare "$without" --out "$directory/$model.md" "$@" >"$directory/$model.txt" 2>&1
  printf '\n%s: exit %s\n' "$model" $?
  grep -E 'useful tokens|peak memory|FAILED|Error' "$directory/$model.txt" | tail -n 12
}

for part in "$@"; do
  printf '\n## %s, after %s s\n' "$part" "$SECONDS"
  case $part in
    flows)
      flow plain &
      flow portable --set execution.modules=portable &
      wait
      ;;
    tests)
      suite plain_modules "$without" tests/parity/test_plain_gpu.py tests/parity/test_plain_kernels_gpu.py \
        tests/parity/test_qwen3_vl_gpu.py tests/parity/test_qwen3_5_vl_gpu.py tests/parity/test_peft_gpu.py \
        tests/trainer/layers/test_float8_base_gpu.py tests/trainer/layers/test_attention_gpu.py \
        tests/trainer/loop/test_short_moments.py &
      suite plain_trainings "$without" tests/equivalence/test_plain_trainings_gpu.py \
        tests/equivalence/test_layer_graphs_gpu.py tests/equivalence/test_layouts_gpu.py &
      wait
      ;;
    more)
      flow features --set encode_images.dtype=bfloat16 --set train.vision.frozen=true --set train.merger.frozen=true &
      flow lora --set 'train.adapter={rank: 8, alpha: 16}' --set train.num_steps=30 --set train.optim.warmup_steps=3 &
      wait
      ;;
    again) suite again "$without" tests/equivalence/test_plain_trainings_gpu.py tests/parity/test_plain_gpu.py ;;
    bench)
      bench qwen3_vl_2b --modules engine plain --peer --peer-micro-batch 4 --peer-steps 4
      bench qwen3_5_2b --modules engine plain
      ;;
    portable) bench qwen3_vl_2b --modules portable ;;
  esac
done
