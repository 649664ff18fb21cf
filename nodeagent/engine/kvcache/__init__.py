"""KV below the device's: blocks that it had to give up wait in host memory, then in files.

A block's content lies under the digest of all tokens up to its end (and of its tenant's salt), so
it is the same whoever computed it, and files of the same model serve the next process too.
"""
