#!/bin/bash
# The whole flow on a GPU host, from raw data to a release: the default recipe, then the cauldron recipe with its own
# settings on drawn pictures and a model of Qwen3-VL-2B's shape with random weights. Prints the seconds of each stage.
#
#   bash tests/gpu/run_whole_flow.sh DIRECTORY >whole_flow.md
#
# DIRECTORY gets two roots and the data: 70 GB. The first argument after it, if any, is a file of further --set values, a
# line each, for the second run: with model.variant=qwen3_5_2b it is of that family, with qwen3_vl_tiny and
# train.precision=float32 it runs on a CPU. PARTS names the runs: default 2b.
set -euo pipefail

readonly directory=$1
readonly python=${PYTHON:-python3}
declare -a further=()
[ $# -lt 2 ] || mapfile -t further <"$2"

readonly model='{kind: random, variant: qwen3_vl_2b, seed: 0}'
# Half a minute of steps with two saves; few and short answers, which random weights do not end by themselves.
declare -a settings=("data=$directory/data" "model=$model" 'convert.subsets=[]' train.num_steps=12
  train.optim.warmup_steps=2 train.heldout_interval=6 execution.checkpoint.save_interval=4 evaluate.max_new_tokens=16
  evaluate.max_samples_per_subset=8 'execution.registry.gates={}' "${further[@]}")

# Runs one recipe and prints its table; its whole output goes to a file. Arguments: root, then those of `athanor run`.
flow() {
  local root=$1 began=$SECONDS log=$1.txt
  shift
  printf '\n## athanor run %s\n\n```\n' "${1:-}"
  if ! "$python" -m flows.cli.main run "$@" --root "$root" >"$log" 2>&1; then
    tail -n 40 "$log"
    return 1
  fi
  grep -E '^  [a-z_]+ +(made|reused) |stages made' "$log"
  printf '```\n\nWith its start: %s s.' $((SECONDS - began))
  "$python" - "$root" <<'EOF'
import json, sys
from pathlib import Path

rows = [json.loads(line) for line in open(next(Path(sys.argv[1]).glob("artifacts/train/*/metrics.jsonl")))]
seconds = sorted(row["step_seconds"] for row in rows)
print(f" {len(rows)} steps, median {seconds[len(seconds) // 2]:.2f} s, longest {seconds[-1]:.2f} s;"
      f" at most {max(row['memory_gb'] for row in rows):.1f} GB; loss {rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f}.\n")
EOF
}

mkdir -p "$directory"
printf '# The whole flow on a GPU host\n\n'
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU"
"$python" -c 'from tests.bench.host import describe; print(describe()[1])'
for part in ${PARTS:-default 2b}; do
  if [ "$part" = default ]; then
    flow "$directory/default" embedded
  else
    "$python" -m tests.gpu.draw_data "$directory/data" 120
    flow "$directory/2b" cauldron "${settings[@]/#/--set=}"
    grep -hE 'checkpoint: step|host memory for saves' "$directory"/2b/artifacts/train/*/logs/trainer.log | sed 's/^/- /'
  fi
done
