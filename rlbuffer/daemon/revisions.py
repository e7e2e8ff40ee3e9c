"""The settings that this process leads with: its own at the start, from then on those of the run.

A run's settings have revisions. The first leader brings the first; every later one comes from an operator (`rlbuffer
config apply`), who leaves it in `meta`, and counts when a leader has taken it at a step boundary::

    own config --start--> the run's config <--taken by the leader-- wanted config <-- operators
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.daemon.config_changes import changes, check_change, config_digest
from rlbuffer.errors import ConfigError
from rlbuffer.process.logs import fields
from rlbuffer.records.states import SettingsState
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.records import Meta

_log = logging.getLogger(__name__)


class Revisions:
    """The config of one process that serves a run.

    Args:
        store: the run.
        config: what the process was started with.
        replace: `config` takes the place of what the run has.
        follows: go on with what the run has; `config` is only for a run that has none.
    """

    def __init__(
        self, store: LeaderStore, config: BatcherConfig, *, replace: bool = False, follows: bool = False
    ) -> None:
        self._store = store
        self._replace = replace
        self.config = config
        """What the next leadership leads with."""
        self._digest = config_digest(config)
        self._is_settled = follows
        """The own config has come into the run, or was the run's: from now on the run decides."""
        self._seen: str | None = None
        """Digest of what the run had at the start."""
        self.asked = 0
        """What operators had asked for when `at_takeover` began to read."""

    def check(self) -> None:
        """Once, before anything else: a process that was started with other settings must not stand by either.

        Raises:
            ConfigError: the run has other settings, and they shall not be replaced.
        """
        if self._seen is not None or self._is_settled:
            return
        meta = self._store.meta()
        seen = meta.wanted_digest or meta.config_digest
        if seen not in ("", self._digest) and not self._replace:
            raise ConfigError(self._other(meta))
        self._seen = seen

    def at_takeover(self) -> BatcherConfig:
        """Takes the wanted config, or the run's, at every takeover. -> the config to lead with.

        Raises:
            ConfigError: at the first takeover, the run has other settings.
            LeaseLost: another leads.
        """
        meta = self._store.meta()
        self.asked = meta.asked
        has = meta.wanted_digest or meta.config_digest
        if not self._is_settled:
            if has in ("", self._digest) or (self._replace and self._seen in ("", has)):
                if has != self._digest:
                    check_change(meta.config, self.config.as_dict(), step=meta.step)
                if meta.config_digest != self._digest:
                    Batcher(self.config)  # imports what the settings name of the user's own
                self._take(meta, self.config.as_dict(), self._digest, answers=meta.wanted_digest)
            elif self._is_foreign(meta) and not self._replace:
                raise ConfigError(self._other(meta))
            self._is_settled = True
            meta = self._store.meta()
        if meta.wanted_digest:
            self._adopt(meta)
            meta = self._store.meta()
        if not meta.config_digest:
            self._take(meta, self.config.as_dict(), self._digest)
        elif meta.config_digest != self._digest:
            self.config, self._digest = BatcherConfig(**meta.config), meta.config_digest
        return self.config

    def _is_foreign(self, meta: Meta) -> bool:
        """The run had other settings than this process's from the start, and not only by what operators did since."""
        if self._seen:
            return self._seen != self._digest
        # It stood by before the first leader had brought its settings: only the first revision can be compared.
        return meta.revision <= 1 and meta.config_digest not in ("", self._digest)

    def _adopt(self, meta: Meta) -> None:
        try:
            config = BatcherConfig(**meta.wanted)
            Batcher(config)
            check_change(meta.config, meta.wanted, step=meta.step)
        except (ConfigError, TypeError) as error:
            self._store.refuse_config(meta.wanted_digest, str(error))
            _refused(str(error))
            return
        self._take(meta, meta.wanted, meta.wanted_digest, answers=meta.wanted_digest)

    def _take(self, meta: Meta, config: Mapping[str, Any], digest: str, *, answers: str = "") -> None:
        if digest == meta.config_digest and not answers:
            return
        revision = self._store.set_config(config, digest, settles=answers)
        if meta.config and digest != meta.config_digest:
            edits = tuple(str(change) for change in changes(meta.config, config))
            text = f"settings: revision {revision} from step {meta.step + 1} on: {'; '.join(edits)}"
            revised = {"revision": revision, "step": meta.step + 1, "changes": edits}
            _log.info("%s", text, extra=fields("config", state=SettingsState.TAKEN, **revised))

    def _other(self, meta: Meta) -> str:
        theirs = meta.wanted or meta.config
        edits = "; ".join(str(change) for change in changes(theirs, self.config.as_dict()))
        return (
            f"run {self._store.run!r} has other settings ({edits}). Start with those, use another run name, or change "
            f"the run's: `rlbuffer config apply FILE`, or `rlbuffer serve --replace-config` to go on with "
            f"the new ones."
        )


def _refused(reason: str) -> None:
    extra = fields("config", state=SettingsState.REFUSED, reason=reason)
    _log.warning("settings: the old ones go on: %s", reason, extra=extra)


def has_refused(meta: Meta, digest: str) -> str:
    """The reason why the leader refused the wanted config of this digest; "" when it did not."""
    refused, _, reason = meta.refused.partition(" ")
    return reason if refused == digest else ""
