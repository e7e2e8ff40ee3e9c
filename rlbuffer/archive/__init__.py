"""The archive: what a run trained and dropped, as Parquet files that stay when the server has let it go.

`schema` says what a file holds, `rows` makes rows of payloads and payloads of rows, `writer` adds files that are there
whole or not at all, `library` reads them, `check` proves that nothing is missing. Needs pyarrow
(the extra ``archive``); nothing else of rlbuffer loads it. Open first: `schema`, then `library`.
"""

from importlib.util import find_spec

from rlbuffer.errors import ConfigError, installed_by

if find_spec("pyarrow") is None:
    raise ConfigError(f"archives and Parquet files need pyarrow: {installed_by('archive')}", setting="archive.dir")

from rlbuffer.archive.library import Archive, ArchivedGroup, ArchivedRollout, ArchivedStep, DroppedGroup

__all__ = ["Archive", "ArchivedGroup", "ArchivedRollout", "ArchivedStep", "DroppedGroup"]
