"""The command line of rlbuffer. Nothing here is imported by the library."""
