"""Windows for KV blocks that move between two processes of one node: memory that both map.

The receiver connects to the sender's socket, names the transfer's lease, and gets the window. The
sender fills slots of it, and sends the frames with their places over that connection. The receiver
takes the blocks from there, and releases their slots. A lease is 32 random hexadecimal digits that
no other process knows.

An engine fills windows for the other engines of its node, and for its agent, which sends the blocks
on to another node. An agent fills windows for its engines, with blocks of other nodes.

Rule 1: a slot is filled again only after the receiver has released it, or has closed its
connection. Until then the window belongs to this transfer, also after the transfer has failed.
Rule 2: a receiver keeps its connection until it has stopped reading.
Rule 3: the number of windows is bounded. Without a free one, blocks are sent through the sockets.
Rule 4: receivers keep windows mapped. So a window that an engine of one deployment has read is
never filled for another deployment.

Entry points: `window_pool.WindowPool` for senders, `received_window.received_window` for receivers.
"""
