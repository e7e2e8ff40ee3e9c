"""The password of a connection: read again whenever one is made, because whoever runs the server may rotate it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from redis.credentials import CredentialProvider

from rlbuffer.errors import ConfigError


class Login(CredentialProvider):
    """What redis-py asks at every new connection. A password that cannot be read is the last one that could.

    Raises:
        ConfigError: `read` cannot read it the first time.
    """

    def __init__(self, read: Callable[[], str], user: str = "") -> None:
        self._read, self._user = read, user
        self.password = read()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The user, where there is one, and the password."""
        with suppress(ConfigError):  # its file is being replaced, or is gone: the server may still take the last one
            self.password = self._read()
        return (self._user, self.password) if self._user else (self.password,)
