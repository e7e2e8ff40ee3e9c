"""Pages of a run: served to a web browser on this machine, or written as one file. One set of templates makes both."""
