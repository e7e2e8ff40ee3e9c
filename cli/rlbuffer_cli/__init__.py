"""The command line of rlbuffer. Nothing here is imported by the library.

`commands` has one module per command. What they show is made in `tables`, `run_tables`, `facts` and `view`, with the
look of `look`, and put together in `sheets`; `printed`, `browse` and `web` show it. Open first: `main`, then `sheets`.
"""
