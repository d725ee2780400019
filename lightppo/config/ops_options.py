"""Options of signals; what is wrong with URLs of files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from lightppo.errors import StagingError
from lightppo.files import check_file_url, is_url
from lightppo.option import Section, option
from lightppo.redaction import GIVE_WHOLE, cut_urls


class SignalConfig(Section, adds_to="checkpoint", resume_safe=True):
    """The end of a run by a signal."""

    signal_grace: float = option(
        25.0,
        "Maximum wait for the current step after a signal. SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end the run "
        "after that step and save it; if it takes longer, the run ends unsaved. torchrun, deepspeed, Slurm and "
        "Kubernetes kill 30 s after SIGTERM.",
        "seconds",
        gt=0,
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        yield from _cut_addresses(options)
        yield from _folders(options)


def _folders(options: Any) -> Iterator[str]:
    """URLs of folders that cannot be used, or are not to be shown."""
    folders = {
        name: getattr(options.config.checkpoint, name)
        for name in ("save_path", "ckpt_path", "resume")
    }
    for name, url in folders.items():
        try:
            if url is not None and is_url(url):
                check_file_url(url, f"--{name}")
                if urlsplit(url).password:
                    what = "a password in a URL would be written into logs"
                    yield f"--{name}: {what}: set FSSPEC_{url.split(':')[0].upper()}_PASSWORD"
        except StagingError as error:
            yield str(error)


def _cut_addresses(options: Any) -> Iterator[str]:
    """Addresses out of the files of a run, which lack what may be a secret."""
    flat, models = (
        options.config.flat(),
        {one.name for one in options.config.all_options() if one.owner in ("model", "distill")},
    )
    unread = {"prompt_data", "pretrain_data"} if flat.get("val_only") else set()
    unread |= {"remote_rm_url"} if flat.get("tape_from") else set()  # a tape answers
    unread |= flat.keys() - models if getattr(options, "unfed", False) else set()
    for name, value in flat.items():
        if name not in unread and (cut := cut_urls(value)):
            yield f"--{name} {cut[0]}: {GIVE_WHOLE}: --{name} URL wins over --config"
