"""The HTTP protocol between the broker (`nemo_gym.broker`) and its clients.

`models` defines the bodies, `problems` the errors, `frames` the output of execs, `routes` the paths and headers. The
broker, the ``remote`` provider and the tests share these modules and define no other part of the protocol.
"""
