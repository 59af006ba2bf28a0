"""The push of a released model to a hub: checked before a run starts, done at its end."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from dataset_builders.errors import InputError, one_line
from stages.release.model_card import HUB_NAME, MODEL_CARD
from stages.shared.inputs.model_directory import ModelDirectory, model_input


def check_push(repo_id: str | None) -> None:
    """Check, before a run starts, that there is a token for the push.

    Raises:
        InputError: there is no token.
    """
    if repo_id is not None and huggingface_hub.get_token() is None:
        raise InputError(f"pushing to {repo_id} needs a token; log in with `hf auth login` or set HF_TOKEN")


def push_to_hub(hf_dir: Path, repo_id: str, private: bool = True, api: huggingface_hub.HfApi | None = None) -> str:
    """Upload an exported directory with its card; return the URL of the hub's model page.

    Args:
        repo_id: owner/name; created if it does not exist.
        private: whether a newly created repository is private; an existing one is not changed.
        api: client of another hub; None: the hub of HF_ENDPOINT, with the token of `hf auth login` or HF_TOKEN.

    Raises:
        InputError: the directory is not a complete model or was changed, `repo_id` is not a hub name, or the hub
            refuses the push or does not answer.
    """
    if not HUB_NAME.fullmatch(repo_id):
        raise InputError(f"repo_id={repo_id!r} is not a hub name; give owner/name")
    model = ModelDirectory(hf_dir)
    model.check_weights()
    model_input(model)  # compares every file with the manifest
    if not (hf_dir / MODEL_CARD).is_file():
        raise InputError(f"{hf_dir} has no {MODEL_CARD}, the model card; write it before the model is pushed")
    api = api or huggingface_hub.HfApi()
    try:
        page = api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id, folder_path=hf_dir, repo_type="model", commit_message="Model exported by athanor"
        )
    except LocalTokenNotFoundError as error:
        raise InputError(f"pushing {repo_id} needs a token; log in with `hf auth login` or set HF_TOKEN") from error
    except HFValidationError as error:
        raise InputError(f"repo_id={repo_id!r} is not a hub name ({one_line(error)}); give owner/name") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise InputError(
            f"the hub refused {repo_id} ({status}: {one_line(error)}); check that your token may write there"
        ) from error
    except Exception as error:  # each possible transport library (requests, httpx, xet) has its own kinds
        raise InputError(
            f"pushing {repo_id} to {api.endpoint} failed ({type(error).__name__}: {one_line(error)}); "
            "push again: files that arrived are not sent twice"
        ) from error
    return str(page)
