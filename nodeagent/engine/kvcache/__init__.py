"""KV cache blocks: allocation and prefix cache on the device, and the tiers below it.

Blocks that the device evicts are kept in host memory, then in files. A block's content is stored
under the digest of all tokens up to its end and of the tenant's salt. The digest is therefore the
same in all processes, and files of the same model serve later processes too.

Entry points: `block_pool.BlockPool` for the device, `tier_setup.open_tiers` for the tiers below.
"""
