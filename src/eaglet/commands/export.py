"""export drafter: the trained drafter in a folder, or on the hub, as an engine loads it."""

import os
from pathlib import Path
from typing import Any

from eaglet import drafter, export, files, target
from eaglet.errors import EagletError
from eaglet.params import Params
from eaglet.paths import DRAFTER, METRICS, ROWS, STATES
from eaglet.store import MANIFEST


def run(params: Params, engine: export.Engine, folder: Path, repo: str | None) -> None:
    """Write the folder; with `repo`, upload it."""
    model = target.load(params.target)
    steps = params.evaluate.draft_steps
    local = params.target.model == target.PACKAGED or Path(params.target.model).expanduser().is_dir()
    base = model.fingerprint.name if local else params.target.model
    data = files.digest([files.file_sha256(path) for path in (ROWS, STATES / MANIFEST) if path.exists()])
    metrics = {path.stem: files.read_json(path, path.stem) for path in METRICS.glob("*.json")}
    text = export.card(
        engine, base, repo or str(folder), steps, drafter.read_layers(DRAFTER), metrics, f"sha256:{data}"
    )
    export.write(DRAFTER, folder, engine, model, base, steps, text)
    command = export.serve_command(engine, str(model.folder) if local else base, str(folder), steps)
    print(f"export: {folder} for {engine}; serve it with\n{command}")
    if repo is not None:
        print(f"export: {push(folder, repo)}")


def push(folder: Path, repo: str) -> str:
    """Upload to the hub, a new repository being private; the token is huggingface_hub's own.

    Raises:
        EagletError: no token, no network, or no right to write.
    """
    os.environ.pop("HF_HUB_OFFLINE", None)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api: Any = HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="A drafter, by eaglet"))
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError, ValueError) as error:
        line = " ".join(str(error).split())[:300]
        raise EagletError(f"{repo} was not written ({line}): `hf auth login`, and check the name") from None
