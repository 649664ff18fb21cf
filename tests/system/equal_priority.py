"""Imported by agents of tests: engines on processors get no lower priority than their agents.

Where the kernel schedules sessions as groups, an engine beside other suites would otherwise get a
hundredth of a processor, and its fleet would idle for minutes until it is warm.
"""

from nodeagent.host import processes

vars(processes)["NICENESS"] = 0
