"""Policy versions of other hosts in a local folder: downloaded once per host, whole or not there, old ones removed.

    <cache>/v00000012-9f86d081884c/    a complete version, as the trainer has it
            base-1f2e3d4c5b6a/         the model that adapters are for; it stays
            .tmp-v00000013-.../        one that is being downloaded; continued after an interruption
            .lock                      held by the process that downloads or removes; the others wait and find it done

A version is looked for at ``weights.url`` of this host's settings first, which may be a relay, and then at the place
that the trainer announced.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlbuffer.config.addresses import is_url
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.process.environment import through_proxy
from rlbuffer.process.file_locks import try_lock
from rlbuffer.process.files import flush, rename_for_good
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.layout import (
    LIST_FILE,
    SERVED_NAME,
    TEMPORARY,
    VERSION,
    ListedFile,
    base_of,
    check,
    is_adapter,
    parse_list,
    remove,
    weights_among,
    write_list,
)

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE = "RLBUFFER_WEIGHTS_TOKEN"
"""Environment variable with the bearer token that servers of weights ask for; not set: none."""
CACHE_POLL_SECONDS = 0.1


class VersionCache:
    """Versions of other hosts. Safe to use from several threads and processes.

    Args:
        directory: local to this host; made when it is needed.
        relay: URL that is asked before the place that the trainer announced; "": none.
        keep: versions kept, the most recently used ones.
        token: bearer token for all places.
        beside: the folder into which a trainer on this very host publishes; a version there is not downloaded.
        stop: ends downloads early.
    """

    def __init__(
        self,
        directory: Path,
        *,
        relay: str = "",
        keep: int = 4,
        token: str = "",
        beside: Path | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.directory = directory
        self._relay = relay
        self._keep = keep
        self._token = token
        self._beside = beside
        self._stop = stop or threading.Event()

    @classmethod
    def of(cls, settings: RunSettings, *, stop: threading.Event | None = None) -> VersionCache:
        """The cache that a run's ``[weights]`` describes."""
        return cls(
            settings.run_dir / "weights-cache",
            relay=settings.weights.url,
            token=os.environ.get(TOKEN_VARIABLE, ""),
            beside=settings.output_dir / "weights",
            stop=stop,
        )

    def close(self) -> None:
        """Ends downloads under way; what they have stays, and is continued by the next."""
        self._stop.set()

    def localized(self, policy: PolicyVersion) -> PolicyVersion:
        """The same version with a location on this host's disk; downloads it unless it is there.

        The model that an adapter is for comes with it, and lies beside it. A location that is no URL is left as it is.
        The content of an earlier download is not read again here: :func:`rlbuffer.weights.files.open_weights` does
        that.

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
        directory = self.fetch(name, [*[self._relay] * bool(self._relay), origin], policy)
        if is_adapter(directory):
            self.localized(base_of(directory))
        return replace(policy, location=str(directory.absolute()))

    def complete(self, name: str) -> Path | None:
        """The directory of a version that is here, or None."""
        directory = self.directory / name
        return directory if SERVED_NAME.match(name) and directory.is_dir() else None

    def progress(self, name: str) -> int:
        """Bytes of a version that are here already."""
        folder = self.complete(name) or self.directory / f"{TEMPORARY}{name}"
        try:
            return sum(path.stat().st_size for path in folder.iterdir())
        except FileNotFoundError:
            return 0  # not begun, or just finished

    def fetch(self, name: str, places: Sequence[str], weights: PolicyVersion | None = None) -> Path:
        """The directory of version `name`, downloaded from the first of `places` (base URLs) that has it right.

        Args:
            weights: as they were announced; None: what the list says, whose sha256 must fit the name.

        Raises:
            WeightsError: none has; with every place and its reason.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._lock():
                directory = self.complete(name)
                if directory is None:
                    directory = self._download(name, places, weights)
                    self._prune(name)
                now = time.time_ns()  # the kernel's own time of a file moves in ticks of milliseconds
                os.utime(directory, ns=(now, now))  # most recently used
                return directory
        except OSError as error:
            raise WeightsError(
                f"{name} cannot be stored in {self.directory} ({error.strerror}): free space there, or choose another "
                "home"
            ) from error

    def recheck(self, policy: PolicyVersion) -> None:
        """Drops the copy of `policy` when it is damaged, so that it is downloaded again. For after a failed load."""
        if not is_url(policy.location):
            return
        directory = self.complete(policy.location.rstrip("/").rpartition("/")[2])
        if directory is None:
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

    def _download(self, name: str, places: Sequence[str], weights: PolicyVersion | None) -> Path:
        try:
            from rlbuffer.weights.download import make_client
        except ImportError as error:
            raise ConfigError(
                f"weights cannot be downloaded ({error}): pip install 'rlbuffer[weights]'", setting="weights"
            ) from error
        folder = self.directory / f"{TEMPORARY}{name}"
        folder.mkdir(exist_ok=True)
        reasons = []
        with make_client(self._token) as client:
            for place in places:
                try:
                    self._download_from(client, f"{place.rstrip('/')}/{name}", name, weights, folder)
                except WeightsError as error:
                    reasons.append(f"  {place}: {error}{through_proxy(place)}")
                    if self._stop.is_set():
                        break
                    continue
                final = self.directory / name
                rename_for_good(folder, final)
                return final
        raise WeightsError(
            f"{name} could not be downloaded:\n"
            + "\n".join(reasons)
            + "\n  Is a server of weights running there (weights.listen at the trainer, or `rlbuffer weights serve`), "
            "and can this host reach it?"
        )

    def _download_from(
        self, client: httpx.Client, url: str, name: str, weights: PolicyVersion | None, folder: Path
    ) -> None:
        from rlbuffer.weights.download import PART, fetch_file, fetch_list

        files = fetch_list(client, url, name=name, stopped=self._stop.is_set)
        listed = weights_among(files)
        if (
            weights is not None
            and listed is not None
            and (listed.size, listed.sha256)
            != (
                weights.size,
                weights.checksum,
            )
        ):
            raise WeightsError(
                f"it has other weights under this name: {listed.size} bytes, sha256 {listed.sha256}; "
                f"announced were {weights.size} bytes, {weights.checksum}"
            )
        self._need(sum(file.size for file in files) - self.progress(name))
        known = _known(folder, name)
        for file in files:
            if known.get(file.name) != file:  # an earlier attempt knew another file: nothing of it counts
                (folder / file.name).unlink(missing_ok=True)
                (folder / f"{file.name}{PART}").unlink(missing_ok=True)
        write_list(folder, files)
        for file in files:
            fetch_file(client, url, file, folder, stopped=self._stop.is_set)
        names = {file.name for file in files} | {LIST_FILE}
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()
        flush(folder)

    def _need(self, size: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if size > free:
            raise WeightsError(f"{self.directory} has {free} bytes free, {size} are needed: choose another home")

    def _prune(self, current: str) -> None:
        """Most recently used, not newest: after a rewind the versions in use have smaller numbers than old ones."""
        others = [path for path in self.directory.iterdir() if VERSION.match(path.name) and path.name != current]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in others[self._keep - 1 :]:
            remove(path)
        for path in self.directory.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)  # whoever began it is gone: its lock is ours


def _known(folder: Path, name: str) -> dict[str, ListedFile]:
    """The version that an earlier attempt was downloading into `folder`."""
    try:
        return {file.name: file for file in parse_list((folder / LIST_FILE).read_bytes(), name=name)}
    except (OSError, WeightsError):
        return {}
