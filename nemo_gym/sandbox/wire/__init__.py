"""What crosses HTTP between the broker (`nemo_gym.broker`) and its clients, in one place.

Bodies are in `models`, errors in `problems`, the output of execs in `frames`, paths and headers in `routes`. The
broker, the ``remote`` provider and the tests use these and nothing else.
"""
