"""A producer's process keeps what a push has freed: otherwise every page of the next one is a fault."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
from rlbuffer.client.producer import keep_freed_memory

def push():
    return [bytes(26_000) for _ in range(400)]  # zeros, which are written to

def faults_of_a_push():
    push(), push()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        push()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10

print(faults_of_a_push(), end=" ")
keep_freed_memory()
print(faults_of_a_push())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
def test_the_second_push_of_ten_megabytes_faults_in_few_pages_again() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=environment)
    before, after = map(float, done.stdout.split())
    assert after < before / 5
