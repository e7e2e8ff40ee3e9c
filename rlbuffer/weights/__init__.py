"""Published policy versions: written, served, fetched, checked and loaded by name.

Modules import torch, this file does not. What is announced to samplers, and how it lies in a folder, lives here; what
is trained does not.
Open first: `layout`, then `files`.
"""
