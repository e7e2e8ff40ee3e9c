"""The run on the server, for each role: what a user of deploy/users.acl may do.

Above, only `client.run_state` puts commands together.

`viewer` has all that can be read; `worker`, `scorer` (over `producer`: pushes), `leader`, `trainer` and `operator` what
each changes (over `member`: what every process may do). A change is one of the Lua files in `scripts`; `server` has the
connection and the embedded server; `verify` is what it says. Open first: `session`, then `viewer`.
"""
