"""A loaded model that outlives the command: a private process on a unix socket, and the thin client that talks to it.

The client imports no torch. Read `protocol` (messages), `place` (sockets, and whose they are), `client`, `server`.
"""
