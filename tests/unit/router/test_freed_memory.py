"""Memory of large bodies is used again without asking the kernel for it."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from router.freed_memory import keep_freed_memory

def use_twelve_mebibytes():
    bodies = [bytes([letter]) * (4 << 20) for letter in b"abc"]

{call}
use_twelve_mebibytes()
use_twelve_mebibytes()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use_twelve_mebibytes()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_causes_no_page_faults_when_it_is_used_again() -> None:
    faults = []
    for call in ("", "keep_freed_memory()"):
        command = [sys.executable, "-c", PROGRAM.format(call=call)]
        faults.append(int(subprocess.run(command, capture_output=True, check=True).stdout))
    assert faults[0] > 1000 > 100 > faults[1], faults
