"""The command line of rlbuffer. Nothing here is imported by the library.

`commands` has one module per command, `render` the looks of what they print.
Open first: `main`, then `commands`.
"""
