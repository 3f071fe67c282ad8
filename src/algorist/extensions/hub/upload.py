"""Uploads to the hub: after a run, at its checkpoints, or of an exported folder. A training never waits for them to work."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from algorist.config.schema import Recipe
from algorist.errors import AlgoristError, ConfigError, HubError
from algorist.extensions.hub import HubSection
from algorist.extensions.model_folder.card import base_warning, without_home
from algorist.extensions.model_folder.write import gather, put_file
from algorist.store.safe_text import first_line
from algorist.store.stages import STAGES, checkpoints

log = logging.getLogger("algorist.extensions.hub.upload")

RETRY_AFTER_S = (0.0, 2.0, 8.0)


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids every call."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def check_hub(section: HubSection, say: Callable[[str], None]) -> None:
    """Look before the training whether an upload can work.

    Raises:
        ConfigError: There is no token.
    """
    if not section.push:
        return
    if is_offline():
        say(
            "hub.push is on, but HF_HUB_OFFLINE is set: nothing will be uploaded; the run says how to do it later"
        )
    else:
        require_token("hub.push is on")


def require_token(why: str) -> None:
    """Refuse to go on without a token, which uploads need.

    Raises:
        ConfigError: There is none, and no HF_HUB_OFFLINE that forbids the upload anyway.
    """
    from huggingface_hub import get_token

    if get_token() is None and not is_offline():
        raise ConfigError(
            f"{why}, but there is no token for the hub; write once: hf auth login, or: export HF_TOKEN=…"
        )


def upload(
    folder: Path,
    section: HubSection,
    *,
    name: str,
    message: str,
    path_in_repo: str | None = None,
    say: Callable[[str], None] = log.info,
) -> str:
    """Upload a folder in one commit and return the repository's address; the repository is made when it is new.

    Args:
        folder: All its files are uploaded.
        section: Repository, privacy and branch.
        name: Repository when the section names none.
        message: The commit's message.
        path_in_repo: Folder there; the root when left out.
        say: Told when a repository that should be private is not.

    Raises:
        HubError: The hub cannot be reached or refuses; ``retry`` tells whether it can work later.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HfHubHTTPError

    from algorist import __version__

    if is_offline():
        raise HubError("HF_HUB_OFFLINE is set; unset it to upload", retry=False)
    api = HfApi(library_name="algorist", library_version=__version__)
    try:
        repo = api.create_repo(section.model_id or name, private=section.private, exist_ok=True)
        if section.private and api.model_info(repo.repo_id).private is False:
            say(f"warning: {repo.repo_id} was made before and is public; hub.private changes new ones only")
        if section.revision:
            api.create_branch(repo.repo_id, branch=section.revision, exist_ok=True)
        api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            path_in_repo=path_in_repo,
            revision=section.revision,
            commit_message=message,
        )
        return str(repo)
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise HubError(
            _refused(status, first_line(error)), retry=status not in (400, 401, 403, 404)
        ) from error
    except Exception as error:  # no network: whatever the client's transport raises
        raise HubError(f"the hub cannot be reached ({first_line(error)})", retry=True) from error


def _refused(status: int, line: str) -> str:
    if status in (401, 403):
        return f"the hub refused ({status}: {line}); the token needs write rights there: hf auth login"
    return f"the hub answered {status} ({line})"


class HubUpload:
    """The uploads of one run. Nothing that goes wrong there reaches the training; what failed is tried again at the end.

    Checkpoints are uploaded in a thread, one at a time, from hard links: rotation may delete them meanwhile.
    """

    def __init__(self, recipe: Any, run: Path, say: Callable[[str], None]) -> None:
        self.section, self.run, self._say = recipe.hub, run, say
        self.active = recipe.hub.push and not is_offline()
        if self.active:
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()  # they would write over the live line
            for left in run.glob(".upload-*"):
                shutil.rmtree(left, ignore_errors=True)
        self._recipe = recipe
        self._thread: threading.Thread | None = None
        self._failed_once = False
        self._done: set[str] = set()

    @property
    def name(self) -> str:
        """The repository, with its owner when the recipe names one."""
        return self.section.model_id or self.run.name

    def checkpoint(self, folder: Path) -> None:
        """Begin to upload a checkpoint that was just written, where the strategy wants checkpoints."""
        if self.active and self.section.strategy != "end" and folder.is_dir():
            self.start(folder)

    def start(self, checkpoint: Path) -> None:
        """Begin to upload a checkpoint, unless the one before is still on its way."""
        if self._thread is not None and self._thread.is_alive():
            return
        staging = Path(tempfile.mkdtemp(prefix=".upload-", dir=self.run))
        try:
            gather(checkpoint, staging, run=self.run, name=self.section.model_id, links=True)
            self._add_whole(checkpoint, staging)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            self._tell(f"{checkpoint.name} cannot be prepared: {error}")
            return
        self._thread = threading.Thread(target=self._send, args=(checkpoint, staging), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the upload that is on its way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self, stage: str) -> str | None:
        """Upload the last stage's model with its evaluations and return the address; None when that was not possible.

        Tried three times. Then one line names the command that does it later.
        """
        if not self.section.push:
            return None
        later = f"upload it later: algorist export {self.run} --push-to-hub {self.name}"
        if not self.active:
            self._say(f"HF_HUB_OFFLINE is set: the model was not uploaded; {later}")
            return None
        self.wait()
        message = self.section.commit_message or commit_message(self._recipe, stage, self.run.name)
        for wait in RETRY_AFTER_S:
            time.sleep(wait)
            try:
                with tempfile.TemporaryDirectory(prefix=".upload-", dir=self.run) as staging:
                    gather(
                        self.run / stage / "final",
                        Path(staging),
                        run=self.run,
                        name=self.section.model_id,
                        links=True,
                    )
                    self._add_checkpoints(Path(staging))
                    url = upload(Path(staging), self.section, name=self.name, message=message, say=self._say)
                self._say(f"uploaded to {url}")
                if warning := base_warning(self.run / stage / "final"):
                    self._say(warning)
                return url
            except (HubError, OSError, AlgoristError) as error:
                problem = first_line(error)
                log.warning("upload: %s", problem)
                if not getattr(error, "retry", False):
                    break
        self._say(f"the model was not uploaded: {problem}; {later}")
        return None

    def _send(self, checkpoint: Path, staging: Path) -> None:
        try:
            message = f"{checkpoint.parent.name} {checkpoint.name}"
            upload(staging, self.section, name=self.name, message=message, say=self._say)
            self._done.add(self._key(checkpoint))
        except AlgoristError as error:
            self._tell(first_line(error))
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _tell(self, problem: str) -> None:
        log.warning("upload: %s", problem)
        if not self._failed_once:
            self._failed_once = True
            self._say(f"hub: {problem}; training continues, the upload is tried again at the end")

    def _add_checkpoints(self, staging: Path) -> None:
        """Add checkpoints that did not get through during training."""
        newest = [c for stage in STAGES for c in reversed(checkpoints(self.run / stage))]
        if self.section.strategy == "checkpoint":
            newest = newest[-1:]
        for checkpoint in newest:
            if self._key(checkpoint) not in self._done:
                self._add_whole(checkpoint, staging)

    def _add_whole(self, checkpoint: Path, staging: Path) -> None:
        """Add a whole checkpoint, where the repository keeps them."""
        folders = {"checkpoint": "last-checkpoint", "all_checkpoints": self._key(checkpoint)}
        if folder := folders.get(self.section.strategy):
            link = partial(put_file, links=True)
            shutil.copytree(checkpoint, staging / folder, copy_function=link, dirs_exist_ok=True)

    @staticmethod
    def _key(checkpoint: Path) -> str:
        return f"{checkpoint.parent.name}/{checkpoint.name}"


def commit_message(recipe: Recipe | None, stage: str, run: str) -> str:
    """Return a message that names the base model."""
    base = "a tiny model from scratch" if recipe and recipe.model.name == "tiny" else None
    base = base or (without_home(recipe.model.name) if recipe else "a model")
    return f"{stage.upper()} of {base} with algorist (run {run})"
