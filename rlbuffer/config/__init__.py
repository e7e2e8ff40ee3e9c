"""Settings: rlbuffer.toml and the environment as checked dataclasses, and every refusal with its line.

What a single value may be is said here. What several settings, a host or a server must be belongs to `checks`.
Open first: `loading`, then `settings`.
"""

from rlbuffer.config.batcher import AdapterConfig, BatcherConfig, EnvConfig
from rlbuffer.config.settings import RunSettings

__all__ = ["AdapterConfig", "BatcherConfig", "EnvConfig", "RunSettings"]
