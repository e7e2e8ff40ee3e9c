"""Backups: a run as files, written and put back whole.

Open first: `backup`.
"""
