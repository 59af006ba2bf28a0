"""Names of the files that a run reads and writes, and its exit codes."""

RUN_JSON = "run.json"
RESULT_JSON = "result.json"
METRICS_JSONL = "metrics.jsonl"
TRAINER_LOG = "logs/trainer.log"
HELDOUT_JSONL = "heldout.jsonl"  # the newest measurement
HELDOUT_BASE_JSONL = "heldout-base.jsonl"  # before the first step
CHECKPOINTS = "checkpoints"
HF_EXPORT = "hf"
ADAPTER_EXPORT = "adapter"
PROFILE = "profile"  # the folder of traces

EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped after saving; resumes when it is started again
