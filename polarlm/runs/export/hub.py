"""An exported folder on the Hugging Face hub: one commit with every file."""

from __future__ import annotations

import re
from pathlib import Path

from polarlm.errors import UserError
from polarlm.runs.files import require_plain_files

NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_name(repo: str) -> None:
    """Refuse what cannot be the name of a repository, before anything is written."""
    if not NAME.fullmatch(repo):
        raise UserError(f"--push {repo}: give the repository as owner/name")


def push_folder(folder: Path, repo: str, *, private: bool = False) -> str:
    """Create the repository if it does not exist, commit the folder's files, and return the address of the commit."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    check_name(repo)
    require_plain_files(folder)
    if get_token() is None:
        raise UserError(f"--push {repo}: not logged in to the Hugging Face hub; run `hf auth login`, or set HF_TOKEN")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    operations = [CommitOperationAdd(str(path.relative_to(folder)), path) for path in files]
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.create_commit(repo, operations, commit_message="Exported by polarlm")
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "?"
        why = {401: "the token is not valid", 403: "the token may not write there"}.get(status, f"HTTP {status}")
        raise UserError(f"--push {repo}: the hub refused it ({why}); the folder is complete in {folder}") from None
    except Exception as error:  # which library speaks HTTP, and so its errors, depends on huggingface_hub's version
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--push {repo}: the hub can't be reached ({reason}); the folder is complete in {folder}"
        ) from None
    return done.commit_url
