"""Published policy versions: written, served, fetched, checked and loaded by name.

Modules import torch, this file does not. The announced versions and their layout in a folder live here; what is
trained does not.
Open first: `layout`, then `files`.
"""
