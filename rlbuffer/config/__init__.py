"""Settings: rlbuffer.toml and the environment as checked dataclasses, and every refusal with its line.

A check that needs the settings alone may enter. One that needs an env, a server or a host belongs to `run`.
Open first: `loading`, then `settings`.
"""

from rlbuffer.config.batcher import AdapterConfig, BatcherConfig, EnvConfig
from rlbuffer.config.settings import RunSettings

__all__ = ["AdapterConfig", "BatcherConfig", "EnvConfig", "RunSettings"]
