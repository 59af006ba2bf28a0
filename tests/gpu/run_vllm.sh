#!/bin/bash
# The real vLLM on a GPU host: exports of every family answered, adapters beside their base, and answers a second.
#
#   bash tests/gpu/run_vllm.sh PATHS SITE DIRECTORY PART...
#
# PATHS is the PYTHONPATH of athanor, SITE the folder with vLLM's packages alone, DIRECTORY gets roots, logs and reports.
# Parts, with their minutes on one H200 as estimated: smoke (1: one text and one vision model), adapters (5: the check of
# exports, merged and beside the base), engine (5: the engine and the pool), easy_vqa (6: the recipe, trained, exported
# and asked 200 questions), bench (4 a model; BENCH_MODELS).
set -uo pipefail

readonly paths=$1 site=$2 directory=$3
shift 3
mkdir -p "$directory"
printf '#!/bin/sh\nPYTHONPATH=%s exec python3 "$@"\n' "$site" >"$directory/vllm-python"
chmod +x "$directory/vllm-python"
export ATHANOR_VLLM_PYTHON=$directory/vllm-python PYTHONPATH=$paths
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0} # its sampler is compiled at first use, and greedy answers need none

suite() {
  local name=$1 limit=$2
  shift 2
  timeout "$limit" python3 -m pytest tests/parity/test_vllm.py -p no:cacheprovider -m 'full or not full' -rf -s "$@" \
    >"$directory/$name.txt" 2>&1
  printf '\n%s: exit %s\n' "$name" $?
  grep -E '^(FAILED|ERROR|qwen3)|passed|failed|by a margin|fails:' "$directory/$name.txt" | cut -c 1-700
}

for part in "$@"; do
  began=$SECONDS
  case $part in
    smoke) suite smoke 240 -k 'check and (qwen3] or qwen3_vl])' ;;
    adapters) suite adapters 500 -k 'adapter' ;;
    engine) suite engine 500 -k 'engine' ;;
    easy_vqa)
      timeout 520 python3 -m flows.cli.main run easy_vqa --root "$directory/easy_vqa" --set verify.num_questions=200 \
        >"$directory/easy_vqa.txt" 2>&1
      printf '\neasy_vqa: exit %s\n' $?
      tail -n 30 "$directory/easy_vqa.txt"
      find "$directory/easy_vqa/artifacts/verify" -name report.json -exec cat {} + | cut -c 1-4000
      ;;
    bench)
      for model in ${BENCH_MODELS:-qwen3_vl_2b}; do
        timeout 300 python3 -m tests.bench.bench_engines --model "$model" --dir "$directory" \
          --out "$directory/$model.md" >"$directory/$model.txt" 2>&1
        printf '\n%s: exit %s\n' "$model" $?
        tail -n 12 "$directory/$model.txt"
      done
      ;;
  esac
  printf '%s took %s s\n' "$part" $((SECONDS - began))
done
