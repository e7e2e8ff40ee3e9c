"""The run on the server: keys, scripts and one module per concern. Nothing above this room names a Redis command.

`moves` are the changes of a run, each one script; `scripts` the Lua files (a push is `moves/push`, which sends the
payload, then `scripts/push.lua`); `server` the connection and the embedded server; `dump` and `verify` what they say.
Open first: `protocol`, then `keys`.
"""
