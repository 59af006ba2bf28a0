# shellcheck shell=bash disable=SC2154
# Functions of the scripts run_*_gpus.sh and run_experts.sh, which set `directory` and `gpus` before they source this file.

# Runs GPU tests and prints failures and measured distances. Arguments: name, then those of pytest.
suite() {
  local name=$1
  shift
  timeout 540 python3 -m pytest -p no:cacheprovider -v -rfE -s "$@" >"$directory/$name.txt" 2>&1
  printf '\n%s: ' "$name"
  grep -E '^=+ .*(passed|failed|error)' "$directory/$name.txt" | tail -n 1
  grep -E '^(FAILED|ERROR)' "$directory/$name.txt" | cut -c 1-300 | head -n 20
  grep -E 'bf16 costs|the same twice|resumed on|NCCL .*(error|warn)' "$directory/$name.txt" | cut -c 1-300 | head -n 50
}

# Measures steps by layout and prints the rates. Arguments: name, then those of bench_train_step.
bench() {
  prepare "$@"
  measure
}

declare -A prepared=()
declare -a names=()

# Begins to write a bench's model and data. `measure` measures it. Arguments: those of `bench`.
prepare() {
  local name=$1
  shift
  rm -f "$directory/$name.turn"
  setsid python3 -m tests.bench.bench_train_step --gpus "$gpus" --dir "$directory" --out "$directory/$name.md" \
    --loader-workers 4 --trace-steps 0 --after "$directory/$name.turn" "$@" >"$directory/$name.txt" 2>&1 &
  prepared[$name]=$!
  names+=("$name")
}

# Measures what is prepared, one after another, each for at most ten minutes.
measure() {
  local name
  for name in "${names[@]}"; do
    touch "$directory/$name.turn"
    timeout 580 tail --pid="${prepared[$name]}" -f /dev/null || kill -- "-${prepared[$name]}"
    wait "${prepared[$name]}"
    printf '\n%s: exit %s\n' "$name" $?
    grep -E 'useful tokens/s/GPU$|Error|Ended' "$directory/$name.txt" | cut -c 1-300 | tail -n 16
    grep -E '^\| (peak memory|memory|communication|step, s|TFLOP|times transformers)' "$directory/$name.md"
  done
  names=()
}
