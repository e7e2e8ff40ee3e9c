"""Policy versions of other hosts in a local folder: downloaded once per host, whole or not there, old ones removed.

    <cache>/v00000012-9f86d081884c/    a complete version, as the trainer has it
            base-1f2e3d4c5b6a/         the model that adapters are for; it stays
            .tmp-v00000013-.../        one that is being downloaded
            .lock                      held by the process that downloads or removes; the others wait and find it done

A version is looked for at ``weights.url`` of this host's settings first, which may be a mirror near it, and then at the
place that the trainer announced.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlbuffer.config.addresses import is_url
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError, WeightsError, installed_by
from rlbuffer.process.file_locks import try_lock
from rlbuffer.process.files import flush, rename_for_good, sha256_of
from rlbuffer.process.stages import Stages
from rlbuffer.process.variables import secret
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.layout import (
    DELTA_FILE,
    LIST_FILE,
    SERVED_NAME,
    TEMPORARY,
    VERSION,
    ListedFile,
    base_of,
    check,
    is_adapter,
    remove,
    weights_among,
    write_list,
)

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

TOKEN_VARIABLE = "RLBUFFER_WEIGHTS_TOKEN"
"""Environment variable with the bearer token that servers of weights ask for; not set: none."""
CACHE_POLL_SECONDS = 0.1


def weights_token() -> str:
    """The token that whoever serves versions asks for; "" for none. Raises ConfigError: it cannot be one."""
    return secret(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE)


class VersionCache:
    """Versions of other hosts. Safe to use from several threads and processes.

    Args:
        directory: local to this host; made when it is needed.
        mirror: URL that is asked before the place that the trainer announced; "": none.
        keep: versions kept, the most recently used ones.
        token: bearer token for all places.
        beside: the folder into which a trainer on this very host publishes; a version there is not downloaded.
        stop: ends downloads early.
    """

    def __init__(
        self,
        directory: Path,
        *,
        mirror: str = "",
        keep: int = 4,
        token: str = "",
        beside: Path | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.directory = directory
        self._mirror = mirror
        self._keep = keep
        self._token = token
        self._beside = beside
        self._stop = stop or threading.Event()

    @classmethod
    def of(cls, settings: RunSettings, *, stop: threading.Event | None = None) -> VersionCache:
        """The cache that a run's ``[weights]`` describes."""
        return cls(
            settings.run_dir / "weights-cache",
            mirror=settings.weights.url,
            token=weights_token(),
            beside=settings.output_dir / "weights",
            stop=stop,
        )

    def localized(self, policy: PolicyVersion, took: Stages | None = None) -> PolicyVersion:
        """The same version with a location on this host's disk; downloads it unless it is there.

        The model that an adapter is for comes with it, and lies beside it. A location that is no URL is left as it is.
        The content of an earlier download is not read again here: :func:`rlbuffer.weights.files.open_weights` does
        that. `took` is told the seconds of ``fetch`` and ``apply``, and the bytes that came: ``whole`` weights,
        ``delta`` and ``other``.

        Raises:
            WeightsError: no place has it, or has it right; with every place and its reason.
        """
        if not is_url(policy.location):
            return policy
        origin, _, name = policy.location.rstrip("/").rpartition("/")
        match = SERVED_NAME.match(name)
        if match is None or match[1] != policy.checksum[:12]:
            raise WeightsError(
                f"version {policy.version} was announced at {policy.location}, which does not end in the name of its "
                f"directory (v{policy.version:08d}-{policy.checksum[:12]})"
            )
        if self._beside is not None and (self._beside / name / LIST_FILE).is_file():
            return replace(policy, location=str((self._beside / name).absolute()))
        directory = self.directory / name
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._lock():
                if not directory.is_dir():
                    self._prune(name)  # before: what a killed download has left may be the room that this one needs
                    places = [*[self._mirror] * bool(self._mirror), origin]
                    self._download(directory, places, policy, took or Stages())
                now = time.time_ns()  # the kernel's own time of a file moves in ticks of milliseconds
                os.utime(directory, ns=(now, now))  # most recently used
        except OSError as error:
            raise WeightsError(
                f"{name} cannot be stored in {self.directory} ({error.strerror}): free space there, or choose another "
                "home"
            ) from error
        if is_adapter(directory):
            self.localized(base_of(directory), took)
        return replace(policy, location=str(directory.absolute()))

    def recheck(self, policy: PolicyVersion) -> None:
        """Drops the copy of `policy` when it is damaged, so that it is downloaded again. For after a failed load."""
        directory = self.directory / policy.location.rstrip("/").rpartition("/")[2]
        if not is_url(policy.location) or not directory.is_dir():
            return
        try:
            check(directory, policy)
        except WeightsError:
            with self._lock():
                remove(directory)
            return
        if is_adapter(directory):
            self.recheck(base_of(directory))

    # -- under the lock ------------------------------------------------------------------------------------------------
    @contextmanager
    def _lock(self) -> Iterator[None]:
        descriptor = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while not try_lock(descriptor, fcntl.LOCK_EX):
                if self._stop.wait(CACHE_POLL_SECONDS):
                    raise WeightsError("stopped while another process of this host was downloading")
            yield
        finally:
            os.close(descriptor)

    def _download(self, directory: Path, places: list[str], policy: PolicyVersion, took: Stages) -> None:
        try:
            from rlbuffer.weights.download import fetch_file, fetch_list, make_client
        except ImportError as error:
            raise ConfigError(
                f"weights cannot be downloaded ({error}): {installed_by('weights')}", setting="weights"
            ) from error
        name = directory.name
        folder = self.directory / f"{TEMPORARY}{name}"
        reasons = []
        with make_client(self._token) as client:
            for place in places:
                if self._stop.is_set():
                    reasons.append("  stopped while downloading")
                    break
                shutil.rmtree(folder, ignore_errors=True)  # whoever began it is gone: its lock is ours
                folder.mkdir()
                place = place.rstrip("/")
                try:
                    with took.measure("fetch"):
                        files = fetch_list(client, f"{place}/{name}", name=name)
                    self._check(files, policy)
                    if not self._rebuilt(client, place, files, folder, name, took):
                        files = tuple(file for file in files if file.name != DELTA_FILE)
                    for file in files:
                        if not (folder / file.name).exists() and not self._linked(file, folder):
                            with took.measure("fetch"):
                                fetch_file(client, f"{place}/{name}", file, folder, stopped=self._stop.is_set)
                            took.count("other" if weights_among([file]) is None else "whole", file.size)
                except WeightsError as error:
                    reasons.append(f"  {place}: {error}")
                    continue
                write_list(folder, files)
                flush(folder)
                rename_for_good(folder, directory)
                return
        raise WeightsError(
            f"{name} could not be downloaded:\n"
            + "\n".join(reasons)
            + "\n  Is a server of weights running there (weights.listen at the trainer, or `rlbuffer weights serve`), "
            "and can this host reach it?"
        )

    def _rebuilt(
        self, client: httpx.Client, place: str, files: tuple[ListedFile, ...], folder: Path, name: str, took: Stages
    ) -> bool:
        """The weights were made of a version that is here and of deltas; False: they are to be downloaded whole."""
        try:
            from rlbuffer.weights.rebuilding import rebuild
        except ImportError:  # zstandard; `rlbuffer doctor` says so
            return False
        try:
            stopped = self._stop.is_set
            return rebuild(client, place, files, folder, name=name, cache=self.directory, stopped=stopped, took=took)
        except WeightsError as error:
            _log.warning("%s is downloaded whole: %s", name, error)
            return False

    def _linked(self, file: ListedFile, folder: Path) -> bool:
        """The file of another version here is the same one, and now this one's, too: tokenizers never change."""
        if weights_among([file]) is not None:
            return False
        for other in self.directory.iterdir():
            path = other / file.name
            with suppress(OSError):  # not there, or no links on this filesystem
                if path.stat().st_size == file.size and sha256_of(path) == file.sha256:
                    (folder / file.name).parent.mkdir(exist_ok=True)
                    os.link(path, folder / file.name)
                    return True
        return False

    def _check(self, files: tuple[ListedFile, ...], policy: PolicyVersion) -> None:
        listed = weights_among(files)
        if listed is not None and (listed.size, listed.sha256) != (policy.size, policy.checksum):
            raise WeightsError(
                f"it has other weights under this name: {listed.size} bytes, sha256 {listed.sha256}; "
                f"announced were {policy.size} bytes, {policy.checksum}"
            )
        size, free = sum(file.size for file in files), shutil.disk_usage(self.directory).free
        if size > free:
            raise WeightsError(f"{self.directory} has {free} bytes free, {size} are needed: choose another home")

    def _prune(self, current: str) -> None:
        """Most recently used, not newest: after a rewind the versions in use have smaller numbers than old ones."""
        others = [path for path in self.directory.iterdir() if VERSION.match(path.name) and path.name != current]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in others[self._keep - 1 :]:
            remove(path)
        for path in self.directory.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)
