"""What crosses HTTP between the broker (``resources_servers/sandbox``) and its clients, in one place.

Bodies are in `boxes`, `execs`, `doors` and `capabilities` (bounds in `fields`), errors in `problems`, the output of
execs in `frames`, paths and headers in `routes`. The broker, the ``remote`` provider and the tests use these and
nothing else.
"""
