"""The ranks as processes: started together, ended together.

Open first: `launcher`.
"""
