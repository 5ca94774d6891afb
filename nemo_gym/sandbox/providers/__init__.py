"""The sandbox providers of this distribution. Each is a module or small package, found through entry points.

`local` needs bubblewrap and a Linux kernel with overlayfs and namespaces; `apptainer` needs the same kernel and
Apptainer; `docker` needs a Docker Engine. Any importable class that implements `nemo_gym.sandbox.base.SandboxProvider`
can serve as a third-party provider.
"""
