"""Weights that a library publishes: fetched once, before any rank starts, into the cache that the library itself uses,
and checked by hash. The ranks read what is there and fetch nothing."""

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import torch
from torch import nn

from configs.errors import ConfigError, EnvironmentProblem, first_line
from configs.known_models import is_published, timm_name, torchvision_name
from configs.sections import ModelConfig
from trainer.aside import aside, locked
from trainer.disk import sha256, sync

_HASH = re.compile(r"-([0-9a-f]{8,64})\.")
"""In the name of a file: the first digits of its SHA-256, as torch.hub has them."""
_PATIENCE_S = 60.0
"""How long a server may say nothing."""


@dataclass(frozen=True)
class Published:
    """One set of weights; of `url` and `hub` (repository, names of files) one says where they are."""

    name: str
    """The network's name in its library."""
    label: str
    mean: tuple[float, ...]
    """Per channel, of pixels in [0, 1], as `std`: what the weights were trained on."""
    std: tuple[float, ...]
    view: tuple[int, int, str]
    """Of the images that their accuracy was measured on, as evaluation_view() has it."""
    build: Callable[[Path], nn.Module]
    """The network as it was published, with its own classes and channels, from the file."""
    url: str | None
    hub: tuple[str, tuple[str, ...]] | None = None

    @property
    def source(self) -> str:
        return str(self.url) if self.hub is None else f"the repository {self.hub[0]} of the Hugging Face hub"

    def locate(self) -> Path | None:
        """Where the file lies in the cache; None if it is not there."""
        if self.hub is not None:
            return _in_hub_cache(*self.hub)
        path = self._place()
        return path if path.is_file() else None

    def _place(self) -> Path:
        return Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(str(self.url)).path).name

    def fetch(self) -> None:
        """Have the file in the cache, whole. Safe with any number of callers. Raises EnvironmentProblem."""
        if self.hub is not None:
            self._fetch_from_hub(*self.hub)
            return
        path = self._place()
        if path.is_file() and fault_of(path) is None:  # before the lock: the cache may be one to read only
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / ".lockstep.lock"):
            fault = fault_of(path) if path.is_file() else ""
            if fault:
                print(f"{path} {fault}", flush=True)
            if fault is not None:
                self._download(path)

    def _download(self, path: Path) -> None:
        found = _HASH.search(path.name)
        print(f"downloading {self.url} to {path}", flush=True)
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_PATIENCE_S)
        try:
            with aside(path.parent, ".lockstep-") as folder:
                torch.hub.download_url_to_file(
                    str(self.url), str(folder / path.name), found[1] if found else None, progress=False
                )
                sync(folder / path.name)
                (folder / path.name).replace(path)
                sync(path.parent)
        except Exception as error:  # of the network, of the server, of the disk, of the hash
            raise self._not_fetched(path, error) from error
        finally:
            socket.setdefaulttimeout(before)

    def _fetch_from_hub(self, repository: str, names: tuple[str, ...]) -> None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        path = self.locate()
        if path is not None and (fault := fault_of(path)) is not None:
            print(f"{path} {fault}", flush=True)
            path.resolve().unlink()  # the hub's cache then takes it for absent
            path = None
        if path is not None:
            return
        print(f"downloading {self.source}", flush=True)
        for name in names:
            try:
                path = Path(hf_hub_download(repository, name))
                break
            except LocalEntryNotFoundError as error:  # there is no network
                raise self._not_fetched(Path(repository), error) from error
            except EntryNotFoundError:
                continue
            except Exception as error:
                raise self._not_fetched(Path(repository), error) from error
        if path is None:
            raise self._not_fetched(Path(repository), FileNotFoundError(f"it has no {' or '.join(names)}"))
        if (fault := fault_of(path)) is not None:
            raise self._not_fetched(path, ValueError(f"what came {fault}"))

    def _not_fetched(self, path: Path, error: Exception) -> EnvironmentProblem:
        what = first_line(error) or type(error).__name__
        where = f"put the file there ({path})" if self.url else "fetch it on a machine that can"
        return EnvironmentProblem(
            f"model.weights: {self.label} for {self.name} could not be downloaded from {self.source}: {what}; {where}, "
            "or give the path of a file in model.weights"
        )


def find_published(config: ModelConfig) -> Published | None:
    """What `model.weights` names; None where it names nothing that is published. Raises ConfigError."""
    if not is_published(config.weights):
        return None
    if (name := torchvision_name(config.name)) is not None:
        from trainer import from_torchvision

        return from_torchvision.published(name, config.args, config.weights)
    if (name := timm_name(config.name)) is not None:
        from trainer import from_timm

        return from_timm.published(name, config.args, config.weights)
    raise ConfigError(f"model.weights: nobody publishes {config.weights!r} for {config.name}; give a path")


def prepare_weights(config: ModelConfig) -> None:
    """Have the weights that `config` names in the cache, or raise EnvironmentProblem."""
    published = find_published(config)
    if published is not None:
        published.fetch()


def fault_of(path: Path) -> str | None:
    """Why a file of a cache is not what its name says; None if it is, or if the name says nothing."""
    in_name, stored_as = _HASH.search(path.name), path.resolve().name
    expected = in_name[1] if in_name else stored_as if re.fullmatch(r"[0-9a-f]{64}", stored_as) else ""
    found = sha256(path) if expected else ""
    if found.startswith(expected):
        return None
    return f"is damaged: its SHA-256 begins with {found[: len(expected)]}, and its name says {expected}"


def _in_hub_cache(repository: str, names: tuple[str, ...]) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(repository, name) for name in names)
    return next((Path(path) for path in found if isinstance(path, str)), None)
