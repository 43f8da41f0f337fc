"""Put an export on the Hugging Face hub, through ``huggingface_hub``.

Who may write there is between the hub and its library (``hf auth login``, ``HF_TOKEN``); no token passes through here.
"""

from __future__ import annotations

from pathlib import Path

from tonnage.checkpoint.verify import verify
from tonnage.errors import Problem, UserError


def push(directory: Path, repository: str, *, private: bool = True) -> str:
    """Upload the export in ``directory`` to ``repository`` (``owner/name``), made if need be; returns its address.

    Every byte is compared with what was exported first.

    Raises:
        UserError: the directory is not what was exported, or the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    # Of the HTTP client that the library uses, which has changed before.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    if problems := verify(directory):
        raise UserError(*problems)
    try:
        api = HfApi(library_name="tonnage")
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=directory,
            commit_message="Model fine-tuned with tonnage",
            ignore_patterns=[".*"],
        )
    except (HFValidationError, LocalTokenNotFoundError, ValueError) as error:
        found, change = str(error).strip().split("\n")[0], "log in: hf auth login"
    except HfHubHTTPError as error:
        found, change = f"the hub refused: {str(error).strip().splitlines()[0]}", "log in: hf auth login"
    except (transport_error, OSError) as error:
        found, change = f"the hub cannot be reached ({type(error).__name__})", "try again; the export is kept"
    else:
        return str(url)
    raise UserError(Problem(found, "a repository that you may write to, as owner/name", change, f"--push {repository}"))
