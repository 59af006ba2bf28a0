#!/bin/bash
# A user's own data and GPU, as short tables: `init` with --gpu-memory 24 and its recipe unchanged, and the recipe
# lora_80gb.
#
#   PYTHONPATH=... bash tests/gpu/run_own_data.sh DIRECTORY PART...
#
# DIRECTORY gets models, data, roots and logs: 60 GB. Parts: 24gb, 80gb. LIMIT is the longest time of a run in seconds.
set -uo pipefail

readonly directory=$1
shift
mkdir -p "$directory"

athanor() { python3 -m flows.cli.main "$@"; }

peaks() {
  grep -hE '^  memory|about [0-9.]+ GB in the fullest' "$directory/$1-plan.txt" | head -n 2
  grep -hE 'stages made|Error|error:|out of memory' "$directory/$1.txt" | head -n 4
  python3 - "$directory/$1-root" <<'EOF'
import json, sys
from pathlib import Path

for path in Path(sys.argv[1]).glob("*/train*/**/metrics.jsonl"):
    rows = [json.loads(line) for line in open(path)]
    seconds = sorted(row["step_seconds"] for row in rows)
    print(f"{len(rows)} steps, median {seconds[len(seconds) // 2]:.2f} s, at most {max(row['memory_gb'] for row in rows):.2f} GB;"
          f" loss {rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f}; {rows[-1]['tokens_per_second']:,.0f} tokens/s")
EOF
}

# Arguments: name, then those of `plan` and `run`.
planned_run() {
  local name=$1 began=$SECONDS
  shift
  athanor plan "$@" --root "$directory/$name-root" >"$directory/$name-plan.txt" 2>&1 || tail -n 5 "$directory/$name-plan.txt"
  timeout "${LIMIT:-560}" python3 -m flows.cli.main run "$@" --root "$directory/$name-root" >"$directory/$name.txt" 2>&1
  printf '%s: exit %s, %s s\n' "$name" $? $((SECONDS - began))
  peaks "$name"
}

data() { [ -d "$directory/data" ] || python3 -m tests.gpu.draw_data "$directory/data" 30; }

for part in "$@"; do
  printf '\n## %s, after %s s\n' "$part" "$SECONDS"
  case $part in
    24gb)
      data
      python3 -m tests.gpu.write_model qwen3_vl_4b "$directory/4b"
      athanor init "$directory/data" --model "$directory/4b" --gpu-memory 24 --out "$directory/24gb.yaml" \
        --root "$directory/24gb-root" >"$directory/24gb-init.txt" 2>&1 || tail -n 5 "$directory/24gb-init.txt"
      grep -E '^Model:' "$directory/24gb-init.txt"
      planned_run 24gb "$directory/24gb.yaml"
      ;;
    80gb)
      data
      python3 -m tests.gpu.write_model qwen3_vl_8b "$directory/8b"
      planned_run 80gb lora_80gb --set "model=$directory/8b" --set "data=$directory/data" --set 'convert.subsets=[]' \
        --set train.num_steps=6 --set train.optim.warmup_steps=2 --set evaluate.max_samples_per_subset=4 \
        --set evaluate.max_new_tokens=8 --set 'execution.registry.gates={}'
      ;;
  esac
done
