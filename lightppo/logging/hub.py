"""Models on the Hugging Face hub: ``lightppo push``, and ``--push_to_hub`` at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightppo.callbacks import Callback
from lightppo.config.cli import CommandParser
from lightppo.errors import ReportError, UserError
from lightppo.files import files_in_use, local_folder
from lightppo.logging.report_page import before_and_after, options_of, read_metrics
from lightppo.version import __version__

CARD = "README.md"
T = TypeVar("T")


class HubError(UserError, RuntimeError):
    """The hub cannot be reached, or refuses."""


def open_repository(repo_id: str, private: bool = True) -> None:
    """Make the model repository ``owner/name``, unless it is there; :class:`HubError` if this user may not."""
    from huggingface_hub import HfApi

    _asked(repo_id, lambda: HfApi().create_repo(repo_id, private=private, exist_ok=True))


def push_model(folder: Path, repo_id: str, message: str = "Upload a model") -> str:
    """Upload the model of a folder in one commit, and none of its logs, samples and options.

    Returns:
        the commit's address.

    Raises:
        ReportError: no whole model of lightppo is in the folder.
        HubError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    files = files_in_use()
    names = [*files.manifest(folder)["files"]]
    if "config.json" not in names:
        raise ReportError(f"{folder} has no model of lightppo: give a --save_path, or an export")
    if damaged := files.damage(folder):
        raise ReportError(f"{folder} is damaged: {damaged[0]}")
    contents: dict[str, Any] = {name: folder / name for name in names}
    contents[CARD] = model_card(folder, repo_id).encode()
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    commit = _asked(
        repo_id, lambda: HfApi().create_commit(repo_id, operations, commit_message=message)
    )
    return commit.commit_url


def model_card(folder: Path, repo_id: str) -> str:
    """Return the model's README for the hub: under this name, with its base and what the run measured."""
    from huggingface_hub import ModelCard

    text = (folder / CARD).read_text()
    card = ModelCard(text.replace(f'"{folder.name}"', f'"{repo_id}"'))
    card.text = card.text.replace(f"# {folder.name}\n", f"# {repo_id.partition('/')[2]}\n", 1)
    base = options_of(folder).get("pretrain")
    if base and not Path(base).exists() and len(base.split("/")) == 2:
        card.data.base_model = base
    return str(card) + _training(folder)


def _training(folder: Path) -> str:
    """Return the part of the card about the run; nothing where its numbers are not in the folder."""
    if not (folder / "metrics.jsonl").is_file():
        return ""
    table = before_and_after(read_metrics(folder / "metrics.jsonl"))
    method = options_of(folder).get("advantage_estimator")
    trained = f" with advantages of `{method}`" if method else ""
    return f"\n## Training\n\nBy lightppo {__version__}{trained}.\n\n```text\n{table}\n```\n"


def _asked(repo_id: str, request: Callable[[], T]) -> T:
    """Return what the hub answers."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        return request()
    except LocalTokenNotFoundError as error:
        raise HubError(
            f"{repo_id}: no token of the hub: set HF_TOKEN, or run `hf auth login`"
        ) from error
    except (HTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        if isinstance(error, HfHubHTTPError):
            reason += ". The token must be allowed to write"
        raise HubError(f"{repo_id}: {reason}") from error


class PushToHub(Callback):
    """Uploads the model at the end; the repository is made at the start, so that what fails, fails then."""

    def on_start(self, run: Any) -> None:
        options = run.config.checkpoint
        run.strategy.on_rank_0(
            lambda: open_repository(options.push_to_hub, options.hub_private), "--push_to_hub"
        )

    def on_end(self, run: Any, error: BaseException | None) -> None:
        """Act on rank 0 alone, as others need not wait."""
        if error is not None or not run.strategy.is_rank_0():
            return
        save_path, repo_id = run.config.checkpoint.save_path, run.config.checkpoint.push_to_hub
        try:
            address = push_model(local_folder(save_path), repo_id)
        except HubError as problem:
            raise HubError(
                f"--push_to_hub {problem}. The model is in {save_path}: lightppo push {save_path} {repo_id}"
            ) from problem
        run.strategy.print(f"pushed: {address}")


def main(argv: Sequence[str], prog: str) -> None:
    """Upload the model of a run."""
    parser = CommandParser(
        prog=prog,
        description="Upload the model of a run to the Hugging Face hub, with a card that says how it was trained. "
        "Logs, samples and options stay here. Set HF_TOKEN, or run `hf auth login` first; HF_ENDPOINT names another hub.",
    )
    parser.add_argument("run", type=Path, help="a run's --save_path, or an export of a checkpoint")
    parser.add_argument(
        "repo_id", help="owner/name of the model repository; it is made if it is not there"
    )
    parser.add_argument("--public", action="store_true", help="a new repository is for everybody")
    parser.add_argument("--message", default="Upload a model", help="of the commit")
    options = parser.parse_args(argv)
    try:
        open_repository(options.repo_id, private=not options.public)
        print(push_model(options.run, options.repo_id, options.message))
    except (ReportError, HubError) as error:
        parser.error(str(error))
