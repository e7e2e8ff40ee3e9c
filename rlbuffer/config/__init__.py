"""Settings: rlbuffer.toml and the environment as checked dataclasses, and every refusal with its line.

What is true of the settings alone may enter. What needs an env, a server or a host to be known is checked by `run`.
Open first: `loading`, then `settings`.
"""

from rlbuffer.config.batcher import AdapterConfig, BatcherConfig, EnvConfig
from rlbuffer.config.settings import RunSettings

__all__ = ["AdapterConfig", "BatcherConfig", "EnvConfig", "RunSettings"]
