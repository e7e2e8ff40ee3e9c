"""The command line of rlbuffer. Nothing here is imported by the library.

`commands` has one module per command. What they show is in `tables`, `run_tables`, `facts` and `view`, with the look of
`look`; `browse` and `web` show the same in a terminal and on pages. Open first: `main`, then `commands`.
"""
