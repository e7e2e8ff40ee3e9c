"""The front door: ``connect()`` gives a Buffer, and a Buffer gives writers, readers, the policy and views of a run.

Example::

    with rlbuffer.connect("redis://host:6379", run="math") as buffer:
        writer = buffer.writer("worker-0")
        for ticket in writer.take("gsm8k", 4):
            writer.push(ticket, sample(ticket))
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rlbuffer.client.arguments import duration, file_path, function, names, text, whole_number
from rlbuffer.client.details import GroupDetail, find_group
from rlbuffer.client.group_view import GroupView
from rlbuffer.client.reader import Reader, check_feeds
from rlbuffer.client.refusals import PATIENCE_SECONDS, Away
from rlbuffer.client.searching import list_groups
from rlbuffer.client.step_view import StepView, view_step
from rlbuffer.client.stream import Stream
from rlbuffer.client.texts import Texts, tokenizer_directory
from rlbuffer.client.writer import Terms, Writer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import BatchTimeout, ConfigError, InvalidArgument, RlbufferError
from rlbuffer.process.variables import bare, secret, variable
from rlbuffer.records.checks import shown
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.records import Ledger, Report
from rlbuffer.store.session import open_store
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.store.verify.verify import verify
from rlbuffer.store.viewer import Viewer
from rlbuffer.store.worker import WorkerStore

URL_VARIABLE = "RLBUFFER_REDIS_URL"
HOME_VARIABLE = "RLBUFFER_HOME"
RUN_VARIABLE = "RLBUFFER_RUN"
CONFIG_VARIABLE = "RLBUFFER_CONFIG"
PASSWORD_VARIABLE = "RLBUFFER_REDIS_PASSWORD"
PASSWORD_FILE_VARIABLE = "RLBUFFER_REDIS_PASSWORD_FILE"


class _Unnamed(str):
    """The name of the run where the caller has given none: it is told from the same name that was typed."""

    __slots__ = ()


_DEFAULT = _Unnamed("default")


class Policy:
    """The policy versions of a run: which is current, and saying that a new one can be sampled from.

    While the server is away its calls wait, up to 300 s, and raise ServerUnreachable then.
    """

    def __init__(self, store: Viewer, readers: Sequence[Reader], settings: RunSettings) -> None:
        self._store = store.patient(PATIENCE_SECONDS, on_retry=Away("the policy"))
        self._readers = readers
        """Those of the buffer, as they are at the time."""
        self._settings = settings

    @property
    def version(self) -> int:
        """Number of the newest announced version, asked of the server; -1 before the first one.

        A worker gets no ticket before the first version, so between two tickets it is the one to sample with.
        """
        return self.current().version

    def current(self, adapter: str = "") -> PolicyVersion:
        """The newest announced version; its ``version`` is -1 when none was announced yet."""
        return self._store.policy(text("policy: adapter", adapter))

    def announce(self, version: int, *, location: str, size: int, checksum: str, adapter: str = "") -> bool:
        """Says that `version` can be sampled from. -> False when an equal or newer one is announced already.

        `location` is where samplers find the weights, `size` their bytes, `checksum` as the publisher computed it; all
        may be empty for samplers that need no weights. A trainer that announces before it reads begins its attempt
        here.

        Raises:
            AttemptFenced: a newer attempt of the trainer has taken over.
            RlbufferError: no trainer has started an attempt (:meth:`Reader.start` does).
        """
        announced = PolicyVersion(version=version, location=location, size=size, checksum=checksum, adapter=adapter)
        reader = self._begun()
        if reader is not None:
            return reader.announce(announced)
        number = self._store.trainer().number
        if not number:
            raise RlbufferError("no trainer has started: call reader.start() on rank 0 before announcing a version")
        return self._store.role(TrainerStore).announce(number, announced)

    def publish(
        self,
        model: object,
        version: int,
        folder: str | Path | None = None,
        *,
        keep: int | None = None,
        tokenizer: str | Path | None = None,
    ) -> bool:
        """Writes the weights of `model` as a policy version, and says that it can be sampled from.

        Tokenizer, chat template, generation config and the like go with them, from the directory that the model was
        loaded from, else that of the settings (``model.path``): engines and transformers open a version as a model.

        Workers sample with nothing else, so a trainer publishes the weights that it begins with before its first step
        (``publish(model, reader.step)``), and those of each step after it. Every rank calls it, also behind
        a stream, which only rank 0 has; rank 0 writes. A version that samplers have already, or a newer one, is not
        written again: so it is after a resume.

        Args:
            model: a Hugging Face model, as it is or wrapped by DDP, FSDP2 or torch.compile. Weights are written in the
                model's dtype.
            version: how many steps its weights have been trained for: ``step.number`` after a step.
            folder: where trainer and workers see it; None: that of the run's settings. ``weights.url`` of the settings
                is announced where it is set, and `folder` is then what is served there.
            keep: versions that stay in `folder`, the newest; None: ``max_age`` + 3 of the settings, at least 4.
            tokenizer: directory with another tokenizer, as its ``save_pretrained`` writes it.

        Returns:
            True on rank 0 when it was written and announced.

        Raises:
            WeightsError: `model` is something else, or the filesystem refused. Or nobody could load its weights, by
                name and reason: they are not those that its config describes, empty (ZeRO-3), or not finite.
            RlbufferError: this buffer has no reader, so nobody knows which rank this is.
            AttemptFenced: a newer attempt of the trainer has taken over.
        """
        from rlbuffer.weights.publishing import publish_model, unwrapped

        version = whole_number("policy.publish: version", version, low=0)
        kept = None if keep is None else whole_number("policy.publish: keep", keep, low=1)
        folders = [
            None if path is None else Path(file_path(f"policy.publish: {name}", path))
            for name, path in (("folder", folder), ("tokenizer", tokenizer))
        ]
        whole = unwrapped(model)
        readers = self._open_readers()
        self._begun()
        return publish_model(
            self,
            self._settings,
            whole,
            version,
            reader_place=(readers[-1].rank, readers[-1].world_size) if readers else None,
            folder=folders[0],
            keep=kept,
            tokenizer=folders[1],
        )

    def _open_readers(self) -> list[Reader]:
        """Those that are not closed, in the order in which they were made."""
        return [reader for reader in self._readers if not reader.is_closed]

    def _begun(self) -> Reader | None:
        """Begins the attempt of this buffer's reader of rank 0, unless one has begun. -> the reader with the newest
        attempt, if any.

        Of several that have not begun, the last one: the others were given up, as after a state that was refused, and
        an attempt of theirs would fence the one at work.
        """
        readers = [reader for reader in self._open_readers() if reader.rank == 0]
        if readers and not any(reader.attempt for reader in readers):
            readers[-1].start()
        return max((reader for reader in readers if reader.attempt), key=lambda r: r.attempt, default=None)

    def wait(self, version: int, *, timeout_seconds: float, adapter: str = "") -> PolicyVersion:
        """Waits until `version` or a newer one is announced.

        Raises:
            BatchTimeout: it was not announced in time.
        """
        version = whole_number("policy.wait: version", version, low=0)
        seconds = duration("policy.wait: timeout_seconds", timeout_seconds)
        deadline = time.monotonic() + seconds
        while (current := self.current(adapter)).version < version:
            if time.monotonic() >= deadline:
                raise BatchTimeout(
                    f"policy version {version} was not announced within {seconds:g} s; "
                    f"the current one is {current.version}"
                )
            time.sleep(0.05)
        return current


class Buffer:
    """One run on one server. A context manager; safe to use from several threads."""

    def __init__(self, store: Viewer, *, settings: RunSettings) -> None:
        self.store = store
        """What everybody may see."""
        self.settings = settings
        self._readers: list[Reader] = []
        self._policy = Policy(store, self._readers, settings)
        self._texts = Texts(tokenizer_directory(settings))

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.store.run

    @property
    def policy(self) -> Policy:
        """The policy versions of the run."""
        return self._policy

    def writer(
        self,
        worker: str,
        *,
        incarnation: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        on_retry: Callable[[RlbufferError], None] | None = None,
        ticket_seconds: float | None = None,
        section: str = "",
    ) -> Writer:
        """A writer for `worker`. `incarnation` names the producer itself where it must survive a restart.

        A worker's name is of letters, digits and ``_.:@/-``, an incarnation of letters, digits, ``_`` and ``-``. A
        process that is forked goes on with the writer under an incarnation of its own; where one was given, it must
        make a writer of its own.

        `patience_seconds` is how long its methods wait for a server that is away. `on_retry` hears what the writer
        waits for, each time before it tries again; what it raises ends the waiting.
        `ticket_seconds` is how long a ticket stays out without `renew` (60 s, at most 900): who renews in the
        background may take less, so that the prompts of a worker that dies are taken up sooner. `section` is the
        ``[worker.NAME]`` that it was started for: a run whose supervisor waits for it does not end before it has taken
        tickets.
        """
        function("writer: on_retry", on_retry)
        patience = duration("writer: patience_seconds", patience_seconds)
        seconds = None if ticket_seconds is None else duration("writer: ticket_seconds", ticket_seconds)
        section = text("writer: section", section)
        store = self.store.role(WorkerStore).patient(patience, on_retry=Away(f"writer {worker}", on_retry))
        meta = store.open_run()
        return Writer(
            store,
            worker,
            epoch=meta.epoch,
            incarnation=incarnation,
            patience_seconds=patience,
            on_retry=on_retry,
            terms=Terms(
                config=self.settings.batcher,
                ticket_seconds=seconds,
                section=section,
                known_end=meta.finished,
            ),
        )

    def reader(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        timeout_seconds: float = PATIENCE_SECONDS,
        pad_token_id: int = 0,
        pad_to_multiple_of: int = 1,
        vocabulary: int | None = None,
        adapters: bool = True,
        columns: Sequence[str] = (),
    ) -> Reader:
        """A reader for one data-parallel rank; rank 0's acknowledges for all.

        `timeout_seconds` is how long it waits for a step, and for a server that is away (at least 30 s).
        `vocabulary` is how many token ids the model has, `adapters` whether LoRA adapters are trained, `columns` the
        further columns that no rollout may lack: one with any other token, of an adapter where none is trained, or
        without such a column is masked and counted as damaged.

        Raises:
            InvalidArgument: an argument is of another kind, or outside its range.
            ConfigError: the run feeds a stream, which has no rows for ranks.
        """
        tokens = None if vocabulary is None else whole_number("reader: vocabulary", vocabulary, low=1)
        timeout_seconds = duration("reader: timeout_seconds", timeout_seconds)
        store = self._trainer_store(timeout_seconds)
        store.open_run()
        check_feeds(self.run, store.meta(), "ranks")
        reader = Reader(
            store,
            rank=whole_number("reader: rank", rank, low=0),
            world_size=whole_number("reader: world_size", world_size, low=1),
            timeout_seconds=timeout_seconds,
            pad_token_id=whole_number("reader: pad_token_id", pad_token_id, low=0),
            pad_to_multiple_of=whole_number("reader: pad_to_multiple_of", pad_to_multiple_of, low=1),
            can=Trainable(vocabulary=tokens, adapters=adapters, columns=names("reader: columns", columns)),
        )
        self._readers.append(reader)
        return reader

    def stream(
        self,
        *,
        timeout_seconds: float = PATIENCE_SECONDS,
        vocabulary: int | None = None,
        adapters: bool = True,
        columns: Sequence[str] = (),
    ) -> Stream:
        """The stream of a run with ``[batcher] feeds = "stream"``: whole groups, for one trainer that packs for itself.

        `timeout_seconds`, `vocabulary`, `adapters` and `columns` are those of :meth:`reader`: a rollout that cannot be
        trained by them is left out of its group and counted as damaged.

        Raises:
            InvalidArgument: an argument is of another kind, or outside its range.
            ConfigError: the run plans rows for ranks.
        """
        timeout_seconds = duration("stream: timeout_seconds", timeout_seconds)
        tokens = None if vocabulary is None else whole_number("stream: vocabulary", vocabulary, low=1)
        columns = names("stream: columns", columns)
        store = self._trainer_store(timeout_seconds)
        store.open_run()
        check_feeds(self.run, store.meta(), "stream")
        stream = Stream(
            store,
            timeout_seconds=timeout_seconds,
            can=Trainable(vocabulary=tokens, adapters=adapters, columns=columns),
        )
        self._readers.append(stream.reader)
        return stream

    def _trainer_store(self, timeout_seconds: float) -> TrainerStore:
        store = self.store.role(TrainerStore)
        # No less than other calls: a server that is killed, or fails over, is back after seconds.
        return store.patient(max(store.patience_seconds, timeout_seconds), on_retry=Away("the trainer"))

    def ledger(self) -> Ledger:
        """The account per env: pushed = pending + packed + trained + dropped."""
        return self.store.ledger()

    def groups(self, where: str = "", limit: int = 100) -> list[GroupView]:
        """Groups of the run that match the filter `where` (see ``rlbuffer inspect --help``): pending ones, then those
        in steps, then dropped ones, the newest of each first."""
        where, limit = text("groups: where", where), whole_number("groups: limit", limit, low=0)
        return [view for view, _ in list_groups(self.store, where=where, limit=limit, text_of=self._texts.decoded)]

    def group(self, group_id: str) -> GroupDetail:
        """One group whole, by its id, a rollout's id, or a unique prefix. Raises NotFound, AmbiguousId."""
        return find_group(self.store, text("group: group_id", group_id))

    def step(self, n: int) -> StepView:
        """A committed step. Raises NotFound, StepRetired, or RunGone when the server has no run of this name."""
        return view_step(self.store, whole_number("step: n", n, low=1))

    def verify(self) -> Report:
        """Recomputes the ledger and every invariant that can be seen from outside."""
        return verify(self.store)

    def close(self) -> None:
        """Closes readers and connections; the last user of an embedded server stops it."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()
        self.store.close()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    url: str | None = None,
    *,
    run: str = _DEFAULT,
    config: RunSettings | BatcherConfig | Mapping[str, Any] | str | Path | None = None,
    name: str = "",
    origin: str = "",
) -> Buffer:
    """Connects to a run.

    `url` is ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB`` (or
    ``rediss+sentinel://``) for the primary that sentinels name, ``redis+cluster://HOST:PORT,HOST:PORT`` (or
    ``rediss+cluster://``) for a cluster of several shards, or ``memory://`` for a server inside this process (with the
    real scripts; needs the extra ``memory``). None: the environment's ``RLBUFFER_REDIS_URL``, then the config's
    `redis_url`, then an embedded server under the config's `home`, started when it is not running. `config` is the
    path of an ``rlbuffer.toml``, its content as a mapping, or a settings object; its `run` counts unless `run` is
    given. None: the file that ``RLBUFFER_CONFIG`` names, else no file. Commands take ``./rlbuffer.toml`` by themselves;
    a program of one's own is handed it, ``config="rlbuffer.toml"``. Without a file ``RLBUFFER_RUN`` and
    ``RLBUFFER_HOME`` count.

    An address without a password gets that of ``RLBUFFER_REDIS_PASSWORD``, else that of the file which the setting
    `redis_password_file` (or ``RLBUFFER_REDIS_PASSWORD_FILE``) names. The file is read again at every new connection.

    Raises:
        ConfigError: a setting, or the name of the run, is not valid.
        ServerUnreachable: nothing answers there.
        ServerUnsuitable: it is too old, or set to evict keys.

    Example:
        >>> import rlbuffer
        >>> with connect("memory://", run="example") as buffer:
        ...     pushed = buffer.writer("worker-0").push(rlbuffer.testing.make_group(env="math", rewards=[0.0, 1.0]))
        ...     buffer.groups("env=math")[0].group_id, buffer.ledger().envs["math"].pushed
        ('math.0', (2, 51))
    """
    url = url if url is None else text("connect: url", url)
    name, origin = text("connect: name", name), text("connect: origin", origin)
    settings = _settings(config)
    if isinstance(run, _Unnamed):
        run = settings.run
    if url is None:
        url = variable(URL_VARIABLE) or settings.redis_url
        origin = origin or (URL_VARIABLE if variable(URL_VARIABLE) else "")
    url = url and bare(url)
    settings = settings.model_copy(update={"run": run, "redis_url": url})
    store = open_store(
        Viewer,
        url,
        run=run,
        home=Path() if url else settings.home_dir,
        server=settings.server,
        name=name,
        origin=origin,
        password=partial(password_of, settings) if url else None,
    )
    return Buffer(store, settings=settings)


def password_of(settings: RunSettings) -> str:
    """The password that the address may lack: of the environment, else of the file in the settings; "" for neither."""
    given = secret(os.environ.get(PASSWORD_VARIABLE, ""), PASSWORD_VARIABLE)
    if given or settings.redis_password_file is None:
        return given
    file = settings.redis_password_file.expanduser()
    try:
        password = secret(file.read_text(encoding="utf-8"), f"the password file {file}", "redis_password_file")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        text = f"redis_password_file: cannot read the password file {file}: {reason}"
        raise ConfigError(text, setting="redis_password_file") from None
    if not password:
        raise ConfigError(f"the password file {file} is empty", setting="redis_password_file")
    return password


def _settings(config: RunSettings | BatcherConfig | Mapping[str, Any] | str | Path | None) -> RunSettings:
    if isinstance(config, RunSettings):
        return config
    from rlbuffer.config.loading import load, validated

    file = variable(CONFIG_VARIABLE) if config is None else config
    if isinstance(file, Path) or (file and isinstance(file, str)):
        return load(Path(file)).settings
    home, run = variable(HOME_VARIABLE), variable(RUN_VARIABLE)
    given: dict[str, Any] = {"home": Path(home)} if home else {}
    if run:
        given["run"] = run
    if password_file := variable(PASSWORD_FILE_VARIABLE):
        given["redis_password_file"] = Path(password_file)
    if isinstance(config, BatcherConfig):
        return RunSettings(**given, batcher=config)
    if config is not None and not isinstance(config, Mapping):
        raise InvalidArgument(
            f"connect: config: expected a path, a mapping of settings or a BatcherConfig, got {shown(config)}"
        )
    return validated(given | dict(config or {}))
