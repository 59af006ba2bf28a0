"""A script for the kill -9 test of the answer stage: python -m tests.helpers.kill_answer DIRECTORY."""

import functools
import sys
from pathlib import Path

import torch

import stages.answer.transformers_engine
from stages.answer.heldout import ANSWERS_JSONL
from stages.answer.stage import AnswerConfig
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.prompt import read_prompt_format
from stages.shared.inputs.model_directory import ModelDirectory
from stages.shared.launchers.config import ClusterConfig
from tests.helpers.evaluation import answered, hf_artifact, mixed_samples, samples_artifact, talkative_hf_dir
from tests.helpers.kill import kill_and_rerun, print_result


def main(directory: Path) -> None:
    torch.set_num_threads(1)  # a fork copies no threads, so none may be running
    inputs = {
        "hf": hf_artifact(directory / "export", talkative_hf_dir()),
        "samples": samples_artifact(directory / "samples", mixed_samples(7)),
    }
    stages.answer.transformers_engine.Generator = functools.cache(stages.answer.transformers_engine.Generator)
    hf_dir = inputs["hf"].dir / "hf"
    model = ModelDirectory(hf_dir)
    stages.answer.transformers_engine.Generator(model, None, read_prompt_format(model))  # loaded once for all forks
    # Small prompts and one thread, so that this stage is killed and not a thread pool of torch.
    config = AnswerConfig(max_new_tokens=4, part_size=3, batch_size=2)

    def run(root: Path) -> Path:
        """Return a directory with the files that must be equal. speed.json and the reports are left out, since they
        hold times."""
        made = answered(config, inputs, root, StageResources(cluster=ClusterConfig(num_threads=1))).dir
        same = made.parent / "same"
        same.mkdir(exist_ok=True)
        for name in (ANSWERS_JSONL, "manifest.json"):
            (same / name).write_bytes((made / name).read_bytes())
        (same / "files").write_text("\n".join(sorted(p.name for p in made.iterdir())))
        return same

    print_result(kill_and_rerun(run, directory / "answer", every=4))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
