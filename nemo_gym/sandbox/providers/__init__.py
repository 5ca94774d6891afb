"""The sandbox providers of this distribution, each a module or small package; found through entry points.

`local` needs bubblewrap and a Linux kernel with overlayfs and namespaces, `apptainer` such a kernel and Apptainer,
`docker` a Docker Engine. A third party's provider is any importable class that implements
`nemo_gym.sandbox.base.SandboxProvider`.
"""
