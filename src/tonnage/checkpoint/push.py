"""Put an export on the Hugging Face hub, through ``huggingface_hub``.

Who may write there is between the hub and its library (``hf auth login``, ``HF_TOKEN``); no token passes through here.
Files are sent one by one, and what has arrived is not sent again; a commit then changes all of them at once, so that
the repository holds one export whole at any moment, whenever this is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tonnage.checkpoint.verify import verify
from tonnage.errors import UserError, user_error

REPLACED = (".safetensors", ".safetensors.index.json", ".gguf")
"""Files of an earlier export that go when a later one has none of that name; nobody else's are touched."""


def push(
    directory: Path,
    repository: str,
    *,
    private: bool = True,
    message: str = "Model fine-tuned with tonnage",
    where: str = "--push",
) -> str:
    """Upload the export in ``directory`` to ``repository`` (``owner/name``), made if need be; returns its address.

    Every byte is compared with what was exported first. ``where`` says in a refusal who named the repository.

    Raises:
        UserError: the directory is not what was exported, the hub refuses, or the repository is public and must not be.
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
        info = api.model_info(url.repo_id)
        if private and info.private is False:
            raise user_error(
                found="a repository that everybody can read",
                needed="a private one, as nothing else was asked for",
                change="make it private, name another one, or say that it is public (--public, checkpoint.public)",
                where=f"{where} {repository}",
            )
        _commit(api, url.repo_id, directory, message, [file.rfilename for file in info.siblings or ()])
    except (HFValidationError, LocalTokenNotFoundError, ValueError) as error:
        reason, change = str(error).strip().split("\n")[0], "log in: hf auth login"
    except HfHubHTTPError as error:
        reason, change = f"the hub refused: {str(error).strip().splitlines()[0]}", "log in: hf auth login"
    except (transport_error, OSError) as error:
        reason, change = f"the hub cannot be reached ({type(error).__name__})", "try again; the export is kept"
    else:
        return str(url)
    raise user_error(reason, "a repository that you may write to, as owner/name", change, f"{where} {repository}")


def _commit(api: Any, repository: str, directory: Path, message: str, on_hub: Sequence[str]) -> None:
    """Send the files of a directory, one after another, then have all of them there at once."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    named = {path.relative_to(directory).as_posix(): path for path in paths}
    named = {name: path for name, path in named.items() if not name.startswith(".")}
    added = [CommitOperationAdd(name, path) for name, path in named.items()]
    for addition in added:
        api.preupload_lfs_files(repository, [addition])
    old = [name for name in on_hub if name.endswith(REPLACED) and name not in named]
    removed = [CommitOperationDelete(name) for name in old]
    api.create_commit(repository, [*removed, *added], commit_message=message)
